"""In: offers, chunks, agent messages and time. Out: answers, steps, states and the verdict "over".

One session from ready to over: it owns the clock, the chunker, the playout and the peer, and wires
them. Nothing of it outlives close(). Knows nothing of processes or of other sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from characters_serve.config import Config
from characters_serve.messages import (
    AgentStarted,
    Message,
    OpenSession,
    PictureReport,
    StepInput,
    ToolResult,
    VideoChunk,
)
from characters_serve.session.chunker import Chunker
from characters_serve.session.clock import MediaClock
from characters_serve.session.conversation import Conversation
from characters_serve.session.counters import Counters
from characters_serve.session.degrade import DegradeLadder
from characters_serve.session.events import (
    RTVI_VERSION,
    BadMessage,
    ClientInterrupt,
    ClientReady,
    ClientText,
    ClientToolResult,
    EventsChannel,
    ProbeHeard,
    ProbePing,
    parse_client_message,
    parse_probe,
    pong,
)
from characters_serve.session.ice import NoPortFree
from characters_serve.session.lifecycle import (
    Changed,
    EndingSoon,
    Lifecycle,
    Limits,
    Over,
    State,
    Verdict,
)
from characters_serve.session.offer import OfferRefused, check_offer
from characters_serve.session.peer import Peer, PeerCallbacks
from characters_serve.session.playout import WAIT_S, Playout
from characters_serve.session.reporter import Reporter
from characters_serve.session.trace import open_trace
from characters_serve.session.tracks import Delivery

log = logging.getLogger(__name__)

TICK_S: Final = 0.25


class OfferConflict(RuntimeError):
    """The session has a live client already."""


@dataclass(frozen=True, slots=True)
class SessionLinks:
    """on_over and on_fault are called once at most; a fault is the group's, not the client's."""

    send_step: Callable[[StepInput], Awaitable[None]]
    to_agent: Callable[[Message], None]
    on_state: Callable[[State, str], None]
    on_over: Callable[[str], None]
    on_fault: Callable[[str], None]


class LiveSession:
    def __init__(
        self,
        config: Config,
        request: OpenSession,
        agent: AgentStarted | None,
        links: SessionLinks,
        counters: Counters,
        *,
        picture: PictureReport | None = None,
    ) -> None:
        now_s = time.monotonic()
        model = config.model
        self.session_id = request.session_id
        self._config = config
        self._agent = agent
        self._picture = picture
        self._links = links
        self._counters = counters
        self._clock = MediaClock(now_s, time.time(), model.fps)
        self._chunker = Chunker(model, request.session_id, request.seed)
        self._playout = Playout(
            fps=model.fps,
            voice_samples_per_chunk=model.voice_samples_per_chunk,
            target_chunks=config.delivery.playout_chunks,
        )
        self._events = EventsChannel()
        self._conversation = Conversation(
            self.session_id,
            self._chunker,
            self._playout,
            self._events,
            counters,
            links.to_agent,
            now_s,
            hesitates=config.agent.barge_in_speech_s < WAIT_S,
        )
        self._ladder = _degrade_ladder(config)
        self._reporter = Reporter(
            counters, self._events, self._playout, self._ladder, model.fps, now_s
        )
        self._lifecycle = Lifecycle(_limits(config, request), now_s)
        self._trace = open_trace(
            config.server.trace_dir,
            request.session_id,
            request.trace_id,
            chunk_s=model.chunk_period_s,
        )
        self._peer: Peer | None = None
        self._probe: Any = None
        self._offers = asyncio.Lock()
        self._closed = False
        self._over = False
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._chunk_s = now_s
        self._tasks = [
            asyncio.create_task(self._feed(), name="feed"),
            asyncio.create_task(self._watch(), name="watch"),
        ]
        self._peer_closing: set[asyncio.Task[None]] = set()

    @property
    def epoch(self) -> int:
        """How often the character has been interrupted."""
        return self._chunker.epoch

    # ------------------------------------------------------------ the client's connection

    async def offer(self, sdp: str, takeover: bool) -> str:
        """Answers an offer; raises OfferRefused, OfferConflict or NoPortFree.

        What is refused before it is tried leaves a live peer alone.
        """
        async with self._offers:
            if self._closed:
                raise OfferConflict("the session is ending")
            if self._peer is not None and self._lifecycle.state == "live" and not takeover:
                raise OfferConflict(
                    "the session has a live client; ask with takeover to replace it"
                )
            try:
                checked = check_offer(sdp)
            except OfferRefused:
                self._counters.count("offers_refused_total")
                raise
            await self._drop_peer("replaced by a new offer")
            self._events.detach()
            model = self._config.model
            delivery = Delivery(self._clock, self._playout, model.width, model.height, self._pulled)
            peer = Peer(self._config.delivery, delivery, self._callbacks())
            self._peer = peer
            try:
                return await peer.answer(checked)
            except OfferRefused:
                self._counters.count("offers_refused_total")
                self._peer = None
                raise
            except NoPortFree:
                self._peer = None
                raise

    def _callbacks(self) -> PeerCallbacks:
        return PeerCallbacks(
            on_connected=self._connected,
            on_lost=self._peer_lost,
            on_microphone=self._conversation.microphone,
            on_channel=self._channel_opened,
            on_message=self._client_message,
        )

    def _connected(self) -> None:
        self._apply(self._lifecycle.connected(time.monotonic()))

    def _peer_lost(self, reason: str) -> None:
        task = asyncio.create_task(self._drop_peer(reason))
        self._peer_closing.add(task)
        task.add_done_callback(self._peer_closing.discard)

    async def _drop_peer(self, reason: str) -> None:
        peer, self._peer = self._peer, None
        if peer is None:
            return
        now_s = time.monotonic()
        self._events.detach()
        if self._playout.utterance_id:
            self._conversation.interrupt(now_s)
        if not self._closed:
            self._apply(self._lifecycle.lost(now_s, reason))
        self._counters.count("client_messages_refused_total", peer.messages_refused)
        self._reporter.count_peer(peer)
        await peer.close()
        # A paused playout fills up to its target; while it played, less may have been enough.
        self._wanted.set()

    def _channel_opened(self, label: Literal["events", "probe"], channel: Any) -> None:
        if label == "events":
            self._events.attach(channel.send, lambda: int(channel.bufferedAmount))
            channel.on("close", self._events.detach)
        else:
            self._probe = channel
            # A client that opens this channel will beat; one may die before it first does.
            self._apply(self._lifecycle.beat(time.monotonic()))

    def _client_message(self, label: Literal["events", "probe"], raw: object) -> None:
        now_s = time.monotonic()
        try:
            if label == "probe":
                probe = parse_probe(raw)
                self._apply(self._lifecycle.beat(now_s))
                match probe:
                    case ProbeHeard(ago_ms):
                        self._conversation.heard(now_s - ago_ms / 1000, now_s)
                    case ProbePing() as ping if self._probe.readyState == "open":
                        media_ms = self._clock.media_ms(now_s)
                        self._probe.send(pong(ping, now_s * 1000, media_ms))
                return
            message = parse_client_message(raw)
        except BadMessage as error:
            self._counters.count("client_messages_refused_total")
            self._events.emit("error", {"message": str(error), "fatal": False})
            return
        match message:
            case ClientReady(message_id):
                self._events.emit("bot-ready", self._about(), message_id)
            case ClientInterrupt():
                self._conversation.interrupt(now_s)
                self._lifecycle.activity(now_s)
            case ClientText(_, content):
                self._conversation.typed(content, now_s)
            case ClientToolResult(_, call_id, result):
                self._links.to_agent(ToolResult(self.session_id, call_id, result))

    def _about(self) -> dict[str, Any]:
        agent = self._agent
        return {
            "version": RTVI_VERSION,
            "about": {"library": "characters-serve", "model": self._config.model.name},
            "listener": agent.listener if agent else "nobody",
            "voice": agent.voice if agent else "none",
            "chat": agent.chat if agent else "none",
            "picture": None if self._picture is None else asdict(self._picture),
        }

    # ------------------------------------------------------------ the agent and the API

    def agent(self, message: Message) -> None:
        if not self._closed:
            self._conversation.agent(message, time.monotonic())
            self._wanted.set()

    @property
    def queued_ms(self) -> float:
        """Speech that waits for the engine."""
        return self._chunker.queued_ms

    def interrupt(self) -> None:
        self._conversation.interrupt(time.monotonic())

    def say(self, text: str) -> None:
        self._conversation.say(text, time.monotonic())

    def end_within(self, reason: str, left_s: float) -> None:
        self._apply(self._lifecycle.end_within(time.monotonic(), reason, left_s))

    # ------------------------------------------------------------ the engine

    def chunk(self, chunk: VideoChunk) -> None:
        now_s = time.monotonic()
        if chunk.session_id != self.session_id or self._closed:
            return
        try:
            taken = self._playout.push(chunk, now_s)
        except ValueError as error:
            self._fault(f"the engine sent an impossible chunk: {error}")
            return
        if not taken:
            log.warning("chunk %d is not the one expected", chunk.chunk_index)
            return
        self._chunk_s = now_s
        self._trace.arrived(chunk, now_s)
        if chunk.utterance_id and chunk.epoch == self._chunker.epoch:
            self._conversation.stamp("generated", now_s - chunk.decode_ms / 1000)
            self._conversation.stamp("frames", now_s)
        self._counters.count("chunks_total")
        self._counters.observe("step_ms", chunk.step_ms)
        self._counters.observe("decode_ms", chunk.decode_ms)
        self._ladder.chunk(now_s, chunk.passes, chunk.step_ms, chunk.decode_ms)
        if self._peer is not None:
            self._peer.delivery.try_start()
        self._wanted.set()

    async def _feed(self) -> None:
        """Hands a step to the engine for each credit of the playout."""
        full = self._config.passes
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._credits() > 0:
                ladder, speaks = self._ladder, self._chunker.speech_waits
                whole = speaks and not self._playout.hurried
                step = self._chunker.next(
                    passes=ladder.passes if whole else ladder.idle_passes,
                    listening_energy=self._conversation.listening_energy,
                )
                if ladder.passes < full:
                    self._counters.count("degraded_chunks_total")
                if speaks and not whole:
                    self._counters.count("hurried_chunks_total")
                if not self._playout.in_flight:
                    self._chunk_s = time.monotonic()
                self._playout.step_sent(
                    time.monotonic(), speaking=step.utterance_id != 0 and not step.last
                )
                self._trace.sent(step.chunk_index, time.monotonic())
                await self._links.send_step(step)
                if step.utterance_id:
                    self._conversation.stamp("step", time.monotonic())

    def _pulled(self) -> None:
        """A picture or a packet has just been handed out."""
        now_s = time.monotonic()
        self._conversation.follow(now_s)
        self._trace.playing(self._playout.chunk_index, now_s)
        if self._reporter.new_underruns() and self._playout.in_speech:
            self._ladder.underrun(now_s)
        if self._credits() > 0:
            self._wanted.set()

    def _credits(self) -> int:
        return self._playout.credits(speech_waits=self._chunker.speech_waits)

    # ------------------------------------------------------------ time

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._lifecycle.activity(self._conversation.last_speech_s)
            self._apply(self._lifecycle.tick(now_s))
            waited_s = now_s - self._chunk_s if self._playout.in_flight else 0.0
            self._reporter.chunk_awaited(waited_s)
            if waited_s > self._config.engine.stall_timeout_s:
                self._fault(f"the engine sent no chunk for {waited_s:.1f} s")
            self._reporter.tick(now_s, self._peer)

    def _apply(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            match verdict:
                case Changed(state, reason):
                    self._trace.event(state, time.monotonic())
                    self._links.on_state(state, reason)
                case EndingSoon(reason, in_ms):
                    self.announce_end(reason, in_ms)
                case Over(reason):
                    if not self._over:
                        self._over = True
                        self._links.on_over(reason)

    def _fault(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._links.on_fault(reason)

    # ------------------------------------------------------------ the end

    def announce_end(self, reason: str, in_ms: float) -> None:
        data = {"kind": "session-ending", "reason": reason, "in_ms": round(in_ms)}
        self._events.emit("server-message", data)

    async def close(self) -> None:
        """Everything that this session opened is closed when this returns."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._offers:
            await self._drop_peer("the session ends")
        self._reporter.finish()
        self._trace.close()
        await asyncio.gather(*self._peer_closing, return_exceptions=True)


def _degrade_ladder(config: Config) -> DegradeLadder:
    return DegradeLadder(
        passes=config.passes,
        degraded_passes=config.engine.degraded_passes,
        idle_passes=config.engine.idle_passes,
        period_s=config.model.chunk_period_s,
        overlapped=config.optimizations.dedicated_decoder,
    )


def _limits(config: Config, request: OpenSession) -> Limits:
    session = config.session
    return Limits(
        max_duration_s=request.max_duration_s,
        idle_timeout_s=request.idle_timeout_s,
        connect_timeout_s=session.connect_timeout_s,
        reconnect_grace_s=session.reconnect_grace_s,
        ending_notice_s=session.ending_notice_s,
    )
