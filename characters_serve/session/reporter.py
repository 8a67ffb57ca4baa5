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
SLOW_FPS: Final = 0.5  # below the model's rate
MEASURED_S: Final = 5.0  # what is shorter says little of its rate


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
        self._silent_ms = 0.0
        self._streaming = False
        self._streamed_s = 0.0
        self._shown = 0.0

    def new_underruns(self) -> int:
        """How many since the last call; counts them."""
        new = self._playout.underruns - self._underruns
        if new:
            self._underruns = self._playout.underruns
            self._counters.count("late_chunks_total", new)
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
            fps, frames, self._frames = self._frames / elapsed_s, self._frames, 0
            held_ms = self._held_ms
            self._numbers(fps, peer)
            # From the second after the first picture to the last: the start is not its rate.
            if self._streaming and peer is not None:
                self._streamed_s += elapsed_s
                self._shown += frames - (self._held_ms - held_ms) * self._fps / 1000
            self._streaming = peer is not None and frames > 0

    def finish(self) -> None:
        """The session is over: its rate counts once."""
        if self._streamed_s < MEASURED_S:
            return
        fps = max(0.0, self._shown / self._streamed_s)
        self._counters.observe("session_fps", fps)
        self._counters.count("sessions_measured_total")
        self._counters.count("sessions_slow_total", float(fps <= self._fps - SLOW_FPS))

    def count_peer(self, peer: Peer) -> None:
        sent, skipped = peer.delivery.take_counts()
        self._frames += sent
        self._counters.count("frames_sent_total", sent)
        self._counters.count("frames_skipped_total", skipped)
        for encode_ms in peer.take_encode_ms():
            self._counters.observe("encode_ms", encode_ms)

    def _numbers(self, fps: float, peer: Peer | None) -> None:
        rtt_s = peer.rate.rtt_s if peer else None
        rtt_ms = None if rtt_s is None else round(rtt_s * 1000, 1)
        held_ms = self._playout.held_slots * 1000 / self._fps
        self._counters.count("held_ms_total", held_ms - self._held_ms)
        self._held_ms = held_ms
        silent_ms = self._playout.silent_slots * 1000 / self._fps
        self._counters.count("silent_ms_total", silent_ms - self._silent_ms)
        self._silent_ms = silent_ms
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
