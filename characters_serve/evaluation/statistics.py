"""In: scores of the same clips under two configurations. Out: how far apart, and how sure.

Knows nothing of pictures or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_RESAMPLES: Final = 10_000
_PERCENTILES: Final = (2.5, 97.5)
ROOM: Final = 1.5
"""How many times the reruns' reach a configuration may use. Simulated with 51 clips and 4 reruns
that share their baseline: an unchanged configuration leaves the band in 0.2 % of cases, one that is
worse by 0.75 of a clip's spread in 75 %, by all of it in 92 %. With 1 it would be 11 % of the
unchanged ones."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over clips with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far from nothing its far end is."""
        return max(abs(self.low), abs(self.high))


def paired_difference(baseline: Sequence[float], other: Sequence[float]) -> Interval:
    """other - baseline, clip by clip. Raises ValueError where the clips do not pair up."""
    if len(baseline) != len(other):
        raise ValueError(f"{len(baseline)} and {len(other)} clips do not pair up")
    return mean_interval(np.subtract(other, baseline))


def mean_interval(values: Sequence[float] | Floats) -> Interval:
    """Percentile bootstrap of the mean (Efron and Tibshirani 1993, chapter 13), seeded."""
    numbers = np.asarray(values, np.float64)
    if not numbers.size:
        raise ValueError("no clips to take a mean of")
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, len(numbers), (_RESAMPLES, len(numbers)))
    low, high = np.percentile(numbers[drawn].mean(1), _PERCENTILES)
    return Interval(float(numbers.mean()), float(low), float(high))


def trend_per_minute(times_s: Sequence[float], scores: Sequence[Sequence[float]]) -> Interval:
    """The least-squares slope over time of each clip's scores, its mean over clips.

    scores: a row for each clip, a column for each time."""
    minutes = np.asarray(times_s, np.float64) / 60
    if len(minutes) < 2:
        raise ValueError("a trend needs two times or more")
    minutes -= minutes.mean()
    slopes = np.asarray(scores, np.float64) @ minutes / (minutes @ minutes)
    return mean_interval(slopes)


def band_of(reruns: Sequence[Interval]) -> float:
    """What reruns of one configuration say a difference may be without anything having changed."""
    return ROOM * max(rerun.reach for rerun in reruns)


def psnr(first: NDArray[Any], second: NDArray[Any]) -> float:
    """In dB, of 8-bit pictures; 100 where they are equal."""
    error = np.mean((first.astype(np.float64) - second) ** 2)
    return float(min(100.0, 10 * np.log10(255**2 / max(error, 1e-12))))
