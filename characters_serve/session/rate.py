"""In: loss, round-trip time and REMB from receiver reports. Out: the video bitrate to encode at.

Pure policy. REMB alone is no guide: it cannot exceed about 1.5 times what is sent, so it starts at
138 kbit/s on a perfect network; it counts as a ceiling only while loss or delay is seen. Rates come
from a short ladder and change rarely, because a VP8 encoder pays a keyframe for each change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOSS_HIGH: Final = 0.10
LOSS_LOW: Final = 0.02
RTT_RISE_S: Final = 0.100
LADDER_STEP: Final = 1.5
UPDATE_S: Final = 1.0
CHANGE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class RateBounds:
    start_kbps: int
    min_kbps: int
    max_kbps: int


class RateControl:
    def __init__(self, bounds: RateBounds) -> None:
        self.rtt_s: float | None = None
        self.kbps = bounds.start_kbps
        self._bounds = bounds
        self._wanted_kbps = float(bounds.start_kbps)
        self._min_rtt_s = float("inf")
        self._remb_kbps: float | None = None
        self._updated_s: float | None = None
        self._changed_s: float | None = None
        self._ladder = _ladder(bounds)

    def remb(self, bits_per_s: int) -> None:
        self._remb_kbps = bits_per_s / 1000

    def report(self, now_s: float, loss: float, rtt_s: float | None) -> None:
        """One receiver report; loss is the fraction lost since the last one."""
        if rtt_s is not None:
            self.rtt_s = rtt_s if self.rtt_s is None else 0.7 * self.rtt_s + 0.3 * rtt_s
            self._min_rtt_s = min(self._min_rtt_s, rtt_s)
        if self._updated_s is not None and now_s - self._updated_s < UPDATE_S:
            return
        self._updated_s = now_s
        delayed = self.rtt_s is not None and self.rtt_s > self._min_rtt_s + RTT_RISE_S
        if loss > LOSS_HIGH:
            self._wanted_kbps *= 1 - 0.5 * loss
        elif delayed:
            self._wanted_kbps *= 0.85
        elif loss < LOSS_LOW:
            self._wanted_kbps *= 1.08
        if (loss > LOSS_HIGH or delayed) and self._remb_kbps is not None:
            self._wanted_kbps = min(self._wanted_kbps, self._remb_kbps)
        low, high = self._bounds.min_kbps, self._bounds.max_kbps
        self._wanted_kbps = min(max(self._wanted_kbps, low), high)
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        rung = max(rate for rate in self._ladder if rate <= self._wanted_kbps)
        if self._changed_s is not None and now_s - self._changed_s < CHANGE_S:
            return
        if rung != self.kbps:
            self.kbps = rung
            self._changed_s = now_s


def _ladder(bounds: RateBounds) -> list[int]:
    rungs = {bounds.min_kbps, bounds.start_kbps, bounds.max_kbps}
    rate = float(bounds.min_kbps)
    while rate < bounds.max_kbps:
        # Rungs next to the fixed ones would change the encoder for nothing.
        if all(abs(rate - rung) > 0.15 * rung for rung in (bounds.start_kbps, bounds.max_kbps)):
            rungs.add(round(rate))
        rate *= LADDER_STEP
    return sorted(rungs)
