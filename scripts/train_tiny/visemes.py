"""Mouth controls from timed phonemes, with co-articulation.

A phoneme has targets for the five mouth controls and a dominance for each of them: how strongly
it insists on its target against its neighbours.  The track is the dominance-weighted average of
the targets under raised-cosine windows, evaluated at :data:`TRACK_RATE` and sampled at the
centres of the video frames.  Bilabial closures are enforced afterwards, long enough that at
least one video frame shows the lips together, and silence gives exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOUTH_CONTROLS: Final = ("open", "width", "round", "teeth", "tongue")
TRACK_RATE: Final = 480
"""Samples per second at which tracks are blended; a multiple of the video rate."""
VIDEO_RATE: Final = 24
MEL_LOW: Final = -14.0
MEL_HIGH: Final = 10.0
"""The range of log-mel values that is quantised to 0..255, beside the mouth controls."""

_WINDOW_SECONDS: Final = (0.080, 0.085, 0.105, 0.070, 0.065)
"""Length of the blending window of each mouth control."""
_ANTICIPATION_SECONDS: Final = 0.010  # the mouth moves a little before the sound
_CLOSURE_SECONDS: Final = 0.046  # longer than a video frame
_CLOSURE_RAMP_SECONDS: Final = 0.040

Targets = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class Phoneme:
    """One sound: IPA ``symbol`` (empty for a pause) and its time span in seconds."""

    symbol: str
    start: float
    end: float
    stressed: bool = False


# open, width, round, teeth, tongue
_VOWELS: Final[dict[str, Targets]] = {
    "a": (0.92, 0.30, 0.00, 0.40, 0.20),
    "ɑ": (0.95, 0.10, 0.05, 0.30, 0.20),
    "ɐ": (0.75, 0.25, 0.05, 0.35, 0.20),
    "æ": (0.85, 0.60, 0.00, 0.55, 0.25),
    "ɒ": (0.80, 0.00, 0.45, 0.20, 0.15),
    "ʌ": (0.62, 0.25, 0.05, 0.35, 0.20),
    "ɔ": (0.70, 0.00, 0.65, 0.10, 0.10),
    "o": (0.52, 0.00, 0.85, 0.05, 0.05),
    "ø": (0.42, 0.05, 0.75, 0.15, 0.10),
    "œ": (0.52, 0.05, 0.65, 0.20, 0.10),
    "ɛ": (0.60, 0.55, 0.00, 0.55, 0.20),
    "e": (0.46, 0.65, 0.00, 0.60, 0.20),
    "ɪ": (0.34, 0.60, 0.00, 0.60, 0.20),
    "i": (0.27, 0.95, 0.00, 0.80, 0.20),
    "y": (0.22, 0.10, 0.90, 0.20, 0.10),
    "ʏ": (0.28, 0.10, 0.75, 0.20, 0.10),
    "ɨ": (0.30, 0.55, 0.00, 0.60, 0.20),
    "ʊ": (0.32, 0.00, 0.75, 0.10, 0.05),
    "u": (0.22, 0.00, 1.00, 0.00, 0.00),
    "ə": (0.38, 0.25, 0.10, 0.35, 0.20),
    "ɜ": (0.42, 0.10, 0.35, 0.30, 0.20),
}
_CONSONANTS: Final[dict[str, Targets]] = {
    "p": (0.00, 0.10, 0.10, 0.00, 0.00),
    "b": (0.00, 0.10, 0.10, 0.00, 0.00),
    "m": (0.00, 0.15, 0.10, 0.00, 0.00),
    "f": (0.09, 0.25, 0.00, 1.00, 0.00),
    "v": (0.10, 0.25, 0.00, 1.00, 0.00),
    "β": (0.08, 0.10, 0.15, 0.10, 0.00),
    "w": (0.14, 0.00, 1.00, 0.00, 0.00),
    "ʍ": (0.14, 0.00, 1.00, 0.00, 0.00),
    "θ": (0.24, 0.30, 0.00, 0.70, 1.00),
    "ð": (0.26, 0.30, 0.00, 0.65, 1.00),
    "t": (0.20, 0.35, 0.00, 0.70, 0.55),
    "d": (0.22, 0.35, 0.00, 0.65, 0.60),
    "n": (0.22, 0.35, 0.00, 0.55, 0.70),
    "ɲ": (0.24, 0.50, 0.00, 0.55, 0.50),
    "ɾ": (0.26, 0.30, 0.00, 0.50, 0.65),
    "l": (0.34, 0.30, 0.00, 0.45, 0.95),
    "ʎ": (0.30, 0.50, 0.00, 0.45, 0.80),
    "s": (0.10, 0.55, 0.00, 1.00, 0.05),
    "z": (0.11, 0.52, 0.00, 1.00, 0.05),
    "ʃ": (0.18, 0.00, 0.62, 0.90, 0.00),
    "ʒ": (0.19, 0.00, 0.60, 0.90, 0.00),
    "ç": (0.24, 0.60, 0.00, 0.75, 0.10),
    "k": (0.30, 0.25, 0.00, 0.40, 0.10),
    "ɡ": (0.30, 0.25, 0.00, 0.40, 0.10),
    "ŋ": (0.28, 0.25, 0.00, 0.40, 0.10),
    "x": (0.34, 0.20, 0.00, 0.40, 0.10),
    "ɣ": (0.34, 0.20, 0.00, 0.40, 0.10),
    "ʁ": (0.34, 0.20, 0.05, 0.40, 0.10),
    "h": (0.42, 0.25, 0.05, 0.35, 0.15),
    "ʔ": (0.30, 0.25, 0.05, 0.35, 0.15),
    "j": (0.24, 0.80, 0.00, 0.70, 0.20),
    "r": (0.26, 0.15, 0.30, 0.45, 0.50),
    "ɹ": (0.24, 0.05, 0.55, 0.40, 0.20),
}
_ALIASES: Final[dict[str, str]] = {
    "A": "eɪ", "I": "aɪ", "O": "oʊ", "Q": "əʊ", "W": "aʊ", "Y": "ɔɪ", "ᵊ": "ə", "ᵻ": "ɪ",
    "ɚ": "ɜ", "ɝ": "ɜ", "ʧ": "tʃ", "ʤ": "dʒ", "T": "ɾ", "g": "ɡ", "ʋ": "v", "ɫ": "l", "ɕ": "ʃ",
    "ʑ": "ʒ", "ʂ": "ʃ", "ʐ": "ʒ", "ʝ": "j", "ɟ": "d", "c": "k", "χ": "x", "ʀ": "ʁ", "ɦ": "h",
    "ɻ": "ɹ", "ɭ": "l", "ʈ": "t", "ɖ": "d", "ɳ": "n", "ɽ": "ɾ", "ʦ": "ts", "ʣ": "dz", "ɥ": "w",
    "ɵ": "ø", "ʉ": "u", "ɤ": "o", "ɯ": "ɨ", "ɘ": "ə", "ʌ": "ʌ", "R": "r", "ɬ": "l", "ħ": "h",
    "ε": "ɛ", "X": "x", "ʲ": "j", "ʰ": "h",
}  # fmt: skip
_BILABIAL: Final = frozenset("pbm")
_STOPS: Final = frozenset("pb")
_LABIODENTAL: Final = frozenset("fv")
# open, width, round, teeth, tongue
_VOWEL_DOMINANCE: Final[Targets] = (1.0, 1.0, 1.0, 0.7, 0.5)
_CONSONANT_DOMINANCE: Final[Targets] = (0.75, 0.45, 0.45, 0.9, 1.0)
_PAUSE_DOMINANCE: Final[Targets] = (1.6, 1.6, 1.6, 1.6, 1.6)


def _dominance(symbol: str) -> Targets:
    if symbol in "hʔ":
        return (0.12, 0.1, 0.1, 0.1, 0.1)  # breath takes the mouth of its neighbours
    if symbol in "kɡŋxɣʁ":
        return (0.45, 0.2, 0.2, 0.4, 0.6)
    if symbol in "wʍʃʒ":
        return (1.1, 1.2, 1.6, 1.2, 0.8)
    if symbol in _BILABIAL:
        return (1.5, 0.3, 0.3, 1.5, 1.5)
    if symbol in _LABIODENTAL:
        return (1.6, 0.8, 1.0, 2.0, 1.0)
    if symbol in "sz":
        return (1.3, 0.7, 0.6, 1.5, 1.0)
    if symbol in _VOWELS:
        return _VOWEL_DOMINANCE
    return _CONSONANT_DOMINANCE


def base_symbols(symbol: str) -> list[str]:
    """The table entries an IPA symbol stands for: two for diphthongs and affricates."""
    result: list[str] = []
    for character in symbol:
        for plain in _ALIASES.get(character, character):
            if plain in _VOWELS or plain in _CONSONANTS:
                result.append(plain)
    return result[:2]


def _split(phoneme: Phoneme) -> list[tuple[str, float, float]]:
    """(symbol, start, end) of a phoneme's parts."""
    symbols = base_symbols(phoneme.symbol)
    if len(symbols) < 2:
        return [(symbols[0] if symbols else "", phoneme.start, phoneme.end)]
    part = 0.55 if symbols[0] in _VOWELS else 0.45
    middle = phoneme.start + part * (phoneme.end - phoneme.start)
    return [(symbols[0], phoneme.start, middle), (symbols[1], middle, phoneme.end)]


