"""English sentences for synthesized training speech, all available offline."""

from __future__ import annotations

import random
import re
from pathlib import Path
from pydoc_data.topics import topics

_TEMPLATES = (
    "Hello {name}, it is lovely to meet you!",
    "Hi! My name is {name}, and I live near the {place}.",
    "Would you like some {food} with your {food}?",
    "I have {number} {thing}s at home, and {number} more at the {place}.",
    "Did you know that {name} paid {number} dollars for a {colour} {thing}?",
    "My favourite colour is {colour}, what about yours?",
    "Hmm, let me think about that for a moment.",
    "Oh wow, that sounds absolutely wonderful!",
    "No, I don't think so. Maybe {name} knows more about {thing}s.",
    "The meeting starts at {number} o'clock, so please bring your {thing}.",
    "We were walking home from the {place} when it began to rain.",
    "People believe bumblebees make the best possible pollen bombs.",
    "My mother made me promise to buy five more plums.",
    "Every evening, {name} waters the {colour} flowers by the {place}.",
    "Five brave foxes vanished over the frozen river in {month}.",
    "What do you want to do with the {colour} {thing}?",
    "I work as a {job}, and most days I really love it.",
    "Yes, exactly! That is what I meant.",
    "Sorry, could you say that again, please?",
    "On {month} the {ordinal}, we will visit {name} at the {place}.",
    "Why would anyone put {food} on a {thing}?",
    "You know what? I was just about to ask you the same thing.",
    "It takes about {number} minutes to walk to the {place}.",
    "Please remember to pack a {colour} {thing} and a bit of {food}.",
    "The {job} told {name} a funny story about a {thing}.",
    "She sells sea shells by the sea shore, but he prefers {food}.",
    "Whether the weather is warm or not, we will swim at the {place}.",
    "Thank you so much for your help, {name}.",
    "I grew up in a small town with a big {place}.",
    "Let's play a game: think of a number between one and {number}.",
    "Okay, here is the plan. First we find the {thing}, then we eat {food}.",
    "How are you feeling today, {name}?",
    "That reminds me of a {job} I met in {month}.",
    "Good morning, good afternoon, and good night!",
    "Bob and Pam both bumped into a purple piano.",
    "I could talk about {thing}s for {number} hours.",
    "Who knew that a {job} could cook such good {food}?",
    "Zoe chose two blue shoes and a {colour} {thing}.",
    "The moon looked huge above the {place} last night.",
    "Well, what else would you like to know about me?",
)
_WORDS = {
    "name": "Emma Oliver Maya Ben Sophie Paul Priya Omar Fiona Viktor Bella Tom Amara Felix Phoebe "
    "Marvin Robin Zoe Hugo Wendy Mabel Pablo",
    "place": "harbour market library bakery museum beach bridge park village mountain bus-stop "
    "farm workshop playground lighthouse",
    "food": "soup pancakes mushrooms apple-pie bread honey noodles cheese popcorn beans jam "
    "watermelon vegetables butter oatmeal fudge",
    "thing": "umbrella bicycle telescope book piano pumpkin map lamp boat violin puppet balloon "
    "basket camera bumblebee volcano",
    "colour": "blue purple orange yellow green amber brown pink white violet",
    "job": "baker pilot gardener teacher plumber farmer painter beekeeper moviemaker vet violinist",
    "month": "January February March April May June July August September October November",
    "ordinal": "first second third fourth fifth twelfth twentieth",
    "number": "two three four five seven eleven twelve fifteen twenty-one forty ninety 250 1984 76",
}


def _conversational(rng: random.Random) -> str:
    sentence = rng.choice(_TEMPLATES)
    for slot, words in _WORDS.items():
        while "{" + slot + "}" in sentence:
            word = rng.choice(words.split()).replace("-", " ")
            sentence = sentence.replace("{" + slot + "}", word, 1)
    return sentence


def _prose() -> list[str]:
    texts = list(topics.values())
    for name in ("GPL-3", "MPL-2.0", "Apache-2.0", "GFDL-1.3"):
        path = Path("/usr/share/common-licenses") / name
        if path.exists():
            texts.append(path.read_text(encoding="utf-8", errors="ignore"))
    sentences: list[str] = []
    for text in texts:
        for piece in re.split(r"(?<=[.;:?!])\s+|\n\n", text):
            words = re.sub(r"[^A-Za-z,' ]", " ", piece).split()
            line = " ".join(words)
            plain = sum(len(word) > 1 or word in "aAI" for word in words)
            if 4 <= len(words) <= 18 and len(line) < 130 and plain >= len(words) - 1:
                sentences.append(line.strip(", ") + ".")
    return sorted(set(sentences))


class Sentences:
    """An endless stream of sentences, deterministic in ``seed``."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._prose = _prose()

    def next(self) -> str:
        """The next sentence: conversational, or one of prose a third of the time."""
        if self._prose and self._rng.random() < 0.35:
            return self._rng.choice(self._prose)
        return _conversational(self._rng)
