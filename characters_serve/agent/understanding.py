"""In: what a recogniser thinks it heard. Out: the one intent it comes closest to. Knows no persona.

Small recognisers get about a third of short questions slightly wrong ("where you from", "how're you
today", "i you robots"), so a match is a likeness between 0 and 1, never an equality.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache

_CONTRACTIONS = {
    "what's": "what is",
    "who's": "who is",
    "where's": "where is",
    "how's": "how is",
    "that's": "that is",
    "it's": "it is",
    "i'm": "i am",
    "i've": "i have",
    "i'd": "i would",
    "you're": "you are",
    "how're": "how are",
    "what're": "what are",
    "don't": "do not",
    "can't": "can not",
    "cannot": "can not",
    "didn't": "did not",
    "let's": "let us",
    "name's": "name is",
    "favourite": "favorite",
    "colour": "color",
    "colours": "color",
    "hobbies": "hobby",
    "u": "you",
    "ur": "your",
    "ya": "you",
}
_FILLERS = {
    "um",
    "uh",
    "er",
    "erm",
    "hmm",
    "mm",
    "well",
    "so",
    "please",
    "okay",
    "ok",
    "huh",
    "ah",
    "oh",
}

# Phrases of each intent, as they come after normalisation. The first of equals wins.
_PHRASES: dict[str, tuple[str, ...]] = {
    "ask_name": (
        "what is your name",
        "who are you",
        "tell me your name",
        "your name",
        "what are you called",
        "what should i call you",
        "may i ask your name",
    ),
    "recall_name": (
        "what is my name",
        "do you know my name",
        "who am i",
        "do you remember my name",
    ),
    "recall_likes": (
        "what do i like",
        "do you remember what i like",
        "what do you know about me",
        "do you remember me",
        "what did i tell you",
    ),
    "ask_age": ("how old are you", "what is your age", "when were you born", "your age"),
    "ask_home": (
        "where do you live",
        "where are you from",
        "where do you come from",
        "where is your home",
        "what is your home like",
        "where are you",
    ),
    "ask_job": (
        "what do you do",
        "what is your job",
        "what do you do for a living",
        "what is your work",
        "do you work",
        "what do you do all day",
    ),
    "ask_color": ("what is your favorite color", "which color do you like", "favorite color"),
    "ask_food": (
        "what is your favorite food",
        "what do you like to eat",
        "what do you eat",
        "favorite food",
        "are you hungry",
    ),
    "ask_likes": (
        "what do you like",
        "what do you like to do",
        "what are your hobby",
        "do you have any hobby",
        "what do you enjoy",
        "what makes you happy",
        "what are you interested in",
        "what do you do for fun",
        "what is your favorite thing",
    ),
    "how_are_you": (
        "how are you",
        "how are you today",
        "how are you doing",
        "how do you feel",
        "how is it going",
        "are you okay",
        "what is up",
    ),
    "ask_abilities": (
        "what can you do",
        "can you help me",
        "what are you able to do",
        "what can i ask you",
        "what can we talk about",
        "help",
        "what can i say",
    ),
    "ask_maker": (
        "who made you",
        "who created you",
        "who built you",
        "who invented you",
        "how were you made",
        "how do you work",
    ),
    "ask_what_this_is": (
        "what is this",
        "what are you",
        "are you real",
        "are you a robot",
        "are you human",
        "are you an ai",
        "are you alive",
        "are you a computer",
        "are you a real person",
        "are you artificial intelligence",
        "where am i",
        "what is this place",
    ),
    "about_yourself": (
        "tell me about yourself",
        "introduce yourself",
        "tell me something about you",
        "tell me more about you",
        "describe yourself",
    ),
    "joke": (
        "tell me a joke",
        "make me laugh",
        "say something funny",
        "do you know a joke",
        "a joke",
    ),
    "another": (
        "another one",
        "one more",
        "again another",
        "tell me another",
        "tell me another one",
    ),
    "tell_something": (
        "tell me something",
        "tell me something interesting",
        "tell me a story",
        "tell me a fun fact",
        "say something",
        "talk to me",
        "i am bored",
        "surprise me",
    ),
    "time": ("what time is it", "what is the time", "tell me the time", "do you have the time"),
    "date": (
        "what day is it",
        "what day is it today",
        "what is the date",
        "what is today",
        "which day is today",
    ),
    "weather": ("what is the weather like", "how is the weather", "is it raining", "is it sunny"),
    "repeat": (
        "repeat that",
        "can you repeat that",
        "say that again",
        "say it again",
        "what did you say",
        "come again",
        "pardon",
        "i did not hear you",
        "i did not understand",
    ),
    "can_you_hear": (
        "can you hear me",
        "are you there",
        "are you listening",
        "test test",
        "can you see me",
    ),
    "hello": (
        "hello",
        "hi",
        "hey",
        "hi there",
        "hello there",
        "good morning",
        "good afternoon",
        "good evening",
    ),
    "nice_to_meet_you": (
        "nice to meet you",
        "nice to meet you too",
        "pleased to meet you",
        "good to meet you",
    ),
    "do_not_know": ("i do not know", "i have no idea", "no idea", "i am not sure", "maybe"),
    "why": ("why", "why not", "why is that", "how come"),
    "goodbye": (
        "goodbye",
        "good bye",
        "bye",
        "bye bye",
        "see you",
        "see you later",
        "good night",
        "i have to go",
        "talk to you later",
    ),
    "thanks": ("thank you", "thanks", "thank you very much", "thanks a lot", "that is very kind"),
    "sorry": ("sorry", "i am sorry", "excuse me"),
    "praise": (
        "you are great",
        "you are funny",
        "you are nice",
        "you are beautiful",
        "i like you",
        "i love you",
        "that is great",
        "that is funny",
        "very good",
        "well done",
        "cool",
        "wow",
    ),
    "insult": (
        "you are stupid",
        "you are ugly",
        "i hate you",
        "you are boring",
        "shut up",
        "go away",
    ),
    "stop": ("stop", "stop it", "be quiet", "stop talking", "wait", "hold on"),
    "yes": ("yes", "yeah", "yep", "sure", "of course", "i do", "right", "that is right", "exactly"),
    "no": ("no", "nope", "not really", "no thank you", "i do not", "never"),
    "feel_well": (
        "i am fine",
        "i am good",
        "fine thank you",
        "i am well",
        "i am happy",
        "very well",
        "good and you",
        "i am doing great thanks",
        "i am doing well thank you",
        "i am good thanks",
        "great thanks",
        "very good thank you",
    ),
    "feel_bad": (
        "i am tired",
        "i am sad",
        "i am not well",
        "not so good",
        "i am sick",
        "i feel bad",
        "i am lonely",
    ),
    "sing": ("sing a song", "can you sing", "sing something", "sing for me"),
}
_INTENTS = {phrase: intent for intent, phrases in reversed(_PHRASES.items()) for phrase in phrases}
# Words that hardly tell one question from another.
_COMMON_WORDS = (
    "a an the is are am do does did can could would will you your i me my it this that to of for "
    "in and what tell say about some there be was were have so"
)
_COMMON = frozenset(_COMMON_WORDS.split())
# Below this likeness the answer would be a guess. Measured on a table of misheard questions.
THRESHOLD = 0.72


# What a user tells or asks about a thing of their own choice; the persona takes up the rest.
_OPEN_FORMS = re.compile(
    r"\b(?:my name is|call me|i live in|i am from|i come from) \w"
    r"|\bi (?:really |also )?(?:like|love|enjoy) (?!you\b)\w"
    r"|\b(?:do|would) you (?:like|love|enjoy) \w"
)
# Not listened for: a recogniser that expects them hears them in what was no insult.
_UNEXPECTED = frozenset({"insult", "praise"})


@dataclass(frozen=True)
class Understood:
    intent: str
    likeness: float


def normalise(text: str) -> str:
    """Lower case, plain words, contractions open, fillers gone."""
    words = re.findall(r"[a-z0-9']+", text.lower().replace("’", "'"))
    plain = " ".join(_CONTRACTIONS.get(word, word) for word in words)
    kept = [word.strip("'") for word in plain.split() if word not in _FILLERS]
    return " ".join(word for word in kept if word) or plain


@lru_cache(maxsize=256)
def understand(normalised: str) -> Understood | None:
    if normalised in _INTENTS:
        return Understood(_INTENTS[normalised], 1.0)
    best: Understood | None = None
    for intent, phrases in _PHRASES.items():
        for phrase in phrases:
            likeness = _likeness(normalised, phrase, at_least=best.likeness if best else 0.0)
            if best is None or likeness > best.likeness:
                best = Understood(intent, likeness)
    return best if best is not None and best.likeness >= THRESHOLD else None


def known_phrases() -> list[str]:
    """All phrases worth listening for, each once."""
    phrases = {
        phrase
        for intent, phrases in _PHRASES.items()
        if intent not in _UNEXPECTED
        for phrase in phrases
    }
    return sorted(phrases)


def is_clear(heard: str) -> bool:
    """Whether the words need no second guess: a known phrase, or a known form around new words."""
    text = normalise(heard)
    if _OPEN_FORMS.search(text):
        return True
    understood = understand(text)
    return understood is not None and understood.likeness >= 0.95


def alike(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right, autojunk=False).ratio()


def _likeness(heard: str, phrase: str, at_least: float) -> float:
    """The better of two views: letters for the misheard, words for a phrase in a longer text.

    The letters are compared only where they could reach `at_least`: comparing them with all
    phrases took 20 ms of each turn.
    """
    by_words = _by_words(heard.split(), phrase.split())
    letters = SequenceMatcher(None, heard.replace(" ", ""), phrase.replace(" ", ""), autojunk=False)
    enough = max(at_least, by_words) / 0.97
    if letters.real_quick_ratio() < enough or letters.quick_ratio() < enough:
        return by_words
    return max(0.97 * letters.ratio(), by_words)


def _by_words(heard: list[str], phrase: list[str]) -> float:
    """The phrase's words in order within a short stretch of what was heard, weighted by content."""
    weights = [_weight(word) for word in phrase]
    total = sum(weights)
    found = 0.0
    position = 0
    first = last = None
    for word, weight in zip(phrase, weights, strict=True):
        for index in range(position, len(heard)):
            likeness = _word_likeness(word, heard[index])
            if likeness > 0.0:
                found += weight * likeness
                first = index if first is None else first
                last = index
                position = index + 1
                break
    if first is None or last is None:
        return 0.0
    spread = (last - first + 1) - len(phrase)
    rest = sum(_weight(word) for word in heard[:first] + heard[last + 1 :])
    return found / total - 0.06 * max(0, spread) - 0.03 * min(rest, 8.0)


def _weight(word: str) -> float:
    return 0.5 if word in _COMMON else 1.5


@lru_cache(maxsize=4096)
def _word_likeness(wanted: str, heard: str) -> float:
    if wanted == heard:
        return 1.0
    if min(len(wanted), len(heard)) < 4:
        return 0.0
    likeness = alike(wanted, heard)
    return likeness if likeness >= 0.8 else 0.0
