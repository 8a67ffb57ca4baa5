"""How long to wait for more, by what was said."""

from __future__ import annotations

import pytest

from characters_serve.agent.endings import TRAILING, WHOLE, silence_to_end


@pytest.mark.parametrize(
    "words",
    ["what is your name", "Where do you live?", "how're you today", "Um, tell me a joke."],
)
def test_a_complete_question_needs_no_long_wait(words: str) -> None:
    assert silence_to_end(words, 0.5) == WHOLE * 0.5 == pytest.approx(0.3)


@pytest.mark.parametrize(
    "words", ["I like it because", "tell me a", "what is your name and", "well, um", "But..."]
)
def test_who_trails_off_is_given_time(words: str) -> None:
    assert silence_to_end(words, 0.5) == TRAILING * 0.5 == pytest.approx(0.9)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "...",
        "hello",  # greetings come before questions
        "what do you do",  # for a living?
        "where are you",  # from?
        "my name is peter",
        "what is your name what is",
    ],
)
def test_anything_else_waits_as_usual(words: str) -> None:
    assert silence_to_end(words, 0.5) == 0.5
