"""In: speech. Out: the 13 cepstral coefficients that the published SyncNet was trained on.

The front end of python_speech_features 0.6 with its own defaults, which the published numbers
were made with: 25 ms rectangular windows every 10 ms, 26 bands, and the first coefficient replaced
by the logarithm of the window's energy. Samples keep the range of int16.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_WINDOW_S: Final = 0.025
_STEP_S: Final = 0.01
_FFT: Final = 512
_BANDS: Final = 26
_COEFFICIENTS: Final = 13
_LIFTER: Final = 22
_PRE_EMPHASIS: Final = 0.97


def mfcc(pcm: NDArray[Any], sample_rate: int) -> Floats:
    """int16 (samples,) -> (rows, 13), a row for each 10 ms; a short last window is filled up."""
    window, step = round(_WINDOW_S * sample_rate), round(_STEP_S * sample_rate)
    samples = pcm.astype(np.float64)
    emphasised = np.append(samples[:1], samples[1:] - _PRE_EMPHASIS * samples[:-1])
    rows = 1 + max(0, -(-(len(emphasised) - window) // step))
    padded = np.pad(emphasised, (0, max(0, (rows - 1) * step + window - len(emphasised))))
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)[::step][:rows]
    power = np.abs(np.fft.rfft(windows, _FFT)) ** 2 / _FFT
    bands = _above_zero(power @ _filters(sample_rate).T)
    cepstrum = np.log(bands) @ _cosines().T
    cepstrum *= 1 + _LIFTER / 2 * np.sin(np.pi * np.arange(_COEFFICIENTS) / _LIFTER)
    cepstrum[:, 0] = np.log(_above_zero(power.sum(1)))
    return cepstrum


def _above_zero(values: Floats) -> Floats:
    return np.where(values == 0, np.finfo(float).eps, values)


def _filters(sample_rate: int) -> Floats:
    """Triangles between whole bins: (bands, bins)."""
    highest = 2595 * np.log10(1 + sample_rate / 2 / 700)
    edges_hz = 700 * (10 ** (np.linspace(0, highest, _BANDS + 2) / 2595) - 1)
    edges = np.floor((_FFT + 1) * edges_hz / sample_rate)
    bins = np.arange(_FFT // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (bins - low) / np.maximum(middle - low, 1)
    falling = (high - bins) / np.maximum(high - middle, 1)
    inside = (bins >= low) & (bins < high)
    return np.where(inside, np.where(bins < middle, rising, falling), 0.0)


def _cosines() -> Floats:
    """The first rows of the orthonormal DCT-II: (coefficients, bands)."""
    n, k = np.arange(_BANDS), np.arange(_COEFFICIENTS)[:, None]
    scale = np.where(k == 0, np.sqrt(1 / _BANDS), np.sqrt(2 / _BANDS))
    return np.asarray(scale * np.cos(np.pi * k * (2 * n + 1) / (2 * _BANDS)))
