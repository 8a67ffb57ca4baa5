"""In: a text. Out: a microphone's 48 kHz mono WAV of it. Knows nothing of the server."""

from __future__ import annotations

import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from characters_serve.agent.voice import SAMPLE_RATE, HibariVoice

MICROPHONE_RATE = 48_000


@cache
def _voice() -> HibariVoice:
    return HibariVoice()


def question_pcm(text: str, sample_rate: int) -> bytes:
    """The words alone, without silence around them."""
    voice = np.frombuffer(_voice().synthesize(text), "<i2")
    resampled: np.ndarray[Any, Any] = soxr.resample(voice, SAMPLE_RATE, sample_rate)
    return resampled.astype("<i2").tobytes()


def question_wav(path: Path, text: str, lead_silence_s: float, tail_silence_s: float) -> Path:
    """What a browser's fake microphone plays: silence, the question, silence."""
    lead, tail = (
        bytes(2 * round(silence_s * MICROPHONE_RATE))
        for silence_s in (lead_silence_s, tail_silence_s)
    )
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(MICROPHONE_RATE)
        file.writeframes(lead + question_pcm(text, MICROPHONE_RATE) + tail)
    return path
