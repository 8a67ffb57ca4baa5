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
    return microphone_wav(path, [(lead_silence_s, text)], tail_silence_s)


def microphone_wav(path: Path, said: list[tuple[float, str]], tail_silence_s: float) -> Path:
    """Each text begins that many seconds into the file."""
    pcm = bytearray()
    for begin_s, text in said:
        begin = 2 * round(begin_s * MICROPHONE_RATE)
        assert begin >= len(pcm), f"{text!r} begins before the words before it end"
        pcm += bytes(begin - len(pcm)) + question_pcm(text, MICROPHONE_RATE)
    pcm += bytes(2 * round(tail_silence_s * MICROPHONE_RATE))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(MICROPHONE_RATE)
        file.writeframes(pcm)
    return path
