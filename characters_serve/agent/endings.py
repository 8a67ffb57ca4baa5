"""In: the words of a turn so far, and how its sound ends. Out: the silence after which it is over.

A question that is complete needs no long wait; "I like it because" is not over yet, and neither is
a number that is read out in groups. Words that are complete only as long as nothing follows ("what
do you do", "hello") wait as any other, unless their melody falls as at an end. The melody alone is
not trusted with words that ask for more: a voice falls at the end of each group of digits too.

Of 15 whole sentences of a synthetic voice the melody took 14 for whole; of 6 that were cut off in
the middle, 5 for cut off, and the words knew the sixth ("my number is five five five").
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from characters_serve.agent.understanding import known_phrases, normalise

WHOLE: Final = 0.6
TRAILING: Final = 1.8
# Both the words and the melody say that more will come.
UNFINISHED: Final = 3.0
_OVER: Final = 0.5
_SURELY_OVER: Final = 0.9
_MIN_WORDS: Final = 3
_TRAILING: Final = (
    "and but because or if when while although than so that the a an my your his her our their of "
    "to for from with at in very um uh er erm hmm well is are was"
)
_TRAILING_WORDS: Final = frozenset(_TRAILING.split())
# "That is what I am looking for" and "so am I, I think so" are whole although they end like this.
_WHOLE_WITH: Final = re.compile(
    r"\b(?:what|who|where|which|how) .*\b(?:for|from|to|at|with|in|is|are|was|that|of)$"
    r"|\b(?:think|hope|guess|suppose|said|told you|not|very) so$"
    r"|\b(?:about|like|do|did|know|want|see|said|of|mean|with) that$|\bas well$|\bvery well$"
)
_DIGIT: Final = "zero|oh|one|two|three|four|five|six|seven|eight|nine"
_DIGITS_READ_OUT: Final = re.compile(
    rf"(?:\b(?:{_DIGIT}|\d)\b[ ,-]*){{2,}}$"
    r"|\b(?:number|phone|code|pin|card|account|zip)\b.*\d$"
)


def silence_to_end(words: str, usual_s: float, over: float | None = None) -> float:
    """Seconds. over: how likely the turn is over by its sound, where something can tell."""
    waits = _asks_for_more(words)
    if waits and over is not None and over < _OVER:
        return UNFINISHED * usual_s
    if waits or (over is not None and over < _OVER):
        return TRAILING * usual_s
    if normalise(words) in _whole_phrases() or (over is not None and over >= _SURELY_OVER):
        return WHOLE * usual_s
    return usual_s


def _asks_for_more(words: str) -> bool:
    plain = " ".join(re.findall(r"[a-z']+|\d+", words.lower()))
    last = plain.rpartition(" ")[2]
    if last in _TRAILING_WORDS and not _WHOLE_WITH.search(plain):
        return True
    return _DIGITS_READ_OUT.search(plain) is not None


@cache
def _whole_phrases() -> frozenset[str]:
    phrases = known_phrases()
    return frozenset(
        phrase
        for phrase in phrases
        if len(phrase.split()) >= _MIN_WORDS
        and not any(other.startswith(f"{phrase} ") for other in phrases)
    )
