"""The rate policy on an invented link: a rate, a queue, a round trip, and random loss."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from characters_serve.session.pacing import Resending, departures_s
from characters_serve.session.rate import RateBounds, RateControl

FPS = 24
PACKET = 1200
OVERHEAD = 40
VOICE_KBPS = 32.0
FEEDBACK_S = 0.1


@dataclass
class Link:
    """What it carries in kbit/s, of which the voice takes its part first; drops what would queue
    for longer than queue_s, and the share `loss` besides."""

    kbps: float
    queue_s: float = 0.2
    rtt_s: float = 0.04
    loss: float = 0.0
    jitter_s: float = 0.0
    blackout: bool = False
    free_s: float = 0.0


@dataclass
class Viewer:
    """Sends pictures at the control's rate through the link and hears of their arrival.

    A change of the rate costs a keyframe of three pictures' size, as of the encoder's options.
    """

    control: RateControl
    link: Link
    per_packet: bool = True
    used: float = 1.0  # of the rate, by the encoder
    now_s: float = 1000.0
    rates: list[int] = field(default_factory=list)  # at each picture
    queues_s: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)  # when
    changes_s: list[float] = field(default_factory=list)
    raises_s: list[float] = field(default_factory=list)
    filler: int = 0
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _count: int = 0
    _encoded_at: int = 0
    _numbers: list[int] = field(default_factory=list)
    _arrivals: dict[int, float] = field(default_factory=dict)
    _told: int = 0
    _lost: int = 0
    _last_s: float = 0.0
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self._at(self.now_s, self._picture)
        self._at(self.now_s + FEEDBACK_S, self._feedback)

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._events[0][0] < end_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act(self.now_s)
        self.now_s = end_s

    def _at(self, when_s: float, act: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, act))

    def _picture(self, now_s: float) -> None:
        self._at(now_s + 1 / FPS, self._picture)
        control = self.control
        self.rates.append(control.kbps)
        self.queues_s.append(max(0.0, self.link.free_s - now_s))
        if control.pauses(now_s):
            return
        size = control.kbps * 125 * self.used / FPS
        if control.kbps != self._encoded_at:
            self.changes_s.append(now_s)
            if self._encoded_at and control.kbps > self._encoded_at:
                self.raises_s.append(now_s)
            self._encoded_at = control.kbps
            size *= 3
        whole, rest = divmod(round(size), PACKET)
        sizes = [PACKET] * whole + [rest] * (rest > 0)
        for piece, wait_s in zip(sizes, departures_s(sizes, control.kbps, FPS), strict=True):
            self._at(now_s + wait_s, partial(self._send, size=piece))
        self._at(now_s + 0.031, self._fill)

    def _fill(self, now_s: float) -> None:
        while self.control.probes(now_s, PACKET):
            self.filler += PACKET
            self._send(now_s, PACKET)

    def _send(self, now_s: float, size: int) -> None:
        link, number = self.link, len(self._numbers)
        self._numbers.append(self.control.sent(now_s, size))
        if link.blackout or self._random.random() < link.loss:
            return
        began_s = max(now_s, link.free_s)
        if began_s - now_s > link.queue_s:
            self.dropped.append(now_s)
            return
        link.free_s = began_s + (size + OVERHEAD) * 8 / 1000 / (link.kbps - VOICE_KBPS)
        jitter_s = self._random.uniform(0, link.jitter_s)
        arrives_s = max(self._last_s, link.free_s + link.rtt_s / 2 + jitter_s)  # in order
        self._last_s = arrives_s
        self._at(arrives_s, lambda at_s: self._arrivals.update({number: at_s}))

    def _feedback(self, now_s: float) -> None:
        """What lies before the last arrival and is not there is missing."""
        self._at(now_s + (FEEDBACK_S if self.per_packet else 1.0), self._feedback)
        highest = max(self._arrivals, default=-1)
        if self.link.blackout or highest < self._told:
            return
        news = [self._arrivals.get(n) for n in range(self._told, highest + 1)]
        first, self._told = self._told, highest + 1
        self._lost += news.count(None)
        lost, delay_s = self._lost, self.link.rtt_s / 2
        queued_s = max(0.0, self.link.free_s - now_s)

        def hear(at_s: float) -> None:
            if self.per_packet:
                # The receiver has a clock of its own.
                times = [None if at is None else at + 12_345.678 for at in news]
                self.control.arrived(at_s, self._numbers[first], times)
            else:
                self.control.report(at_s, lost, highest + 1, self.link.rtt_s + queued_s)

        self._at(now_s + delay_s, hear)

    def median_of_last(self, seconds: float) -> float:
        return float(np.median(self.rates[-round(seconds * FPS) :]))

    def queue_of_last(self, seconds: float, quantile: float = 0.9) -> float:
        return float(np.quantile(self.queues_s[-round(seconds * FPS) :], quantile))


def viewer(start_kbps: int = 1200, **link: float) -> Viewer:
    made = Link(**{"kbps": 1e6, **link})  # type: ignore[arg-type]
    return Viewer(RateControl(RateBounds(start_kbps, 100, 6000)), made)


def carried(kbps: float) -> float:
    """Of the video, beside the voice and without headers."""
    return (kbps - VOICE_KBPS) * PACKET / (PACKET + OVERHEAD)


@pytest.mark.parametrize("kbps", [300, 600, 1000, 5000])
@pytest.mark.parametrize("start_kbps", [250, 1200])
def test_the_rate_comes_to_rest_just_under_the_link(kbps: int, start_kbps: int) -> None:
    made = viewer(start_kbps, kbps=kbps)
    made.run(70)
    assert 0.8 <= made.median_of_last(20) / carried(kbps) <= 0.95
    assert made.queue_of_last(20) < 0.03
    settled = [at_s for at_s in made.dropped if at_s > made.now_s - 60]
    assert settled == []


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    kbps=st.floats(300, 5000),
    rtt_s=st.floats(0.005, 0.3),
    queue_s=st.floats(0.1, 1.0),
    loss=st.sampled_from([0.0, 0.0, 0.02, 0.05, 0.1]),
    jitter_s=st.sampled_from([0.0, 0.0, 0.01, 0.03]),
)
def test_on_any_link_it_rests_below_and_no_queue_stands(
    kbps: float, rtt_s: float, queue_s: float, loss: float, jitter_s: float
) -> None:
    made = viewer(600, kbps=kbps, rtt_s=rtt_s, queue_s=queue_s, loss=loss, jitter_s=jitter_s)
    made.run(60)
    arriving_kbps = made.median_of_last(20) * (1 - loss)
    assert 0.7 <= arriving_kbps / carried(kbps) <= 0.97
    assert made.queue_of_last(20) < 0.06


def test_a_full_link_is_left_within_a_second_and_a_half_in_one_step() -> None:
    made = viewer(1200, kbps=600, queue_s=0.1)
    made.run(60)
    assert len(made.changes_s) == 2 and made.changes_s[1] - 1000 < 1.5
    assert made.queue_of_last(58, 0.99) < 0.1


def test_a_link_that_narrows_is_followed_and_one_that_widens_is_used() -> None:
    made = viewer(1200, kbps=2000)
    made.run(30)
    made.link.kbps = 500
    began_s = made.now_s
    made.run(2)
    assert made.rates[-1] < carried(500)
    made.run(8)
    assert max(made.queues_s[-round(7 * FPS) :]) < 0.1
    assert sum(began_s < at_s for at_s in made.changes_s) <= 3
    made.link.kbps = 3000
    made.run(75)
    assert made.rates[-1] >= 0.8 * carried(3000)


def test_a_probe_that_fails_is_repeated_ever_more_seldom_and_costs_no_picture() -> None:
    made = viewer(900, kbps=1000)
    starts: list[float] = []
    for _ in range(200):
        before = made.filler
        made.run(1)
        if made.filler > before and (not starts or made.now_s - starts[-1] > 2):
            starts.append(made.now_s)
    # The first tries find the link; each that fails doubles the time until the next.
    gaps = np.diff(starts)
    assert len(starts) <= 6
    assert gaps[-1] >= 60 and gaps[-1] > 1.8 * gaps[-2]
    assert made.dropped == []
    assert len(made.changes_s) <= 4


def test_random_loss_alone_leaves_the_rate_where_it_would_be() -> None:
    for loss in (0.02, 0.05, 0.1):
        made = viewer(1200, loss=loss)
        made.run(30)
        assert min(made.rates) == 1200 and made.rates[-1] > 4000


def test_half_of_everything_lost_is_too_much_for_any_rate() -> None:
    made = viewer(1200, loss=0.5)
    made.run(40)
    assert made.rates[-1] == 100


def test_jitter_is_no_queue() -> None:
    made = viewer(1200, rtt_s=0.2, jitter_s=0.06)
    made.run(40)
    assert min(made.rates) == 1200 and made.rates[-1] > 2000


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    dark_s=st.sampled_from([3, 10, 40]),
    at_s=st.floats(5, 30),
    kbps=st.sampled_from([600.0, 2000.0, 1e6]),
    loss=st.sampled_from([0.0, 0.05]),
)
def test_after_a_blackout_the_rate_is_what_it_was(
    dark_s: int, at_s: float, kbps: float, loss: float
) -> None:
    made = viewer(500, kbps=kbps, loss=loss)
    made.run(at_s)
    before = made.rates[-1]
    made.link.blackout = True
    made.run(dark_s)
    made.link.blackout = False
    made.run(3)
    assert min(made.rates[-round(3 * FPS) :]) >= before
    assert made.queue_of_last(3) < 0.1


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    dark_s=st.sampled_from([3, 10, 40]), at_s=st.floats(5, 30), loss=st.sampled_from([0.0, 0.05])
)
def test_a_blackout_is_no_loss_by_receiver_reports_either(
    dark_s: int, at_s: float, loss: float
) -> None:
    made = viewer(1200, loss=loss)
    made.per_packet = False
    made.run(at_s)
    before = made.rates[-1]
    made.link.blackout = True
    made.run(dark_s)
    made.link.blackout = False
    made.run(6)
    assert min(made.rates[-round(6 * FPS) :]) >= before


def test_a_longer_path_is_taken_for_a_queue_for_a_while_only() -> None:
    made = viewer(1200)
    made.run(5)
    made.link.rtt_s += 0.3
    made.run(60)
    assert made.rates[-1] > 1200


def test_the_rate_rises_every_three_seconds_at_most() -> None:
    made = viewer(300)
    made.run(40)
    assert len(made.raises_s) >= 6 and min(np.diff(made.raises_s)) >= 3


def test_who_does_not_use_the_rate_is_given_no_more() -> None:
    made = viewer(1200)
    made.used = 0.3
    made.run(30)
    assert made.rates[-1] == 1200 and made.filler == 0


def test_receiver_reports_alone_find_the_link_too() -> None:
    for kbps in (600, 2000):
        made = viewer(1200, kbps=kbps)
        made.per_packet = False
        made.run(90)
        # A second between reports: a rate too high is noticed late.
        assert 0.7 <= made.median_of_last(60) / carried(kbps) <= 1.0
        assert made.queue_of_last(60, 0.5) < 0.02


def test_a_low_first_remb_on_a_good_network_is_ignored() -> None:
    made = viewer(1200)
    made.per_packet = False
    made.control.remb(138_000)
    made.run(60)
    assert min(made.rates) == 1200 and made.rates[-1] > 4000


def test_a_clients_nonsense_keeps_the_rate_within_its_bounds() -> None:
    made = random.Random(3)
    control = RateControl(RateBounds(1200, 300, 3000))
    now_s = 0.0
    for _ in range(3000):
        now_s += made.random() * 0.1
        for _ in range(made.randrange(5)):
            control.sent(now_s, made.randrange(1300))
        times = [made.choice([None, made.uniform(-1e6, 1e6)]) for _ in range(made.randrange(40))]
        control.arrived(now_s, made.randrange(1 << 16), times)
        assert 300 <= control.kbps <= 3000


# ---------------------------------------------------------------- bounds


def test_the_bounds_come_from_the_picture() -> None:
    large = RateBounds.of_picture(1088 * 704 * 24)
    assert large == RateBounds(1500, 350, 4000)
    tiny = RateBounds.of_picture(384 * 256 * 24)
    assert tiny == RateBounds(322, 75, 858)


@given(
    pixels=st.integers(1000, 10**8),
    rates=st.tuples(*[st.none() | st.integers(1, 20_000)] * 3),
)
def test_what_is_given_holds_and_the_rest_gives_way(
    pixels: int, rates: tuple[int | None, int | None, int | None]
) -> None:
    given_rates = sorted(rate for rate in rates if rate is not None)
    low, start, high = (None if rate is None else given_rates.pop(0) for rate in rates)
    bounds = RateBounds.of_picture(pixels, start_kbps=start, min_kbps=low, max_kbps=high)
    assert 0 < bounds.min_kbps <= bounds.start_kbps <= bounds.max_kbps
    for asked, got in ((low, bounds.min_kbps), (start, bounds.start_kbps), (high, bounds.max_kbps)):
        assert asked in (None, got)


# ---------------------------------------------------------------- pacing


def test_an_ordinary_picture_leaves_at_once_and_a_keyframe_is_spread_out() -> None:
    assert departures_s([1200] * 7, 1000, 24) == pytest.approx([0] * 6 + [0.0019], abs=2e-3)
    times_s = departures_s([1200] * 20, 1000, 24)
    assert times_s == sorted(times_s)
    assert 0.02 < times_s[-1] <= 0.03 + 1e-9
    assert departures_s([], 1000, 24) == []


def test_repeats_have_a_share_of_the_rate() -> None:
    resending = Resending()
    allowed = sum(resending.allows(now / 1000, 1200, 1000) for now in range(10_000))
    assert allowed * 1200 * 8 / 10 / 1000 == pytest.approx(0.3 * 1000, rel=0.1)
    assert not resending.allows(10.0, 24_001, 1000)


def test_what_is_old_or_on_its_way_is_not_repeated() -> None:
    assert Resending.is_late(10.0, 8.9) and not Resending.is_late(10.0, 9.2)
    assert Resending.is_underway(10.0, 9.95, 0.1)
    assert not Resending.is_underway(10.0, 9.9, 0.1)
    assert not Resending.is_underway(10.0, 9.97, None)