def _smooth(values: NDArray[np.float64], seconds: float) -> NDArray[np.float64]:
    """Raised-cosine average over ``seconds`` along axis 0 of a 1-D track."""
    half = max(1, round(seconds * TRACK_RATE / 2))
    kernel = np.hanning(2 * half + 1)
    return np.convolve(values, kernel / kernel.sum(), mode="same")


def mouth_track(
    phonemes: Sequence[Phoneme], num_frames: int, loudness: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Mouth controls at the video frames' centres, float32 (num_frames, 5) in [0, 1].

    ``phonemes`` cover what is spoken; everything else is silence.  ``loudness`` is the audible
    level relative to the clip's usual level, about 0 to 1.5, at :data:`TRACK_RATE`.
    """
    length = num_frames * TRACK_RATE // VIDEO_RATE
    targets = np.zeros((length, 5))
    weights = np.tile(np.array(_PAUSE_DOMINANCE), (length, 1))
    closed = np.zeros(length)
    bitten = np.zeros(length)
    for phoneme in phonemes:
        for symbol, start, end in _split(phoneme):
            if not symbol:
                continue
            start, end = start - _ANTICIPATION_SECONDS, end - _ANTICIPATION_SECONDS
            first, last = max(0, round(start * TRACK_RATE)), round(end * TRACK_RATE)
            vowel = symbol in _VOWELS
            target = np.array(_VOWELS[symbol] if vowel else _CONSONANTS[symbol])
            if vowel:
                target[0] *= 1.08 if phoneme.stressed else 0.88
            targets[first:last] = target
            weights[first:last] = _dominance(symbol)
            if symbol in _BILABIAL or symbol in _LABIODENTAL:
                if symbol in _STOPS:  # the lips part before the burst and the breath after it
                    end = start + 0.65 * (end - start)
                    last = round(end * TRACK_RATE)
                margin = round(max(0.0, _CLOSURE_SECONDS - (end - start)) * TRACK_RATE / 2) + 1
                track = closed if symbol in _BILABIAL else bitten
                track[max(0, first - margin) : last + margin] = 1.0
    result = np.empty((length, 5))
    for index, seconds in enumerate(_WINDOW_SECONDS):
        weighted = _smooth(targets[:, index] * weights[:, index], seconds)
        result[:, index] = weighted / _smooth(weights[:, index], seconds)
    level = _smooth(np.clip(loudness[:length], 0.0, 1.4), 0.08)
    result[:, 0] *= 0.80 + 0.25 * np.pad(level, (0, length - len(level)))
    ramp = _CLOSURE_RAMP_SECONDS
    lips_apart = 1.0 - _widen(closed, ramp)
    result[:, [0, 3, 4]] *= lips_apart[:, None]
    bite = _widen(bitten, ramp)
    result[:, 0] = np.minimum(result[:, 0], 0.10 + 0.9 * (1.0 - bite))
    result[:, 3] = np.maximum(result[:, 3], bite * lips_apart * 0.95)
    step = TRACK_RATE // VIDEO_RATE
    result = result.reshape(num_frames, step, 5)[:, step // 2 - 1 : step // 2 + 1].mean(axis=1)
    result[result < 0.012] = 0.0
    return np.asarray(np.clip(result, 0.0, 1.0), np.float32)


def _widen(mask: NDArray[np.float64], seconds: float) -> NDArray[np.float64]:
    """Raised-cosine ramps of ``seconds`` on both sides of the mask's ones, which stay one."""
    if not mask.any():
        return mask
    half = round(seconds * TRACK_RATE)
    grown = np.convolve(mask, np.ones(half + 1), mode="same") > 0.0
    return np.maximum(mask, _smooth(grown.astype(np.float64), seconds))
