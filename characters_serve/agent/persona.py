"""In: what the user said, as words. Out: what the character answers. Knows no audio and no network.

A scripted conversation that uses what it hears: it answers about itself from its persona, remembers
the user's name and likes, does sums, and where it has nothing better it says back what it heard.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from datetime import datetime

from characters_serve.agent.spoken import (
    date_words,
    number_words,
    parse_number,
    solve,
    time_of_day,
    time_words,
)
from characters_serve.agent.understanding import alike, normalise, understand
from characters_serve.messages import Persona

MAX_WORDS = 40

_JOKES = (
    "Why did the scarecrow win a prize? Because he was outstanding in his field.",
    "I told my suitcase there is no holiday this year. Now I have emotional baggage.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why do bees have sticky hair? Because they use honeycombs.",
    "What did one wall say to the other? I will meet you at the corner.",
    "Why can you never trust stairs? They are always up to something.",
    "I would tell you a joke about time, but you did not like it tomorrow.",
    "What has four wheels and flies? A rubbish truck.",
)
_WONDERS = (
    "Octopuses have three hearts, and two of them stop when they swim.",
    "Honey never spoils. Some was found in old tombs, still good to eat.",
    "A day on Venus is longer than a year on Venus.",
    "Bananas are berries, but strawberries are not.",
    "Sea otters hold hands when they sleep, so that they do not drift apart.",
    "There are more trees on Earth than stars in our galaxy.",
    "A group of flamingos is called a flamboyance.",
    "Your nose can remember about fifty thousand smells.",
)
_NOT_NAMES = (
    "a an the not so very really just fine good great well happy sad tired bored sick lonely here "
    "back sorry sure okay from in at on glad doing going looking trying hungry cold hot afraid busy"
)
_HELLO = re.compile(r"^(?:hi|hello|hey)(?: there)?\b(?=[,.! ])", re.IGNORECASE)
_GREETS = re.compile(
    r"\b(?:hi|hello|hey|hullo|howdy|welcome|greetings|ahoy|good (?:day|morning|afternoon|evening))\b",
    re.IGNORECASE,
)
_NO_QUESTION_AFTER = frozenset({"goodbye", "repeat", "stop", "insult"})
# Facts with questions of their own.
_ASKED_FACTS = frozenset({"age", "home", "job", "favorite color", "favorite food", "fun fact"})
_QUESTIONS_BACK: dict[str, tuple[str, ...]] = {
    "name": ("What is your name?", "And what shall I call you?", "May I ask your name?"),
    "likes": ("What do you like to do?", "And what do you enjoy?", "What makes you happy?"),
    "feeling": ("How are you today?", "And how are you?", "How is your day so far?"),
}


class ScriptedPersona:
    """One session's conversation. The clock is an argument; the wording is seeded."""

    description = "a scripted persona, on this machine"

    def __init__(self, persona: Persona, seed: int) -> None:
        self._persona = persona
        self._random = random.Random(seed)
        self._decks: dict[str, list[str]] = {}
        self._facts = {
            normalise(key.replace("_", " ")): value for key, value in persona.facts.items()
        }
        self._told_facts: set[str] = set()
        self._asked: str | None = None
        self._turns_since_question = 1
        self._last_reply = ""
        self._last_topic = ""
        self.user_name: str | None = None
        self.user_likes: list[str] = []
        self.user_home: str | None = None

    # ------------------------------------------------------------ what the agent calls

    def greeting(self, now: datetime) -> str:
        """The persona's own greeting, after the time of day unless it greets by itself."""
        part = time_of_day(now)
        own = self._persona.greeting.strip()
        own = own.replace("{time_of_day}", part).replace("{name}", self._persona.name)
        if not own:
            own = f"I am {self._persona.name}. What would you like to talk about?"
        own, replaced = _HELLO.subn(f"Good {part}", own, count=1)
        if not replaced and not _GREETS.search(" ".join(own.split()[:6])):
            own = f"Good {part}. {own}"
        return self._remember(own)

    def reply(self, heard: str, now: datetime) -> str:
        """Never empty, never longer than about forty words."""
        text = normalise(heard)
        asked, self._asked = self._asked, None
        answer = (
            self._learn(text)
            or self._sum(text)
            or self._opinion(text)
            or self._about_fact(text)
            or self._understood(text, now)
            or self._answer_to(asked, text)
            or self._echo(text)
        )
        if self._last_topic not in _NO_QUESTION_AFTER:
            answer = self._maybe_ask_back(answer)
        return self._remember(answer)

    def pardon(self) -> str:
        """For speech in which no word was recognised."""
        return self._pick(
            "pardon",
            (
                "I did not catch that. Could you say it again?",
                "Sorry, I missed that. Once more, please?",
                "I heard you, but not the words. Could you repeat it?",
            ),
        )

    def apology(self) -> str:
        """For a reply that failed on our side."""
        return self._pick(
            "apology",
            (
                "I am sorry, I lost my train of thought. Could you ask me again?",
                "Oh, my mind went blank just now. Please ask me again.",
            ),
        )

    # ------------------------------------------------------------ what it learns

    def _learn(self, text: str) -> str | None:
        """Takes up "my name is ...", "I like ...", "I live in ..."; None when nothing is told."""
        self._last_topic = ""
        if match := re.search(r"\b(?:my name is|call me|people call me) (\w+)", text):
            return self._meet(match[1])
        match = re.fullmatch(r"(?:hello |hi |hey )?(?:i am|this is) (\w+)", text)
        if match and match[1] not in _NOT_NAMES.split() and understand(text) is None:
            return self._meet(match[1])
        if match := re.search(
            r"^(?:and |yes |but )?i (?:really |also )?(?:like|love|enjoy) (?!you\b)(.+)$", text
        ):
            return self._liked(match[1])
        if match := re.search(r"\bi (?:live in|am from|come from) (?:the )?(.+)$", text):
            self.user_home = _clip(_to_you(match[1]), 6)
            return self._pick(
                "user_home",
                (
                    f"{_capital(self.user_home)}! I would love to see it one day.",
                    f"So you are from {self.user_home}. What is it like there?",
                    f"{_capital(self.user_home)} sounds like a good place to be.",
                ),
            )
        if match := re.search(r"\bi am (.+?) years? old$", text):
            age = parse_number(match[1].split())
            if age is not None and age < 130:
                return f"{_capital(number_words(age))}! A very good age, if you ask me."
        return None

    def _meet(self, name: str) -> str:
        self.user_name = name.capitalize()
        self._last_topic = "name"
        return self._pick(
            "meet",
            (
                f"Nice to meet you, {self.user_name}. I am {self._persona.name}.",
                f"Hello {self.user_name}, what a good name. I will remember it.",
                f"{self.user_name}. I am happy to know you.",
            ),
        )

    def _liked(self, thing: str) -> str:
        thing = _clip(_to_you(thing), 8)
        if thing not in self.user_likes:
            self.user_likes = [*self.user_likes, thing][-5:]
        mine = next(
            (like for like in self._persona.likes if alike(like.lower(), thing) > 0.75), None
        )
        if mine:
            return self._pick(
                "liked_too",
                (f"I like {mine} too! We have that in common.", f"Really? I love {mine} as well."),
            )
        return self._pick(
            "liked",
            (
                f"You like {thing}. Tell me what is best about it.",
                f"{_capital(thing)}, how lovely. When did that begin?",
                f"I can see why you like {thing}.",
                f"{_capital(thing)}. I will remember that about you.",
            ),
        )

    def _answer_to(self, asked: str | None, text: str) -> str | None:
        """A bare answer to the question it asked last."""
        words = re.sub(r"^(?:it is|i am|you can call me)\b", "", text).split()
        if asked == "name" and 1 <= len(words) <= 2 and words[0] not in _NOT_NAMES.split():
            return self._meet(words[0])
        if asked == "likes" and 1 <= len(words) <= 6:
            return self._liked(" ".join(words))
        if asked == "feeling" and 1 <= len(words) <= 6:
            return self._pick(
                "feeling", ("I see. Thank you for telling me.", "I am glad that you told me.")
            )
        return None

    # ------------------------------------------------------------ what it knows

    def _sum(self, text: str) -> str | None:
        words = text.split()
        asks = len(words) <= 6 or re.search(r"\b(?:what|how much|calculate|count)\b", text)
        return solve(text) if asks else None

    def _opinion(self, text: str) -> str | None:
        match = re.fullmatch(
            r"(?:do|would) you (?:also |really )?(?:like|love|enjoy) (?:to )?(.+?)(?: too)?", text
        )
        if match is None or match[1] in ("me", "it", "that", "this", "eat", "do"):
            return None
        thing = _clip(_to_you(match[1]), 6)
        mine = next(
            (like for like in self._persona.likes if alike(like.lower(), match[1]) > 0.7), None
        )
        if mine:
            return self._pick(
                "opinion_yes",
                (f"Oh yes, I love {mine}.", f"Very much. {_capital(mine)} makes me happy."),
            )
        return self._pick(
            "opinion",
            (
                f"I know too little about {thing}. Do you like it?",
                f"I might, if you tell me about {thing}.",
                f"{_capital(thing)}? I am curious about it.",
            ),
        )

    def _understood(self, text: str, now: datetime) -> str | None:
        understood = understand(text)
        if understood is None:
            return None
        intent = understood.intent
        if intent == "another" and self._last_reply:
            intent = "joke" if self._last_reply.startswith(_JOKES) else "tell_something"
        self._last_topic = intent
        match intent:
            case "time":
                return f"It is {time_words(now)}."
            case "date":
                return f"Today is {date_words(now)}."
            case "repeat":
                return self._last_reply or "I have not said anything yet."
            case "ask_age" | "ask_home" | "ask_job" | "ask_color" | "ask_food":
                return self._fact(intent.removeprefix("ask_"))
            case _:
                return self._pick(intent, self._wordings(intent, now))

    def _wordings(self, intent: str, now: datetime) -> Sequence[str]:
        name = self._persona.name
        you = f", {self.user_name}" if self.user_name else ""
        match intent:
            case "ask_name":
                return (f"My name is {name}.", f"I am {name}.", f"You can call me {name}.")
            case "recall_name":
                if self.user_name is None:
                    self._asked = "name"
                    return ("You have not told me yet. What is your name?",)
                return (
                    f"You are {self.user_name}.",
                    f"Your name is {self.user_name}. I remembered.",
                )
            case "recall_likes":
                return (self._about_user(),)
            case "ask_likes":
                return self._own_likes()
            case "how_are_you":
                self._asked = "feeling"
                return (
                    f"I am very well, thank you{you}. How are you?",
                    "I feel wonderful today. And you?",
                    f"All is well here{you}. How is your day?",
                )
            case "ask_abilities":
                return (
                    "We can talk. Ask me about myself, the time, a sum, or for a joke.",
                    "I listen and I answer. Try a joke, a sum, or tell me what you like.",
                )
            case "ask_maker":
                return (
                    "Someone gave me one picture. A small model draws all my moves while I talk.",
                    "I am made from a single picture. A computer imagines the rest as we speak.",
                )
            case "ask_what_this_is":
                return (
                    f"I am {name}, a character made from one picture, drawn live while we talk.",
                    "This is a live conversation. I am a picture that learned to talk.",
                )
            case "about_yourself":
                return (self._introduction(),)
            case "joke":
                return _JOKES
            case "tell_something" | "another":
                fun = self._facts.get("fun fact")
                return (*((_as_sentence(fun),) if fun else ()), *_WONDERS)
            case "weather":
                return ("I have no window here. What is it like where you are?",)
            case "can_you_hear":
                return (f"I hear you{you}. Go on.", "Loud and clear.", "Yes, I am listening.")
            case "hello":
                return (
                    f"Hello{you}. It is good to hear your voice.",
                    f"Good {time_of_day(now)}{you}. I am {name}.",
                    f"Hi{you}. I was hoping you would talk to me.",
                )
            case "goodbye":
                return (
                    f"Goodbye{you}. I enjoyed our talk.",
                    f"See you soon{you}. Take care.",
                    f"Bye{you}. Come back any time.",
                )
            case "thanks":
                return (f"You are welcome{you}.", "With pleasure.", "Any time.")
            case "sorry":
                return ("No need to be sorry.", "That is quite all right.")
            case "praise":
                return (
                    f"That is kind of you{you}.",
                    "Oh, you make me smile.",
                    "Thank you. I like talking with you.",
                )
            case "insult":
                return ("Let us be kind to each other.", "I will try to do better.")
            case "stop":
                return ("All right. I am listening.", "Okay. Take your time.")
            case "yes":
                return ("Good. Tell me more.", "I thought so. Go on.", "Wonderful. And then?")
            case "no":
                return (
                    "All right. What would you rather talk about?",
                    "No? Then tell me something else.",
                )
            case "feel_well":
                return (f"I am glad to hear that{you}.", "That makes me happy too.")
            case "feel_bad":
                return (
                    f"I am sorry to hear that{you}. Do you want to tell me about it?",
                    "That sounds hard. I am here, and I am listening.",
                )
            case "sing":
                return ("La, la, la. I am better at talking than at singing.",)
        raise AssertionError(f"no wording for {intent}")

    def _fact(self, topic: str) -> str:
        key = {"color": "favorite color", "food": "favorite food"}.get(topic, topic)
        value = self._facts.get(key)
        if value is None:
            return self._pick(
                f"no_{topic}",
                {
                    "age": (
                        "I was made not long ago, so I am very young.",
                        "I never counted. Young, I think.",
                    ),
                    "home": (
                        "I live right here, on your screen.",
                        "My home is a small computer, not far away.",
                    ),
                    "job": (
                        "I talk with people. It is the best work there is.",
                        "Talking with you is what I do.",
                    ),
                    "color": ("I like every colour that I am painted in.",),
                    "food": ("I do not eat, but I like to hear about good food.",),
                }[topic],
            )
        if _is_sentence(value):
            return _as_sentence(value)
        value = value.strip().rstrip(".")
        match topic:
            case "age":
                value = number_words(int(value)) if re.fullmatch(r"\d{1,9}", value) else value
                years = (
                    ""
                    if re.search(r"\b(?:years?|old|months?|days?|young|\w+less)\b", value)
                    else " years old"
                )
                return f"I am {value}{years}."
            case "home":
                place = (
                    value
                    if re.match(
                        r"(?:in|on|at|by|near|under|above|beside|behind|among|inside)\b", value
                    )
                    else None
                )
                return f"I live {place or 'in ' + value}."
            case "job":
                return (
                    f"I am {value}." if re.match(r"(?:an?|the)\b", value) else f"My job is {value}."
                )
            case "color":
                return self._pick(
                    "color", (f"My favourite colour is {value}.", f"I like {value} best.")
                )
            case _:
                return self._pick(
                    "food", (f"My favourite food is {value}.", f"I could eat {value} every day.")
                )

    def _about_fact(self, text: str) -> str | None:
        """Any other fact of the persona whose key was named: "tell me about your garden"."""
        words = text.split()
        for key, value in self._facts.items():
            last = key.split()[-1]
            if key not in _ASKED_FACTS and len(last) >= 3 and "your" in words and last in words:
                if _is_sentence(value):
                    return _as_sentence(value)
                key = key.replace("favorite", "favourite").replace("color", "colour")
                return _as_sentence(f"my {key} is {value}")
        return None

    def _own_likes(self) -> Sequence[str]:
        likes = self._persona.likes
        if not likes:
            return ("I like a good conversation.", "Most of all, I like listening to people.")
        first = self._random.sample(likes, min(2, len(likes)))
        listed = " and ".join(first)
        return (
            f"I like {listed}.",
            f"I love {listed}.",
            f"{_capital(listed)}. That is what I like.",
        )

    def _about_user(self) -> str:
        known: list[str] = []
        if self.user_name:
            known.append(f"your name is {self.user_name}")
        if self.user_likes:
            known.append(f"you like {' and '.join(self.user_likes[-2:])}")
        if self.user_home:
            known.append(f"you are from {self.user_home}")
        if not known:
            self._asked = "likes"
            return "I do not know much about you yet. What do you like?"
        return _as_sentence(f"I remember that {', and '.join(known)}")

    def _introduction(self) -> str:
        parts = [f"I am {self._persona.name}."]
        for topic in ("job", "home"):
            if topic in self._facts:
                parts.append(self._fact(topic))
        if self._persona.likes:
            parts.append(f"I like {self._persona.likes[0]}.")
        return " ".join(parts) if len(parts) > 1 else f"{parts[0]} I like to talk with people."

    def _echo(self, text: str) -> str:
        """Nothing better: what was understood, said back, so that the user can correct it."""
        thing = _clip(_to_you(text), 12)
        return self._pick(
            "echo",
            (
                f"I heard: {thing}. Tell me more.",
                f"You said: {thing}. Is that right?",
                f"{_capital(thing)}. What makes you think of that?",
                f"I understood: {thing}. I have no good answer, but go on.",
            ),
        )

    # ------------------------------------------------------------ how it says things

    def _maybe_ask_back(self, answer: str) -> str:
        self._turns_since_question += 1
        if answer.endswith("?") or self._asked or self._turns_since_question < 3:
            if answer.endswith("?"):
                self._turns_since_question = 0
            return answer
        if len(answer.split()) > 20 or self._random.random() < 0.4:
            return answer
        topic = "name" if self.user_name is None else "likes" if not self.user_likes else "feeling"
        self._asked = topic
        self._turns_since_question = 0
        return f"{answer} {self._pick('ask_' + topic + '_back', _QUESTIONS_BACK[topic])}"

    def _remember(self, reply: str) -> str:
        reply = _clip(reply, MAX_WORDS)
        self._last_reply = reply
        return reply

    def _pick(self, kind: str, options: Sequence[str]) -> str:
        """One of the options, none twice before all were used."""
        deck = [option for option in self._decks.get(kind, []) if option in options]
        if not deck:
            deck = list(options)
            self._random.shuffle(deck)
        choice = deck.pop()
        self._decks[kind] = deck
        return choice


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _is_sentence(value: str) -> bool:
    return bool(
        re.match(r"(?:I|I'm|I've|My|We|It|There|Once|People|Nobody|Every)\b", value.strip())
    )


def _as_sentence(value: str) -> str:
    value = _capital(value.strip())
    return value if value.endswith((".", "!", "?")) else f"{value}."


def _clip(text: str, words: int) -> str:
    """At most so many words; a longer text ends at a sentence if it can."""
    pieces = text.split()
    if len(pieces) <= words:
        return text
    head = " ".join(pieces[:words])
    end = max(head.rfind(mark) for mark in ".!?")
    return head[: end + 1] if end > 0 else head.rstrip(",;:")


_TURNED = {
    "i": "you",
    "me": "you",
    "my": "your",
    "mine": "yours",
    "am": "are",
    "myself": "yourself",
}
_TURNED_BACK = {"you": "me", "your": "my", "yours": "mine", "yourself": "myself"}


def _to_you(text: str) -> str:
    """The user's words from the character's side: "my 2 dogs and you" is "your two dogs and me"."""
    words = [_TURNED.get(word) or _TURNED_BACK.get(word) or word for word in text.split()]
    return " ".join(re.sub(r"\d{1,9}", lambda m: number_words(int(m[0])), word) for word in words)
