"""In: the words of a turn so far. Out: the silence after which it is over. Knows no audio.

A question that is complete needs no long wait; "I like it because" is not over yet. Words that are
complete only as long as nothing follows ("what do you do", "hello") wait as any other.
"""

from __future__ import annotations

import re
from functools import cache

from characters_serve.agent.understanding import known_phrases, normalise

WHOLE = 0.6
TRAILING = 1.8
_MIN_WORDS = 3
_TRAILING = (
    "and but because or if when while although than the a an my your his her our their of with "
    "very um uh er erm hmm"
)
_TRAILING_WORDS = frozenset(_TRAILING.split())


def silence_to_end(words: str, usual_s: float) -> float:
    plain = re.findall(r"[a-z']+", words.lower())
    if plain and plain[-1] in _TRAILING_WORDS:
        return TRAILING * usual_s
    if normalise(words) in _whole_phrases():
        return WHOLE * usual_s
    return usual_s


@cache
def _whole_phrases() -> frozenset[str]:
    phrases = known_phrases()
    return frozenset(
        phrase
        for phrase in phrases
        if len(phrase.split()) >= _MIN_WORDS
        and not any(other.startswith(f"{phrase} ") for other in phrases)
    )
