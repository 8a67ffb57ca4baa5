"""The real detector, on real sound: how soon it is sure, counted in samples."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from characters_serve.agent.turns import TurnDetector, TurnEvent, TurnRules
from characters_serve.agent.vad import HOP_S, HOP_SAMPLES, RATE, HalfStepVad
from tests.e2e.speech import question_pcm

AUDIBLE = 0.01
RULES = TurnRules(end_silence_s=0.5, barge_in_s=0.12, hop_s=HOP_S)


@pytest.fixture(scope="module")
def vad() -> HalfStepVad:
    return HalfStepVad()


def started_ms(vad: HalfStepVad, sound: NDArray[np.float64]) -> list[float]:
    """When turns start over the character's voice; sound: of -1 to 1, heard over a quiet hiss."""
    hiss = np.random.default_rng(0).normal(0, 3e-4, len(sound))
    pcm = np.clip((sound + hiss) * 32768, -32768, 32767).astype("<i2")
    vad.reset()
    detector = TurnDetector(RULES)
    return [
        (first + HOP_SAMPLES) / RATE * 1000
        for first in range(0, len(pcm) - HOP_SAMPLES + 1, HOP_SAMPLES)
        for event in detector.step(vad.process(pcm[first : first + HOP_SAMPLES].tobytes()), True)
        if event is TurnEvent.STARTED
    ]


@pytest.mark.parametrize(("words", "within_ms"), [("Wait, wait, stop.", 80), ("No.", 75)])
def test_speech_is_noticed_within_three_windows(
    vad: HalfStepVad, words: str, within_ms: float
) -> None:
    """Wherever between two hops it begins. A detector alone took 112 and 104."""
    spoken = np.frombuffer(question_pcm(words, RATE), "<i2") / 32768
    audible = int(np.flatnonzero(np.abs(spoken) > AUDIBLE)[0])
    for phase in range(0, 2 * HOP_SAMPLES, 64):
        begin = RATE + phase
        sound = np.concatenate((np.zeros(begin), spoken))
        waited_ms = started_ms(vad, sound)[0] - (begin + audible) / RATE * 1000
        assert 0 < waited_ms <= within_ms


def test_typing_is_no_speech(vad: HalfStepVad) -> None:
    random = np.random.default_rng(1)
    sound = np.zeros(10 * RATE)
    for begin in random.integers(0, len(sound) - RATE, 50):
        decay = np.exp(-np.arange(2000) / random.uniform(30, 120))
        sound[begin : begin + 2000] += 0.3 * random.normal(size=2000) * decay
    assert started_ms(vad, sound) == []
