"""How long to wait for more, by what was said and how its sound ended."""

from __future__ import annotations

import numpy as np
import pytest

from characters_serve.agent.endings import TRAILING, WHOLE, silence_to_end
from characters_serve.agent.local import load_smart_turn
from characters_serve.agent.smart_turn import SmartTurn, find_smart_turn, log_mel, mel_filters
from characters_serve.config import AgentConfig, ConfigError
from tests.e2e.speech import question_pcm


@pytest.mark.parametrize(
    "words",
    ["what is your name", "Where do you live?", "how're you today", "Um, tell me a joke."],
)
def test_a_complete_question_needs_no_long_wait(words: str) -> None:
    assert silence_to_end(words, 0.5) == WHOLE * 0.5 == pytest.approx(0.3)


@pytest.mark.parametrize(
    "words",
    [
        "I like it because",
        "tell me a",
        "what is your name and",
        "well, um",
        "But...",
        "My name is",
        "So",
        "I would like to",
        "my number is five five five",
        "My phone number is 555",
        "five five, one two",
        "my code is 12",
    ],
)
def test_who_trails_off_or_reads_out_a_number_is_given_time(words: str) -> None:
    assert silence_to_end(words, 0.5) == TRAILING * 0.5 == pytest.approx(0.9)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "...",
        "hello",  # greetings come before questions
        "what do you do",  # for a living?
        "my name is peter",
        "what is your name what is",
        "I do not know what it is",
        "I think so",
        "tell me about that",
        "what are you looking for",
        "I am very well",
        "it was in nineteen eighty four",
        "I have two",
        "It costs $23.50.",
    ],
)
def test_anything_else_waits_as_usual(words: str) -> None:
    assert silence_to_end(words, 0.5) == 0.5


# What Smart Turn made of a synthetic voice, 0.2 s into the silence.
@pytest.mark.parametrize(
    ("words", "over", "silence_s"),
    [
        ("My sister has a new car.", 0.99, 0.3),
        ("I live in Berlin.", 0.98, 0.3),
        ("Hello.", 0.97, 0.3),
        ("No.", 0.93, 0.3),
        ("Well, I think so.", 0.43, 0.9),  # the one of 15 that it took for unfinished
        ("I like it because", 0.03, 1.5),
        ("Well, um", 0.06, 1.5),
        ("My name is", 0.28, 1.5),
        ("Can you tell me a", 0.98, 0.9),  # cut off as no person would say it
        ("My number is five five five", 0.99, 0.9),
        ("Let me think,", 0.84, 0.5),
        ("", 0.2, 0.9),  # not a word was understood, and it goes on
    ],
)
def test_the_melody_and_the_words_are_weighed(words: str, over: float, silence_s: float) -> None:
    assert silence_to_end(words, 0.5, over) == pytest.approx(silence_s)


@pytest.fixture(scope="module")
def smart_turn() -> SmartTurn:
    model = find_smart_turn()
    if model is None:
        pytest.skip("the wheel that carries Smart Turn is not installed")
    return SmartTurn(model)


def spoken(text: str) -> bytes:
    return bytes(9600) + question_pcm(text, 16_000) + bytes(6400)


@pytest.mark.parametrize(
    ("text", "cut_s"),
    [("I like it because it is warm.", 0.946), ("My name is Peter.", 0.636)],
)
def test_smart_turn_tells_a_whole_sentence_from_its_beginning(
    smart_turn: SmartTurn, text: str, cut_s: float
) -> None:
    whole = spoken(text)
    beginning = whole[: 9600 + 2 * round(cut_s * 16_000)] + bytes(6400)
    assert smart_turn.over(whole) > 0.9
    assert smart_turn.over(beginning) < 0.3
    assert smart_turn.over(bytes(20 * 32_000) + whole) > 0.9, "only the end of a long turn counts"


def test_the_models_features() -> None:
    filters = mel_filters()
    assert filters.shape == (201, 80)
    area = filters[:, 40:].sum(axis=0) * 40.0  # bins are 40 Hz wide
    assert area == pytest.approx(np.ones(40), rel=0.08)
    tone = np.sin(2 * np.pi * 1000 / 16_000 * np.arange(128_000))
    mels = log_mel(tone)
    assert mels.shape == (80, 800)
    # 1 kHz is mel 15 of 45.2, in 81 steps.
    assert int(mels[:, 400].argmax()) == round(15 / 45.245 * 81) - 1
    assert mels.max() - mels.min() == pytest.approx(2.0)


def test_a_model_that_is_asked_for_by_name_is_had_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_smart_turn(AgentConfig(end_of_turn="words")) is None
    monkeypatch.setattr("characters_serve.agent.smart_turn.PACKAGE", "no_such_package")
    assert load_smart_turn(AgentConfig()) is None
    with pytest.raises(ConfigError, match=r"agent\.end_of_turn"):
        load_smart_turn(AgentConfig(end_of_turn="melody"))
