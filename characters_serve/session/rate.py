"""In: what is sent, and what of it arrived when. Out: the video bitrate to encode at, when to leave
a picture out, and when to fill the link with repeats.

Pure policy. A link is told by its queue: the shortest delay within a window, over the shortest ever
(as CoDel does, RFC 8289), which neither jitter nor a picture's own burst raises. Where the queue
stands the link is full, and what still arrives is what it carries. That is remembered and kept
below; loss alone says little of it. Upwards nothing is tried on the viewer: repeats fill up what is
sent to the next rate for half a second first, and where they queue that rate waits, each time for
twice as long. So a rate that fails costs no picture, and one that is taken a single keyframe.

Arrivals come per packet (transport-wide congestion control) from every current browser. Of other
clients only receiver reports are known, and the round trip stands for the delay; REMB cannot exceed
about 1.5 times what is sent, so it is a ceiling and only on a full link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import Final

WINDOW_S: Final = 0.25
WINDOW_PACKETS: Final = 5
REPORT_WINDOW_S: Final = 1.0
SILENCE_S: Final = 1.0  # without any news, what is missing was a blackout's
REPORT_SILENCE_S: Final = 2.5
QUEUE_HIGH_S: Final = 0.04
NOISE_LIMIT_S: Final = 0.02
FALLING: Final = 0.9  # a queue that a keyframe left behind drains by more in a window
NOISE_TAU_S: Final = 5.0
BASE_DELAY_S: Final = 10.0  # a longer path is known as one after this, twice at most
LOSS_TAU_S: Final = 3.0
LOSS_HIGH: Final = 0.2
LOSS_FULL: Final = 0.05  # where there is a queue, too
LOWER_S: Final = 1.0

KEPT_SHARE: Final = 0.87
STEP_DOWN: Final = 0.93  # at least: an encoder may take more than its rate
LONGEST_PAUSE_S: Final = 0.12  # three pictures; from 0.15 s on a browser counts a freeze

RAISE_S: Final = 3.0
RAISE: Final = 1.3
WORTH_A_KEYFRAME: Final = 1.08
PROBE_MARGIN: Final = 1.15
PROBE_S: Final = 0.8
PROBE_ENDS_S: Final = 3.0
FIRST_HOLD_S: Final = 15.0
LONGEST_HOLD_S: Final = 120.0
RELAPSE_S: Final = 5.0
OTHER_LINK: Final = 0.75  # what carries that much less is not the link that was tried
LOSS_SIGMAS: Final = 3.0
SENT_TAU_S: Final = 1.0
USED_SHARE: Final = 0.7  # who does not use the rate needs no higher one

PACKETS_KEPT: Final = 4096
NUMBERS: Final = 1 << 16

# Of 1088x704 at 24 fps. Fewer pixels need more bits each: rates go with their number to the 3/4.
LARGE_PIXELS_PER_S: Final = 1088 * 704 * 24
LARGE_KBPS: Final = (1500, 350, 4000)
PIXELS_POWER: Final = 0.75


@dataclass(frozen=True, slots=True)
class RateBounds:
    start_kbps: int
    min_kbps: int
    max_kbps: int

    @classmethod
    def of_picture(
        cls,
        pixels_per_s: int,
        *,
        start_kbps: int | None = None,
        min_kbps: int | None = None,
        max_kbps: int | None = None,
    ) -> RateBounds:
        """What is not given comes from the picture, and gives way to what is."""
        scale = (pixels_per_s / LARGE_PIXELS_PER_S) ** PIXELS_POWER
        start, low, high = (max(1, round(kbps * scale)) for kbps in LARGE_KBPS)
        low = min_kbps or min(low, start_kbps or low, max_kbps or low)
        high = max_kbps or max(high, start_kbps or high, low)
        return cls(start_kbps or min(max(start, low), high), low, high)


@dataclass(slots=True)
class _Packet:
    sent_s: float
    size: int
    missing: bool = False


@dataclass(slots=True)
class _Window:
    """What is known of packets sent from since_s on."""

    since_s: float
    began_s: float | None = None
    queue_s: float = float("inf")
    sent_s: float = float("-inf")
    first_s: float = float("inf")
    last_s: float = float("-inf")
    size: int = 0
    arrived: int = 0
    lost: int = 0

    def add(self, packet: _Packet, arrived_s: float, queue_s: float) -> None:
        self.arrived += 1
        self.size += packet.size
        self.sent_s = max(self.sent_s, packet.sent_s)
        self.first_s = min(self.first_s, arrived_s)
        self.last_s = max(self.last_s, arrived_s)
        self.queue_s = min(self.queue_s, queue_s)

    def joined(self, later: _Window) -> _Window:
        return _Window(
            self.since_s,
            queue_s=later.queue_s,
            first_s=self.first_s,
            last_s=later.last_s,
            size=self.size + later.size,
            arrived=self.arrived + later.arrived,
        )

    @property
    def loss(self) -> float:
        return max(0, self.lost) / max(1, self.lost + self.arrived)

    @property
    def kbps(self) -> float:
        """How fast they came in; the first one ends no interval."""
        seconds = self.last_s - self.first_s
        share = (self.arrived - 1) / self.arrived if self.arrived else 0.0
        return self.size * share * 8 / 1000 / seconds if seconds > 0 else 0.0


@dataclass(slots=True)
class _Probe:
    kbps: float
    began_s: float
    size: int = 0


class RateControl:
    def __init__(self, bounds: RateBounds) -> None:
        self.rtt_s: float | None = None
        self.kbps = bounds.start_kbps
        self.link_kbps: float | None = None  # what the link last carried when it was full
        self._bounds = bounds
        self._remb_kbps: float | None = None
        self._changed_s: float | None = None
        self._raised_s = float("-inf")
        self._paused_until_s = float("-inf")
        self._loss = 0.0
        self._noise_s = 0.0
        self._before: _Window | None = None  # the last that was judged at this rate
        self._judged_s: float | None = None
        self._hold_s = FIRST_HOLD_S
        self._held_until_s = float("-inf")
        self._probe: _Probe | None = None
        # Packets by their number; the delays are between two clocks, so only differences count.
        self._number = 0
        self._packets: dict[int, _Packet] = {}
        self._per_packet = False
        self._heard_s = float("-inf")
        self._window = _Window(float("-inf"))
        self._latest_s: deque[float] = deque(maxlen=WINDOW_PACKETS)  # their delays in the queue
        self._base: list[tuple[float, float]] = []  # beginning of a period, its shortest delay
        self._sent_kbps = 0.0
        self._sent_at_s: float | None = None
        self._highest = 0
        self._reported: tuple[float, int, int, int] | None = None
        self._sent_size = 0

    # ------------------------------------------------------------ what is sent

    def sent(self, now_s: float, size: int) -> int:
        """One packet of that many bytes leaves. Returns its number, of 16 bits."""
        number = self._number
        self._number = (number + 1) % NUMBERS
        self._packets[number] = _Packet(now_s, size)
        if len(self._packets) > PACKETS_KEPT:
            del self._packets[next(iter(self._packets))]
        self._sent_size += size
        elapsed_s = 0.0 if self._sent_at_s is None else now_s - self._sent_at_s
        self._sent_kbps = self._sent_kbps * exp(-elapsed_s / SENT_TAU_S)
        self._sent_kbps += size * 8 / 1000 / SENT_TAU_S
        self._sent_at_s = now_s
        if self._probe is not None:
            self._probe.size += size
        return number

    def pauses(self, now_s: float) -> bool:
        """Whether this picture is left out, so that a full queue drains before the keyframe."""
        return now_s < self._paused_until_s

    def probes(self, now_s: float, size: int) -> bool:
        """Whether a packet of that size is repeated now, only to fill the link."""
        probe = self._probe
        if probe is None:
            return False
        elapsed_s = now_s - probe.began_s
        if elapsed_s > (PROBE_S if self._per_packet else PROBE_ENDS_S):
            return False
        return probe.size + size <= probe.kbps * 125 * elapsed_s

    # ------------------------------------------------------------ what is heard of it

    @property
    def loss(self) -> float:
        """The share of packets that does not arrive, over the last seconds."""
        return self._loss

    def remb(self, bits_per_s: int) -> None:
        self._remb_kbps = bits_per_s / 1000

    def arrived(self, now_s: float, first: int, arrivals_s: Sequence[float | None]) -> None:
        """Packets from number `first` on: when each arrived, by the receiver's clock, or None."""
        self._per_packet = True
        if self._changed_s is None:
            self._changed_s = now_s
        elif now_s - self._heard_s > SILENCE_S:
            self._begin_window(now_s)
            self._judged_s = now_s
        self._heard_s = now_s
        window = self._window
        for offset, arrived_s in enumerate(arrivals_s):
            number = (first + offset) % NUMBERS
            packet = self._packets.get(number)
            if packet is None:
                continue
            if arrived_s is None:
                if packet.sent_s >= window.since_s and not packet.missing:
                    packet.missing = True
                    window.lost += 1
                continue
            del self._packets[number]
            queue_s = self._queue(packet.sent_s, arrived_s)
            if packet.sent_s >= window.since_s:
                window.lost -= packet.missing
                window.add(packet, arrived_s, queue_s)
                self._latest_s.append(queue_s)
        if window.began_s is None and window.arrived:
            window.began_s = now_s
        if self._probe is not None:
            latest = len(self._latest_s) == WINDOW_PACKETS
            queued = latest and min(self._latest_s) > self._queue_limit_s
            if queued or window.sent_s - self._probe.began_s >= PROBE_S - 0.05:
                self._judge_probe(now_s, queued, window)
        elif (
            window.began_s is not None
            and now_s - window.began_s >= WINDOW_S
            and window.arrived >= WINDOW_PACKETS
        ):
            self._begin_window(window.since_s)
            self._judge(now_s, window)
        self._maybe_probe(now_s)

    def report(self, now_s: float, lost: int, highest: int, rtt_s: float | None) -> None:
        """One receiver report: packets lost, and the highest number seen, since the beginning."""
        if rtt_s is not None:
            self.rtt_s = rtt_s if self.rtt_s is None else 0.5 * self.rtt_s + 0.5 * rtt_s
        if self._per_packet:
            return
        if rtt_s is not None:
            self._window.queue_s = min(self._window.queue_s, self._queue(now_s - rtt_s, now_s))
        if self._changed_s is None:
            self._changed_s = self._heard_s = now_s
        if highest != self._highest:
            silence_s = now_s - self._heard_s
            self._highest, self._heard_s = highest, now_s
            if silence_s > REPORT_SILENCE_S:
                self._reported = None  # this one may still be of before the blackout
                return
        if self._reported is None or now_s - (self.rtt_s or 0.0) < self._window.since_s:
            self._restart_report(now_s, lost, highest)
            return
        then_s, lost_then, highest_then, size_then = self._reported
        elapsed_s, expected = now_s - then_s, highest - highest_then
        if elapsed_s < REPORT_WINDOW_S or expected <= 0:
            return
        missing = min(expected, max(0, lost - lost_then))
        window = _Window(
            then_s,
            queue_s=0.0 if self._window.queue_s == float("inf") else self._window.queue_s,
            first_s=then_s,
            last_s=now_s,
            size=round((self._sent_size - size_then) * (1 - missing / expected)),
            arrived=expected - missing,
            lost=missing,
        )
        self._restart_report(now_s, lost, highest)
        if self._probe is not None:
            self._judge_probe(now_s, window.queue_s > self._queue_limit_s, window)
        else:
            self._judge(now_s, window)
        self._maybe_probe(now_s)

    def _restart_report(self, now_s: float, lost: int, highest: int) -> None:
        self._reported = (now_s, lost, highest, self._sent_size)
        self._window.queue_s = float("inf")

    def _queue(self, sent_s: float, arrived_s: float) -> float:
        """The delay over the shortest one of this period and the last."""
        delay_s = arrived_s - sent_s
        if not self._base or sent_s - self._base[-1][0] > BASE_DELAY_S:
            self._base = [*self._base[-1:], (sent_s, delay_s)]
        began_s, shortest_s = self._base[-1]
        self._base[-1] = (began_s, min(shortest_s, delay_s))
        return delay_s - min(shortest_s for _, shortest_s in self._base)

    def _begin_window(self, since_s: float) -> None:
        self._window = _Window(since_s)
        self._latest_s.clear()

    # ------------------------------------------------------------ what follows from it

    @property
    def _queue_limit_s(self) -> float:
        return QUEUE_HIGH_S + min(NOISE_LIMIT_S, 2 * self._noise_s)

    def _judge(self, now_s: float, window: _Window) -> None:
        elapsed_s = WINDOW_S if self._judged_s is None else now_s - self._judged_s
        self._judged_s = now_s
        self._loss += (1 - exp(-elapsed_s / LOSS_TAU_S)) * (window.loss - self._loss)
        before, self._before = self._before, window
        stands = window.queue_s > self._queue_limit_s
        stood = before is not None and before.queue_s > self._queue_limit_s
        falls = before is not None and window.queue_s < FALLING * before.queue_s
        if stands and not falls and (stood or self._loses_more(window, LOSS_FULL)):
            # A window is short: of it and the one before, one may be what a stall left of it.
            carried_kbps = max(window.kbps, before.joined(window).kbps if before else 0.0)
            self._full(now_s, window.queue_s, carried_kbps)
            return
        waited_s = float("inf") if self._changed_s is None else now_s - self._changed_s
        if waited_s > LOWER_S:  # until then the queue is that of the keyframe
            jitter_s = window.queue_s - self._noise_s
            self._noise_s += (1 - exp(-elapsed_s / NOISE_TAU_S)) * jitter_s
        if self._loss > LOSS_HIGH and waited_s > LOWER_S:
            self._change(now_s, self.kbps * (1 - 0.5 * self._loss))

    def _full(self, now_s: float, queue_s: float, kbps: float) -> None:
        known_kbps, self.link_kbps = self.link_kbps, kbps
        relapsed = now_s - self._raised_s < RELAPSE_S
        self._raised_s = float("-inf")
        if not relapsed and (known_kbps is None or kbps < OTHER_LINK * known_kbps):
            self._hold_s = FIRST_HOLD_S
        self._hold(now_s, failed=relapsed)
        wanted_kbps = min(KEPT_SHARE * kbps, STEP_DOWN * self.kbps)
        if self._remb_kbps is not None:
            wanted_kbps = min(wanted_kbps, self._remb_kbps)
        self._change(now_s, wanted_kbps, pause_s=min(queue_s, LONGEST_PAUSE_S))

    def _hold(self, now_s: float, *, failed: bool) -> None:
        self._held_until_s = now_s + self._hold_s
        if failed:
            self._hold_s = min(LONGEST_HOLD_S, 2 * self._hold_s)

    def _maybe_probe(self, now_s: float) -> None:
        probe = self._probe
        if probe is not None:
            if now_s - probe.began_s > PROBE_ENDS_S:  # too little was heard of it
                self._probe = None
                self._held_until_s = max(self._held_until_s, now_s + RAISE_S)
            return
        aim_kbps = min(PROBE_MARGIN * RAISE * self.kbps, PROBE_MARGIN * self._bounds.max_kbps)
        if self.link_kbps is not None:
            least_kbps = WORTH_A_KEYFRAME * self.kbps
            aim_kbps = min(aim_kbps, PROBE_MARGIN * max(self.link_kbps, least_kbps))
        waited_s = 0.0 if self._changed_s is None else now_s - self._changed_s
        if (
            aim_kbps >= PROBE_MARGIN * WORTH_A_KEYFRAME * self.kbps
            and now_s >= self._held_until_s
            and waited_s >= RAISE_S
            and (self._before is None or self._before.queue_s <= self._queue_limit_s)
            and self._loss <= LOSS_HIGH
            and self._sent_kbps >= USED_SHARE * self.kbps
        ):
            self._probe = _Probe(aim_kbps, now_s)
            self._begin_window(now_s)

    def _judge_probe(self, now_s: float, queued: bool, window: _Window) -> None:
        probe, self._probe = self._probe, None
        assert probe is not None
        self._begin_window(now_s)
        self._judged_s = now_s
        if not queued and not self._loses_more(window, LOSS_HIGH):
            if self.link_kbps is None:
                self._hold_s = FIRST_HOLD_S  # the last raise has lasted
            self.link_kbps = None
            self._raised_s = now_s
            self._change(now_s, probe.kbps / PROBE_MARGIN)
            return
        self._hold(now_s, failed=True)
        # What was sent before the probe did pass: no stall can make the link narrower than that.
        self.link_kbps = max(window.kbps, float(self.kbps))
        wanted_kbps = max(KEPT_SHARE * self.link_kbps, STEP_DOWN * self.kbps)
        if not self.kbps / WORTH_A_KEYFRAME < wanted_kbps < self.kbps * WORTH_A_KEYFRAME:
            self._change(now_s, wanted_kbps)

    def _loses_more(self, window: _Window, share: float) -> bool:
        """By more than that share, and than chance explains."""
        packets = window.lost + window.arrived
        usual = self._loss * packets
        chance = LOSS_SIGMAS * sqrt(max(1.0, usual * (1 - self._loss)))
        return window.lost - usual > max(chance, share * packets)

    def _change(self, now_s: float, wanted_kbps: float, pause_s: float = 0.0) -> None:
        kbps = round(min(max(wanted_kbps, self._bounds.min_kbps), self._bounds.max_kbps))
        if kbps == self.kbps:
            return
        self.kbps = kbps
        self._changed_s = now_s
        self._paused_until_s = now_s + pause_s
        # What is under way says how the link was at the rate before.
        self._before = None
        self._begin_window(self._paused_until_s)
        self._reported = None
