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
from characters_serve.agent.wordings import ABOUT, WONDERS, WORDINGS
from characters_serve.messages import Persona

MAX_WORDS = 40

_NOT_NAMES = (
    "a an the not so very really just fine good great well happy sad tired bored sick lonely here "
    "back sorry sure okay from in at on glad doing going looking trying hungry cold hot afraid "
    "busy yes no why what who how where when hello hi thanks thank"
)
_HELLO = re.compile(r"^(?:hi|hello|hey)(?: there)?\b(?=[,.! ])", re.IGNORECASE)
_GREETS = re.compile(
    r"\b(?:hi|hiya|hello|hey|hullo|howdy|welcome|greetings|ahoy)\b"
    r"|\bgood (?:day|morning|afternoon|evening)\b",
    re.IGNORECASE,
)
_QUESTION = re.compile(
    r"(?:what|who|why|how|when|where|which|is|are|do|does|did|can|could|will|would|have|has)\b"
)
_WELL = re.compile(r"\b(?:good|great|fine|well|happy|wonderful|excellent|better|fantastic)\b")
_UNWELL = re.compile(r"\b(?:sad|bad|tired|sick|ill|lonely|awful|terrible|died|dead|lost|hurts?)\b")
_NO_QUESTION_AFTER = frozenset({"goodbye", "repeat", "stop", "insult", "feel_bad"})
# Facts with questions of their own.
_ASKED_FACTS = ("age", "home", "job", "favorite color", "favorite food", "fun fact")
_ASKS_BACK = {"how_are_you": "feeling"}


