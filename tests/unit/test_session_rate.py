"""The rate policy on an invented link: a rate, a queue, a round trip, and random loss."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from characters_serve.session.rate import RateBounds, RateControl, Resending, departures_s

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
        arrives_s = link.free_s + link.rtt_s / 2 + jitter_s
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
