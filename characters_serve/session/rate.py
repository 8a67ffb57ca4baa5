"""In: what is sent; loss, round-trip time and REMB from receiver reports. Out: the video bitrate to
encode at, and which lost packets are worth sending again.

Pure policy. REMB alone is no guide: it cannot exceed about 1.5 times what is sent, so it starts at
138 kbit/s on a perfect network; it counts as a ceiling only while loss or delay is seen. Rates come
from a short ladder and change rarely, because a VP8 encoder pays a keyframe for each change.

Loss is counted from the reports' totals: under loss a browser reports with each of its requests,
and the fraction of one such report is that of a few packets. A link that is full is left at once,
for four fifths of what it delivered, and what filled it is tried again only after a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOSS_HIGH: Final = 0.10
LOSS_LOW: Final = 0.02
LOSS_FULL: Final = 0.25  # no network but a full one
LOSS_FULL_DELAYED: Final = 0.03
RTT_RISE_S: Final = 0.100
RTT_RISE_FULL_S: Final = 0.060
LADDER_STEP: Final = 1.5
UPDATE_S: Final = 1.0
RAISE_S: Final = 3.0
LOWER_S: Final = 1.0
DRAIN_S: Final = 0.5
KEPT_SHARE: Final = 0.8
FIRST_HOLD_S: Final = 15.0
LONGEST_HOLD_S: Final = 120.0

RESEND_SHARE: Final = 0.3
RESEND_BURST_BYTES: Final = 24_000
RESEND_AGE_S: Final = 1.0
RESEND_PAUSE_S: Final = 0.02


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
        self._sent_bytes = 0
        self._updated: tuple[float, int, int, int] | None = None
        self._blind_until_s = float("-inf")
        self._changed_s: float | None = None
        self._ladder = _ladder(bounds)
        self._ceiling_kbps = float("inf")
        self._ceiling_until_s = float("-inf")
        self._hold_s = FIRST_HOLD_S

    def sent(self, size: int) -> None:
        self._sent_bytes += size

    def remb(self, bits_per_s: int) -> None:
        self._remb_kbps = bits_per_s / 1000

    def report(self, now_s: float, lost: int, highest: int, rtt_s: float | None) -> None:
        """One receiver report: packets lost, and the highest number seen, since the beginning."""
        if rtt_s is not None:
            self.rtt_s = rtt_s if self.rtt_s is None else 0.5 * self.rtt_s + 0.5 * rtt_s
            self._min_rtt_s = min(self._min_rtt_s, rtt_s)
        if self._updated is None or now_s < self._blind_until_s:
            self._updated = (now_s, lost, highest, self._sent_bytes)
            return
        then_s, lost_then, highest_then, sent_then = self._updated
        elapsed_s, expected = now_s - then_s, highest - highest_then
        if elapsed_s < UPDATE_S or expected <= 0:
            return
        self._updated = (now_s, lost, highest, self._sent_bytes)
        loss = min(1.0, max(0, lost - lost_then) / expected)
        sent_kbps = (self._sent_bytes - sent_then) * 8 / elapsed_s / 1000
        self._update(now_s, loss, sent_kbps * (1 - loss))

    def _update(self, now_s: float, loss: float, delivered_kbps: float) -> None:
        rise_s = 0.0 if self.rtt_s is None else self.rtt_s - self._min_rtt_s
        delayed = rise_s > RTT_RISE_S
        full = loss > LOSS_FULL or (loss > LOSS_FULL_DELAYED and rise_s > RTT_RISE_FULL_S)
        if full:
            self._wanted_kbps = min(self._wanted_kbps, KEPT_SHARE * delivered_kbps)
            self._hold(now_s, delivered_kbps)
        elif loss > LOSS_HIGH:
            self._wanted_kbps *= 1 - 0.5 * loss
        elif delayed:
            self._wanted_kbps *= 0.85
            self._hold(now_s, delivered_kbps)
        elif loss < LOSS_LOW:
            self._wanted_kbps *= 1.08
        if (full or delayed or loss > LOSS_HIGH) and self._remb_kbps is not None:
            self._wanted_kbps = min(self._wanted_kbps, self._remb_kbps)
        if now_s < self._ceiling_until_s:
            self._wanted_kbps = min(self._wanted_kbps, self._ceiling_kbps)
        low, high = self._bounds.min_kbps, self._bounds.max_kbps
        self._wanted_kbps = min(max(self._wanted_kbps, low), high)
        self._settle(now_s)

    def _hold(self, now_s: float, delivered_kbps: float) -> None:
        """What has just filled the link is not tried for a while, each time for longer."""
        ceiling_kbps = min(0.99 * self.kbps, delivered_kbps)
        if now_s >= self._ceiling_until_s:
            self._ceiling_kbps = ceiling_kbps
            self._ceiling_until_s = now_s + self._hold_s
            self._hold_s = min(LONGEST_HOLD_S, 2 * self._hold_s)
        else:
            self._ceiling_kbps = min(self._ceiling_kbps, ceiling_kbps)

    def _settle(self, now_s: float) -> None:
        rung = max(rate for rate in self._ladder if rate <= self._wanted_kbps)
        if self._changed_s is not None:
            pause_s = LOWER_S if rung < self.kbps else RAISE_S
            if now_s - self._changed_s < pause_s:
                return
        if rung < self.kbps:
            # The queue drains first: its losses and delays are those of the rate before.
            self._blind_until_s = now_s + DRAIN_S + (self.rtt_s or 0.0)
        if rung != self.kbps:
            self.kbps = rung
            self._changed_s = now_s


class Resending:
    """Repeats take their share of the rate and no more: on a full link they would be all there is.

    Measured at 1.2 Mbit/s on a link of 1: repeats without a limit were ten times what the link
    carries, and 6 pictures a second came through.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._at_s = float("-inf")

    def allows(self, now_s: float, size: int, kbps: int) -> bool:
        """Whether one packet of that size may be repeated now."""
        bytes_per_s = RESEND_SHARE * kbps * 125
        self._bytes = min(RESEND_BURST_BYTES, self._bytes + (now_s - self._at_s) * bytes_per_s)
        self._at_s = now_s
        if size > self._bytes:
            return False
        self._bytes -= size
        return True

    @staticmethod
    def is_late(now_s: float, sent_s: float) -> bool:
        """A keyframe serves the viewer better than what was sent that long ago."""
        return now_s - sent_s > RESEND_AGE_S

    @staticmethod
    def is_underway(now_s: float, repeated_s: float, rtt_s: float | None) -> bool:
        """Asked for again before the last repeat can have arrived."""
        return now_s - repeated_s < max(RESEND_PAUSE_S, 0.8 * (rtt_s or 0.0))


def _ladder(bounds: RateBounds) -> list[int]:
    rungs = {bounds.min_kbps, bounds.start_kbps, bounds.max_kbps}
    rate = float(bounds.min_kbps)
    while rate < bounds.max_kbps:
        # Rungs next to the fixed ones would change the encoder for nothing.
        if all(abs(rate - rung) > 0.15 * rung for rung in (bounds.start_kbps, bounds.max_kbps)):
            rungs.add(round(rate))
        rate *= LADDER_STEP
    return sorted(rungs)