class ScriptedPersona:
    """One session's conversation. The clock is an argument; the wording is seeded."""

    description = "a scripted persona, on this machine"

    def __init__(self, persona: Persona, seed: int) -> None:
        self._persona = persona
        self._random = random.Random(seed)
        self._decks: dict[str, list[str]] = {}
        self._facts = {
            normalise(key.replace("_", " ")): fact for key, fact in persona.facts.items()
        }
        self._fun_fact = self._facts.get("fun fact")
        self._asked: str | None = None
        self._turns_since_question = 1
        self._part = "day"
        self._last_reply = ""
        self._last_intent = ""
        self._last_told = "tell_something"
        self.user_name: str | None = None
        self.user_likes: list[str] = []
        self.user_home: str | None = None

    # ------------------------------------------------------------ what the agent calls

    def greeting(self, now: datetime) -> str:
        """The persona's own greeting, after the time of day unless it greets in its own manner."""
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
        self._part = time_of_day(now)
        self._last_intent = ""
        asked, self._asked = self._asked, None
        answer = (
            self._told(text)
            or self._sum(text)
            or self._named_fact(text)
            or self._opinion(text)
            or self._understood(text, now)
            or self._answer_to(asked, text)
            or self._mood(text)
            or self._topic(text)
            or self._echo(text)
        )
        if self._last_intent not in _NO_QUESTION_AFTER:
            answer = self._maybe_ask_back(answer)
        return self._remember(answer)

    def pardon(self) -> str:
        """For speech in which no word was recognised."""
        return self._say("pardon")

    def filler(self) -> str:
        """Said while a reply takes its time."""
        return self._say("filler")

    def apology(self) -> str:
        """For a reply that failed on our side."""
        return self._say("apology")

    # ------------------------------------------------------------ what it is told

    def _told(self, text: str) -> str | None:
        """Takes up "my name is ...", "I like ...", "I live in ..."."""
        if match := re.search(r"\b(?:my name is|call me|people call me) (\w+)", text):
            return self._meet(match[1])
        match = re.fullmatch(r"(?:hello |hi |hey )?(?:i am|this is) (\w+)", text)
        if match and match[1] not in _NOT_NAMES.split() and understand(text) is None:
            return self._meet(match[1])
        likes = r"^(?:and |yes |but )?i (?:really |also )?(?:like|love|enjoy) (?!you\b)(.+)$"
        if match := re.search(likes, text):
            return self._liked(match[1])
        if match := re.search(r"\bi (?:live in|am from|come from) (?:the )?(.+)$", text):
            self.user_home = _clip(_turned(match[1]), 5).title()
            return self._about("home", self.user_home)
        if match := re.search(r"\bi am (.+?) years? old$", text):
            age = parse_number(match[1].split())
            if age is not None and age < 130:
                return f"{_capital(number_words(age))}! A very good age, if you ask me."
        return None

    def _meet(self, name: str) -> str:
        self.user_name = name.capitalize()
        return self._pick(
            "meet",
            (
                f"Nice to meet you, {self.user_name}. I am {self._persona.name}.",
                f"Hello {self.user_name}, what a good name. I will remember it.",
                f"{self.user_name}. I am happy to know you.",
            ),
        )

    def _liked(self, words: str) -> str:
        thing = _clip(_turned(words), 8)
        if thing not in self.user_likes:
            self.user_likes = [*self.user_likes, thing][-5:]
        mine = self._shared_like(thing)
        return self._about("liked_too", mine) if mine else self._about("liked", thing)

    def _shared_like(self, thing: str) -> str | None:
        likes = self._persona.likes
        return next((like for like in likes if alike(like.lower(), thing) > 0.75), None)

    def _answer_to(self, asked: str | None, text: str) -> str | None:
        """A bare answer to the question that it asked last."""
        words = re.sub(r"^(?:it is|i am|you can call me)\b", "", text).split()
        if asked == "name" and 1 <= len(words) <= 2 and words[0] not in _NOT_NAMES.split():
            return self._meet(words[0])
        if asked == "likes" and 1 <= len(words) <= 5 and not _QUESTION.match(text):
            return self._liked(" ".join(words))
        return None

    def _mood(self, text: str) -> str | None:
        """How the user is, in words of their own: "my dog died", "doing great"."""
        if _QUESTION.match(text):
            return None
        if _UNWELL.search(text) and re.search(r"\b(?:i|my|me)\b", text):
            self._last_intent = "feel_bad"
            return self._say("feel_bad")
        return self._say("feel_well") if _WELL.search(text) and len(text.split()) <= 6 else None

    # ------------------------------------------------------------ what it knows

    def _sum(self, text: str) -> str | None:
        asks = len(text.split()) <= 6 or re.search(r"\b(?:what|how much|calculate|count)\b", text)
        return solve(text) if asks else None

    def _opinion(self, text: str) -> str | None:
        form = r"(?:do|would) you (?:also |really )?(?:like|love|enjoy) (?:to )?(.+?)(?: too)?"
        match = re.fullmatch(form, text)
        if match is None or match[1] in ("me", "it", "that", "this", "eat", "do"):
            return None
        mine = self._shared_like(match[1])
        if mine:
            return self._about("opinion_yes", mine)
        return self._about("opinion", _clip(_turned(match[1]), 6))

    def _named_fact(self, text: str) -> str | None:
        """Any fact of the persona whose key was named: "your dog", "your favourite movie"."""
        words = text.split()
        for key, value in self._facts.items():
            last = key.split()[-1]
            if key not in _ASKED_FACTS and len(last) >= 3 and "your" in words and last in words:
                return value_sentence(key, value)
        if match := re.search(r"\byour favorite (\w+)", text):
            key = f"favorite {match[1]}"
            if key in self._facts:
                return value_sentence(key, self._facts[key])
            if match[1] not in ("color", "food", "thing", "things"):
                return self._about("favorite", match[1])
        return None

    def _understood(self, text: str, now: datetime) -> str | None:
        understood = understand(text)
        if understood is None:
            return None
        intent = self._last_told if understood.intent == "another" else understood.intent
        self._last_intent = intent
        self._asked = _ASKS_BACK.get(intent)
        match intent:
            case "time":
                return f"It is {time_words(now)}."
            case "date":
                return f"Today is {date_words(now)}."
            case "repeat":
                return self._last_reply or "I have not said anything yet."
            case "ask_age" | "ask_home" | "ask_job":
                return self._fact(intent.removeprefix("ask_"))
            case "ask_color" | "ask_food":
                return self._fact(intent.replace("ask_", "favorite "))
            case "recall_name":
                return self._recall_name()
            case "recall_likes":
                return self._recall_user()
            case "ask_likes":
                return self._own_likes()
            case "about_yourself":
                return self._introduction()
            case "tell_something":
                self._last_told = intent
                fun, self._fun_fact = self._fun_fact, None
                return _as_sentence(fun) if fun else self._pick(intent, WONDERS)
            case "joke":
                self._last_told = intent
        return self._say(intent)

    def _fact(self, key: str) -> str:
        value = self._facts.get(key)
        if value is None:
            return self._say(f"no_{key.replace(' ', '_')}")
        return value_sentence(key, value)

    def _own_likes(self) -> str:
        likes = self._persona.likes
        if not likes:
            return self._say("no_likes")
        listed = " and ".join(self._random.sample(likes, min(2, len(likes))))
        return self._random.choice(
            (f"I like {listed}.", f"I love {listed}.", f"{_capital(listed)}. That is what I like.")
        )

    def _recall_name(self) -> str:
        if self.user_name is None:
            self._asked = "name"
            return "You have not told me yet. What is your name?"
        return self._pick(
            "recall_name",
            (f"You are {self.user_name}.", f"Your name is {self.user_name}. I remembered."),
        )

    def _recall_user(self) -> str:
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
        *first, last = known
        return f"I remember that {', '.join(first)}{' and ' if first else ''}{last}."

    def _introduction(self) -> str:
        parts = [f"I am {self._persona.name}."]
        parts += [self._fact(key) for key in ("job", "home") if key in self._facts]
        if self._persona.likes:
            parts.append(f"I like {self._persona.likes[0]}.")
        return " ".join(parts) if len(parts) > 1 else f"{parts[0]} I like to talk with people."

    def _topic(self, text: str) -> str | None:
        """What it can say of any subject, or of any skill."""
        about = r"\b(?:tell me|think|know|talk|say|heard) (?:\w+ )?(?:about|of) (.+)$"
        if match := re.search(about, text):
            return self._about("topic", _clip(_turned(match[1]), 8))
        if match := re.fullmatch(r"can you (.+)", text):
            return self._about("can_not", _clip(_turned(match[1]), 6))
        return None

    def _echo(self, text: str) -> str:
        """Nothing better: what was understood, said back, so that the user can correct it."""
        if _QUESTION.match(text):
            return self._about("asked", _clip(_spelled(text), 12))
        return self._about("echo", _clip(_turned(text), 12))

    # ------------------------------------------------------------ how it says things

    def _maybe_ask_back(self, answer: str) -> str:
        self._turns_since_question += 1
        if answer.endswith("?") or self._asked:
            self._turns_since_question = 0
            return answer
        wordy = len(answer.split()) > 20
        if wordy or self._turns_since_question < 3 or self._random.random() < 0.4:
            return answer
        topic = "name" if self.user_name is None else "likes" if not self.user_likes else "feeling"
        self._asked = topic
        self._turns_since_question = 0
        return f"{answer} {self._say(f'back_{topic}')}"

    def _remember(self, reply: str) -> str:
        self._last_reply = _clip(reply, MAX_WORDS)
        return self._last_reply

    def _say(self, kind: str) -> str:
        you = f", {self.user_name}" if self.user_name else ""
        return self._pick(kind, WORDINGS[kind]).format(
            name=self._persona.name, part=self._part, you=you
        )

    def _about(self, kind: str, thing: str) -> str:
        return self._pick(kind, ABOUT[kind]).format(thing=thing, Thing=_capital(thing))

    def _pick(self, kind: str, options: Sequence[str]) -> str:
        """One of the options, none twice before all were used."""
        deck = [option for option in self._decks.get(kind, []) if option in options]
        if not deck:
            deck = list(options)
            self._random.shuffle(deck)
        choice = deck.pop()
        self._decks[kind] = deck
        return choice


