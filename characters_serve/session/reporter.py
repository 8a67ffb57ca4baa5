"""In: the state of a session's playout, ladder and peer. Out: counters, gauges, and what the client
is shown of them.

Knows nothing of what is done about it.
"""

from __future__ import annotations

import logging
from typing import Final

from characters_serve.session.counters import Counters
from characters_serve.session.degrade import DegradeLadder
from characters_serve.session.events import EventsChannel
from characters_serve.session.peer import Peer
from characters_serve.session.playout import Playout

log = logging.getLogger(__name__)

REPORT_S: Final = 1.0
FROZEN_FACE_S: Final = 0.5
UNHEALTHY_S: Final = 2.0


class Reporter:
    def __init__(
        self,
        counters: Counters,
        events: EventsChannel,
        playout: Playout,
        ladder: DegradeLadder,
        fps: int,
        now_s: float,
    ) -> None:
        self._counters = counters
        self._events = events
        self._playout = playout
        self._ladder = ladder
        self._fps = fps
        self._reported_s = now_s
        self._underruns = 0
        self._held_ms = 0.0
        self._frames = 0
        self._avatar_state = "normal"
        self._stalled = False

    def new_underruns(self) -> int:
        """How many since the last call; counts them."""
        new = self._playout.underruns - self._underruns
        if new:
            self._underruns = self._playout.underruns
            self._counters.count("underruns_total", new)
        return new

    def chunk_awaited(self, waited_s: float) -> None:
        """How long the engine has owed a chunk; 0 when it owes none."""
        stalled = waited_s > UNHEALTHY_S
        if stalled and not self._stalled:
            self._counters.count("chunk_watchdog_total")
            log.warning("the engine has sent no chunk for %.1f s", waited_s)
        self._stalled = stalled
        self._counters.gauge("chunk_stalled", float(stalled))

    def tick(self, now_s: float, peer: Peer | None) -> None:
        """Several times a second: states as they change, numbers once a second."""
        state = "degraded" if self._ladder.degraded else "normal"
        if self._playout.held_s > FROZEN_FACE_S:
            state = "stalled"
        if state != self._avatar_state:
            self._avatar_state = state
            self._events.emit("server-message", {"kind": "avatar-state", "state": state})
        elapsed_s = now_s - self._reported_s
        if elapsed_s >= REPORT_S:
            self._reported_s = now_s
            if peer is not None:
                self.count_peer(peer)
            fps, self._frames = self._frames / elapsed_s, 0
            self._numbers(fps, peer)

    def count_peer(self, peer: Peer) -> None:
        sent, skipped = peer.delivery.take_counts()
        self._frames += sent
        self._counters.count("frames_sent_total", sent)
        self._counters.count("frames_skipped_total", skipped)

    def _numbers(self, fps: float, peer: Peer | None) -> None:
        rtt_s = peer.rate.rtt_s if peer else None
        rtt_ms = None if rtt_s is None else round(rtt_s * 1000, 1)
        held_ms = self._playout.held_slots * 1000 / self._fps
        self._counters.count("held_ms_total", held_ms - self._held_ms)
        self._held_ms = held_ms
        self._counters.gauge("playout_depth", self._playout.depth)
        self._counters.gauge("playout_lead", self._playout.lead)
        self._counters.gauge("video_fps", fps)
        self._counters.gauge("rtt_ms", rtt_ms)
        self._counters.gauge("engine_load", self._ladder.load)
        self._counters.gauge("video_kbps", peer.rate.kbps if peer else None)
        if self._events.attached:
            self._events.emit(
                "metrics",
                {
                    "fps": round(fps, 1),
                    "buffer": round(self._playout.depth, 2),
                    "late": self._playout.underruns,
                    "held_ms": round(held_ms),
                    "passes": self._ladder.passes,
                    "rtt_ms": rtt_ms,
                },
            )
