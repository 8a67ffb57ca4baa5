"""In: users' requests and the fleet's events. Out: each session, and its state for a while.

Whatever ends a session, its lease is released exactly once and its state is final from then on.
Knows no HTTP and no process.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from characters_serve.config import SessionConfig
from characters_serve.fleet.base import Fleet, LeaseLost
from characters_serve.fleet.group import FromHost, Group, GroupGone, RequestRefused
from characters_serve.fleet.pool import Lease
from characters_serve.fleet.queue import WaitingQueue
from characters_serve.logs import of_session, shown
from characters_serve.messages import Persona, PictureReport, SessionState
from characters_serve.metrics import Metrics, end_reason

log = logging.getLogger(__name__)

State = Literal["queued", "starting", "ready", "live", "reconnecting", "ending", "ended", "failed"]
STATES: tuple[State, ...] = get_args(State)
OVER: tuple[State, ...] = ("ended", "failed")

REMEMBER_S = 300.0
MAX_REMEMBERED = 1000
# The host ends its sessions in time; this much later the gateway does it for one that did not.
HOST_SLACK_S = 10.0
# A visitor who ends one session and starts the next should not be told "busy" in between.
RESET_WAIT_S = 5.0
SWEEP_INTERVAL_S = 1.0
DRAIN_POLL_S = 0.1


class NoGroupFree(RuntimeError):
    """Every group is taken, or none has started yet; and the queue, if there is one, is full."""


class SessionOver(RuntimeError):
    """The session has ended; its reason is in the message."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    image_rgb: bytes
    persona: Persona
    character: str | None
    seed: int
    max_duration_s: float
    owner: str | None = None
    trace_id: str = ""


@dataclass(slots=True)
class Session:
    """owner: the name of the server key that made it; connected: it has been live once;
    picture: of an uploaded one, once it was tried; trace_id: of the request that made it."""

    session_id: str
    character: str | None
    name: str
    max_duration_s: float
    changed_s: float
    state: State = "queued"
    owner: str | None = None
    trace_id: str = ""
    connected: bool = False
    reason: str = ""
    picture: PictureReport | None = None
    lease: Lease | None = None
    leased_s: float = 0.0
    waiting: SessionRequest | None = None  # while it is queued
    ufrags: frozenset[str] = frozenset()
    offers: asyncio.Lock = field(default_factory=asyncio.Lock)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        return self.state in OVER


def overdue(session: Session, config: SessionConfig, now_s: float) -> str | None:
    """Why a session that is not over should have been by now."""
    in_state_s = now_s - session.changed_s
    if session.state == "queued":
        return None  # the queue has bounds of its own
    if now_s - session.leased_s > session.max_duration_s + config.connect_timeout_s + HOST_SLACK_S:
        return "maximum duration"
    if session.state == "ready" and in_state_s > config.connect_timeout_s + HOST_SLACK_S:
        return "no client connected in time"
    if session.state == "reconnecting" and in_state_s > config.reconnect_grace_s + HOST_SLACK_S:
        return "the client did not come back"
    if session.state == "ending" and in_state_s > config.ending_notice_s + HOST_SLACK_S:
        return session.reason or "ended"
    return None


def _about(session: Session) -> dict[str, Any]:
    about = of_session(session.session_id, session.trace_id)
    if session.lease is None:
        return about
    return {**about, "group": session.lease.group_id, "lease_epoch": session.lease.epoch}