def value_sentence(key: str, value: str) -> str:
    """A persona's fact as the character says it of itself."""
    value = value.strip()
    if re.match(r"(?:I|I'm|I've|My|We|It|There|Once|People|Nobody|Every)\b", value):
        return _as_sentence(value)
    value = value.rstrip(".")
    match key:
        case "age":
            value = number_words(int(value)) if re.fullmatch(r"\d{1,9}", value) else value
            whole = re.search(r"\b(?:years?|old|months?|days?|young|\w+less)\b", value)
            return f"I am {value}{'' if whole else ' years old'}."
        case "home":
            place = re.match(
                r"(?:in|on|at|by|near|under|above|beside|behind|among|inside)\b", value
            )
            return f"I live {value if place else f'in {value}'}."
        case "job":
            if re.match(r"(?:an?|the)\b", value):
                return f"I am {value}."
            if re.match(r"to\b|\w+ing (?:an?|the|my|people|things|for|in|at|on|with)\b", value):
                return f"My job is {value}."
            return f"I am {'an' if value[:1].lower() in 'aeiou' else 'a'} {value}."
    key = key.replace("favorite", "favourite").replace("color", "colour")
    return f"My {key} is {value}."


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


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
    "you": "me",
    "your": "my",
    "yours": "mine",
    "yourself": "myself",
}


def _turned(text: str) -> str:
    """The user's words from the character's side: "my 2 dogs and you" is "your two dogs and me"."""
    text = re.sub(r"\byou are\b", "I am", text)
    text = re.sub(r"\byou (?=(?:can|do|did|have|will|would|could|should|know|like)\b)", "I ", text)
    return _spelled(" ".join(_TURNED.get(word, word) for word in text.split()))


def _spelled(text: str) -> str:
    return re.sub(r"\d{1,9}", lambda digits: f" {number_words(int(digits[0]))} ", text).strip()
