"""The recognisers on real synthetic speech, and which of them is taken."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from characters_serve.agent import whisper_ears
from characters_serve.agent.ears import load_ears
from characters_serve.agent.pocketsphinx_ears import Hearing, PocketsphinxEars, choose
from characters_serve.agent.understanding import normalise
from characters_serve.agent.whisper_ears import (
    WhisperEars,
    clean_words,
    ends_in_circles,
    find_model,
    repeats,
)
from characters_serve.config import AgentConfig, ConfigError
from tests.e2e.speech import question_pcm

HEARD = Hearing(
    "canadian", score=-0.46, acoustic=-580.0, first_frame=16, last_frame=80, num_frames=200
)
KNOWN = Hearing(
    "who made you", score=-0.25, acoustic=-305.0, first_frame=16, last_frame=80, num_frames=200
)


@pytest.fixture(scope="module")
def ears() -> PocketsphinxEars:
    return PocketsphinxEars()


def listen(ears: PocketsphinxEars, text: str) -> str:
    pcm = bytes(6400) + question_pcm(text, 16_000) + bytes(6400)
    ears.begin()
    for offset in range(0, len(pcm), 2048):
        ears.feed(pcm[offset : offset + 2048])
    return normalise(ears.finish())


@pytest.mark.parametrize(
    "text",
    [
        "What is your name?",
        "Where do you live?",
        "What do you like?",
        "What can you do?",
        "Who made you?",
        "What day is it today?",
        "Hello.",
        "Are you a robot?",
        "Tell me a joke.",
        "What is seven plus five?",
        # no phrases: these must come through as they are
        "My name is Peter.",
        "I like music.",
        "My sister has a new car.",
    ],
)
def test_pocketsphinx_hears(ears: PocketsphinxEars, text: str) -> None:
    assert listen(ears, text) == normalise(text)


def test_a_turn_that_was_left_open_does_not_reach_the_next(ears: PocketsphinxEars) -> None:
    ears.begin()
    ears.feed(question_pcm("Tell me a joke.", 16_000))
    assert listen(ears, "What is your name?") == "what is your name"


def test_the_words_are_there_at_the_first_pause(ears: PocketsphinxEars) -> None:
    ears.begin()
    ears.feed(question_pcm("What is your name?", 16_000) + bytes(6400))
    assert normalise(ears.pause()) == "what is your name"
    assert not ears._decoding, "nothing is left to be done"
    assert normalise(ears.finish()) == "what is your name"


def test_who_goes_on_after_a_pause_is_heard_from_the_beginning(ears: PocketsphinxEars) -> None:
    ears.begin()
    for text in ("My sister", "has a new car."):
        ears.feed(bytes(6400) + question_pcm(text, 16_000) + bytes(6400))
        ears.pause()
    heard = normalise(ears.finish())
    assert heard.startswith("my sister")
    assert heard.endswith("new car")


def test_a_long_turn_is_decoded_once(ears: PocketsphinxEars) -> None:
    ears.begin()
    ears.feed(bytes(6 * 32_000))
    ears.feed(question_pcm("What is your name?", 16_000) + bytes(6400))
    assert "name" in ears.pause()
    assert ears._decoding
    assert "name" in ears.finish()


def test_silence_is_no_word(ears: PocketsphinxEars) -> None:
    ears.begin()
    ears.feed(bytes(32_000))
    assert ears.finish() == ""


def test_a_phrase_is_believed_only_if_it_explains_the_sounds() -> None:
    assert choose(HEARD, KNOWN) == "who made you"
    assert choose(HEARD, None) == "canadian"
    assert choose(None, KNOWN) == ""
    assert choose(HEARD, replace(KNOWN, last_frame=60)) == "canadian"
    assert choose(HEARD, replace(KNOWN, last_frame=60, score=-0.1)) == "who made you"
    assert choose(HEARD, replace(KNOWN, last_frame=40, score=-0.1)) == "canadian"
    assert choose(HEARD, replace(KNOWN, first_frame=40)) == "canadian"
    assert choose(HEARD, replace(KNOWN, acoustic=-650.0)) == "canadian"
    assert choose(HEARD, replace(KNOWN, score=-0.5)) == "canadian"
    clear = replace(HEARD, words="i like music")
    assert choose(clear, replace(KNOWN, words="i like you")) == "i like music"


def test_auto_takes_what_there_is_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whisper_ears, "_WHEEL", ("no_such_wheel", "model"))
    with caplog.at_level(logging.WARNING):
        ears = load_ears(AgentConfig())
    assert "pocketsphinx" in ears.description
    assert "misunderstands more than whisper" in caplog.text


def test_whisper_by_name_is_had_or_refused(tmp_path: Path) -> None:
    for config in (
        AgentConfig(recogniser="whisper", whisper_model=str(tmp_path)),
        AgentConfig(whisper_model=str(tmp_path)),
    ):
        with pytest.raises(ConfigError, match=r"agent\.recogniser"):
            load_ears(config)


def test_a_whisper_model_is_looked_for_where_it_is_configured(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) is None
    (tmp_path / "model.bin").write_bytes(b"")
    assert find_model(str(tmp_path)) == tmp_path


def test_sounds_that_are_no_words_are_left_out() -> None:
    assert clean_words(" [BLANK_AUDIO] (coughs) Hello. ♪ ") == "Hello."


@pytest.fixture(scope="module")
def whisper() -> WhisperEars:
    pytest.importorskip("faster_whisper", reason="the whisper extra is not installed")
    model = find_model(None)
    if model is None:
        pytest.skip("no whisper model on this machine")
    return WhisperEars(model)


def test_whisper_encodes_the_turn_alone_and_hears_the_same(
    whisper: WhisperEars, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        "What is your name?",
        "No.",
        "My phone number is five five five, one two three four.",
    ]
    encoded: list[int] = []
    encode = WhisperEars._encode

    def counted(self: WhisperEars, samples: Any) -> Any:
        encoded.append(len(samples))
        return encode(self, samples)

    monkeypatch.setattr(WhisperEars, "_encode", counted)
    for text in texts:
        pcm = bytes(6400) + question_pcm(text, 16_000) + bytes(6400)
        whisper.begin()
        whisper.feed(pcm)
        usual = whisper._transcribe_windows((np.frombuffer(pcm, "<i2") / 32768).astype(np.float32))
        assert normalise(whisper.finish()) == normalise(usual), text
    assert len(encoded) == len(texts) and max(encoded) < 7 * 16_000


def test_whisper_writes_while_the_user_speaks(whisper: WhisperEars) -> None:
    pcm = question_pcm("My sister has a new car and she drives it to work every day.", 16_000)
    whisper.begin()
    heard = [whisper.feed(pcm[first : first + 2048]) for first in range(0, len(pcm), 2048)]
    assert len(set(heard)) >= 3 and "sister" in heard[len(heard) // 2]
    assert whisper.finish().endswith("every day.")


def test_whisper_makes_no_words_of_noise(whisper: WhisperEars) -> None:
    noise = np.random.default_rng(0).normal(0.0, 1.0, 32_000)
    for level in (0.0, 0.01, 0.1):
        whisper.begin()
        whisper.feed(((noise * level).clip(-1, 1) * 32767).astype("<i2").tobytes())
        assert whisper.finish() == ""


def test_a_turn_beyond_one_window_is_heard_to_its_end(whisper: WhisperEars) -> None:
    whisper.begin()
    whisper._pcm += question_pcm("This is the first sentence of it.", 16_000) + bytes(29 * 32_000)
    whisper._pcm += question_pcm("What is your name?", 16_000)
    assert "your name" in whisper.finish().lower()


def test_text_that_repeats_itself_is_noticed() -> None:
    assert repeats("Tell me a joke. " * 20)
    assert not repeats("No, no, no.") and not repeats("What is seven plus five?")


def test_words_that_go_round_in_circles_are_noticed() -> None:
    for circles in (
        "Where are you? Where are you?",
        "No, no, no.",
        "Tell me a joke. A joke. A joke.",
    ):
        assert ends_in_circles(circles), circles
    for sentence in ("", "No, no.", "I said that that was all.", "What do you do?", "Bye bye."):
        assert not ends_in_circles(sentence), sentence


def test_whisper_gets_its_whole_window_where_half_of_one_leads_in_circles(
    whisper: WhisperEars, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, positions = WhisperEars._decode, []

    def circling(self: WhisperEars, encoded: Any, num_positions: int, max_tokens: int) -> Any:
        positions.append(num_positions)
        heard = decode(self, encoded, num_positions, max_tokens)
        return heard if len(positions) > 1 else f"{heard} {heard}"

    monkeypatch.setattr(WhisperEars, "_decode", circling)
    whisper.begin()
    whisper._pcm += question_pcm("What is your name?", 16_000)
    assert normalise(whisper.finish()) == "what is your name"
    assert positions == [750, 1500]