class Sessions:
    def __init__(
        self,
        config: SessionConfig,
        fleet: Fleet,
        metrics: Metrics,
        queue: WaitingQueue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._queue = queue
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._spawn(self._sweep())

    async def stop(self, reason: str) -> None:
        """Ends every session; returns when their groups are clean or given up."""
        for session in self._sessions.values():
            self._finish(session, "ended", reason)
        await asyncio.gather(*self._releases)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def drain(self, reason: str, within_s: float) -> None:
        """Tells every session that it ends; returns when none is left or the time is up."""
        deadline_s = self._clock() + within_s
        for session in self._open_sessions():
            if session.lease is None:
                self._finish(session, "ended", reason)
                continue
            self._spawn(self._end_soon(session, reason, deadline_s))
        while self._open_sessions() and self._clock() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)

    # ------------------------------------------------------------ asked by users

    async def create(self, request: SessionRequest) -> Session:
        """A session that starts, or one that waits where a queue has room; else NoGroupFree."""
        session_id = secrets.token_hex(16)
        lease = None
        if not len(self._queue):  # who waits already goes first
            lease = await self._fleet.reserve(session_id, 0 if self._queue.size else RESET_WAIT_S)
        now_s = self._clock()
        if lease is None and not self._queue.join(session_id, now_s):
            raise NoGroupFree
        session = Session(
            session_id,
            request.character,
            request.persona.name,
            request.max_duration_s,
            now_s,
            owner=request.owner,
            trace_id=request.trace_id,
        )
        self._sessions[session_id] = session
        self._metrics.sessions_created.inc()
        if lease is None:
            session.waiting = request
            self.admit()  # a group may have become free in between
        else:
            self._begin(session, lease, request)
        return session

    def admit(self) -> None:
        """Gives the groups that are free to those who have waited longest."""
        while (session_id := self._queue.first()) is not None:
            session = self._sessions[session_id]
            lease = self._fleet.pool.reserve(session_id, self._clock())
            if lease is None:
                return
            self._queue.leave(session_id)
            request, session.waiting = session.waiting, None
            assert request is not None
            self._begin(session, lease, request)

    def place_in_queue(self, session: Session) -> int | None:
        """1 is the next; asking keeps the place."""
        self._queue.heard(session.session_id, self._clock())
        return self._queue.position(session.session_id)

    @property
    def queue_has_room(self) -> bool:
        return self._queue.has_room

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    async def offer(self, session: Session, sdp: str, takeover: bool, wait_s: float) -> str:
        """The answer to an SDP offer; one at a time, once the character is ready."""
        async with session.offers:
            await self._prepared(session, wait_s)
            group = self._fleet.group(self._lease(session))
            return await group.offer(session.session_id, sdp, takeover)

    async def external(
        self,
        session: Session,
        takeover: bool,
        wait_s: float,
        receive: Callable[[FromHost], None],
    ) -> tuple[Group, int]:
        """Opens a voice agent's socket on the session's host."""
        await self._prepared(session, wait_s)
        group = self._fleet.group(self._lease(session))
        return group, await group.open_external(session.session_id, takeover, receive)

    async def interrupt(self, session: Session) -> None:
        await self._fleet.group(self._lease(session)).interrupt(session.session_id)

    async def say(self, session: Session, text: str) -> None:
        await self._fleet.group(self._lease(session)).say(session.session_id, text)

    def end(self, session: Session, reason: str) -> None:
        self._finish(session, "ended", reason)

    def open_of(self, owner: str) -> int:
        return sum(session.owner == owner for session in self._open_sessions())

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = dict.fromkeys(STATES, 0)
        for session in self._sessions.values():
            counts[session.state] += 1
        return counts

    # ------------------------------------------------------------ told by the fleet

    def on_state(self, lease: Lease, said: SessionState) -> None:
        session = self._held(lease)
        if session is None:
            return
        if said.state in ("ended", "failed"):
            self._finish(session, said.state, said.reason)
        else:
            session.picture = said.picture or session.picture
            self._move(session, said.state, said.reason)

    def on_lost(self, lease: Lease, reason: str) -> None:
        session = self._held(lease)
        if session is not None:
            self._finish(session, "failed", reason)

    # ------------------------------------------------------------ within

    def _open_sessions(self) -> list[Session]:
        return [session for session in self._sessions.values() if not session.over]

    async def _end_soon(self, session: Session, reason: str, deadline_s: float) -> None:
        await session.opened.wait()
        left_s = max(0.0, deadline_s - self._clock())
        try:
            if not session.over:
                group = self._fleet.group(self._lease(session))
                await group.end_soon(session.session_id, reason, left_s)
        except (RequestRefused, GroupGone, LeaseLost) as error:
            log.info(
                "session %s was not told that it ends: %s",
                shown(session.session_id),
                error,
                extra=_about(session),
            )

    def _held(self, lease: Lease) -> Session | None:
        session = self._sessions.get(lease.session_id)
        return session if session is not None and session.lease == lease else None

    def _begin(self, session: Session, lease: Lease, request: SessionRequest) -> None:
        session.lease = lease
        session.leased_s = self._clock()
        self._move(session, "starting", "")
        self._spawn(self._open(session, lease, request))

    async def _open(self, session: Session, lease: Lease, request: SessionRequest) -> None:
        try:
            await self._fleet.group(lease).open_session(
                session.session_id,
                request.image_rgb,
                request.persona,
                request.seed,
                request.max_duration_s,
                uploaded=request.character is None,
                trace_id=request.trace_id,
            )
        except (RequestRefused, LeaseLost) as error:
            self._finish(session, "failed", str(error))
        except GroupGone as error:
            self._finish(session, "failed", str(error))
            await self._fleet.discard(lease, str(error))
        else:
            if not self._fleet.pool.attach(lease):
                self._finish(session, "failed", "the reservation expired")
            elif session.state == "starting":
                self._move(session, "ready", "")
        finally:
            session.opened.set()

    def _move(self, session: Session, state: State, reason: str) -> None:
        if session.over:
            return
        if state != session.state:
            log.info(
                "session %s: %s -> %s",
                shown(session.session_id),
                session.state,
                state,
                extra=_about(session),
            )
            session.changed_s = self._clock()
        session.state = state
        session.connected = session.connected or state == "live"
        session.reason = reason
        session.moved.set()

    def _finish(self, session: Session, state: Literal["ended", "failed"], reason: str) -> None:
        if session.over:
            return
        self._move(session, state, reason)
        self._metrics.sessions_ended.labels(state, end_reason(reason)).inc()
        session.waiting = None
        self._queue.leave(session.session_id)
        if session.lease is None:
            return
        # A host cannot close what it has not opened yet, so the opening goes first.
        release = self._fleet.release(session.lease, reason, after=session.opened)
        if release is not None:
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def _prepared(self, session: Session, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while self._lease(session) and session.state == "starting":
                    session.moved.clear()
                    await session.moved.wait()
        except TimeoutError:
            raise RequestRefused(409, "the character is still being prepared") from None
        self._lease(session)

    def check_open(self, session: Session) -> None:
        """Raises SessionOver once it has ended."""
        if session.over:
            raise SessionOver(session.reason)

    def _lease(self, session: Session) -> Lease:
        """What the session's host is reached by; raises when there is none, or none any more."""
        self.check_open(session)
        if session.lease is None:
            raise RequestRefused(409, "the session is still waiting in the queue")
        return session.lease

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now_s = self._clock()
            for session_id, why in self._queue.overdue(now_s):
                self._finish(self._sessions[session_id], "ended", why)
            for session in list(self._sessions.values()):
                if not session.over:
                    reason = overdue(session, self._config, now_s)
                    if reason is not None:
                        self._finish(session, "ended", reason)
                elif now_s - session.changed_s > REMEMBER_S:
                    del self._sessions[session.session_id]
            over = [s for s in self._sessions.values() if s.over]
            for session in over[: max(0, len(over) - MAX_REMEMBERED)]:
                del self._sessions[session.session_id]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
