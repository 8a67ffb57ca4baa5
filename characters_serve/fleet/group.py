"""In: requests of the gateway. Out: the answers and events of one session host.

A group is one session host process, which starts its ranks, decoder and agent; where and how that
process runs is its launcher's business. Knows nothing of leases, HTTP or other groups.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from characters_serve.config import Config
from characters_serve.messages import (
    Answer,
    CloseSession,
    Done,
    EndSoon,
    ExternalClose,
    ExternalInput,
    ExternalOpen,
    ExternalOutput,
    ExternalRoom,
    Failed,
    HostMetrics,
    Interrupt,
    Message,
    Offer,
    OpenSession,
    Persona,
    Ready,
    Refused,
    Say,
    SessionState,
    Warming,
)
from characters_serve.processes import ChildFailed

log = logging.getLogger(__name__)

HOST_MODULE = "characters_serve.session.host"
# Of the reservation's time: an opening that hangs is given up before its reservation expires.
OPEN_SHARE = 0.9
OFFER_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 5.0


FromHost = ExternalRoom | ExternalOutput | ExternalClose


class RequestRefused(RuntimeError):
    """The host said no; `status` is the HTTP status that fits."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class GroupGone(RuntimeError):
    """The host did not answer in time, or is no longer there."""


class HostProcess(Protocol):
    """A session host's process, here or on another machine, and all that it leaves behind."""

    async def start(self, timeout_s: float) -> Ready:
        """Raises ChildFailed, with nothing of it left, when it is not ready in time."""

    async def send(self, message: Message) -> None: ...

    async def stop(self, reason: str, timeout_s: float) -> None:
        """Lets it end in its own way, and kills it when it does not."""

    async def kill(self) -> None: ...

    @property
    def pid(self) -> int | None:
        """On the machine where it runs; None before it is known."""


# (what to do with its messages, what to do when it is gone) -> the process, not yet started
Launch = Callable[
    [Callable[[Message], Awaitable[None]], Callable[[str], Awaitable[None]]], HostProcess
]


class Group:
    def __init__(
        self,
        group_id: str,
        config: Config,
        launch: Launch,
        *,
        on_state: Callable[[SessionState], None],
        on_metrics: Callable[[HostMetrics], None],
        on_exit: Callable[[str], Awaitable[None]],
        on_warming: Callable[[], None] = lambda: None,
    ) -> None:
        self.group_id = group_id
        self._config = config
        self._on_state = on_state
        self._on_metrics = on_metrics
        self._on_exit = on_exit
        self._on_warming = on_warming
        self._request_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._sockets: dict[int, tuple[str, Callable[[FromHost], None]]] = {}
        self._gone: str | None = None
        self._host = launch(self._receive, self._exited)

    @property
    def pid(self) -> int | None:
        return self._host.pid

    async def start(self) -> dict[str, str]:
        """Returns the host's details once it is ready; on failure nothing of it is left."""
        try:
            ready = await self._host.start(self._config.engine.ready_timeout_s)
        except ChildFailed as error:
            self._give_up(str(error))
            raise
        except asyncio.CancelledError:
            await self.kill("stopped while starting")
            raise
        return ready.details

    async def stop(self, reason: str) -> None:
        await self._host.stop(reason, self._config.fleet.stop_timeout_s)
        self._give_up(reason)

    async def kill(self, reason: str) -> None:
        await self._host.kill()
        self._give_up(reason)

    async def discard(self, reason: str) -> None:
        """Reports the group as gone, as if its process had died; its owner then ends it."""
        log.error("discarding group %s: %s", self.group_id, reason)
        await self._exited(reason)

    async def open_session(
        self,
        session_id: str,
        image_rgb: bytes,
        persona: Persona,
        seed: int,
        max_duration_s: float,
        uploaded: bool = False,
        trace_id: str = "",
    ) -> None:
        request = OpenSession(
            next(self._request_ids),
            session_id,
            image_rgb,
            persona,
            seed,
            max_duration_s,
            self._config.session.idle_timeout_s,
            uploaded,
            trace_id,
        )
        await self._request(request, OPEN_SHARE * self._config.fleet.reserve_ttl_s)

    async def offer(self, session_id: str, sdp: str, takeover: bool) -> str:
        """Returns the answer's SDP."""
        request = Offer(next(self._request_ids), session_id, sdp, takeover)
        answer = await self._request(request, OFFER_TIMEOUT_S)
        if not isinstance(answer, Answer):
            raise GroupGone(f"{self.group_id}: an offer was answered by {type(answer).__name__}")
        return answer.sdp

    async def interrupt(self, session_id: str) -> None:
        await self._request(Interrupt(next(self._request_ids), session_id), COMMAND_TIMEOUT_S)

    async def say(self, session_id: str, text: str) -> None:
        await self._request(Say(next(self._request_ids), session_id, text), COMMAND_TIMEOUT_S)

    async def end_soon(self, session_id: str, reason: str, left_s: float) -> None:
        request = EndSoon(next(self._request_ids), session_id, reason, left_s)
        await self._request(request, COMMAND_TIMEOUT_S)

    async def close_session(self, session_id: str, reason: str) -> None:
        request = CloseSession(next(self._request_ids), session_id, reason)
        await self._request(request, CLOSE_TIMEOUT_S)

    async def open_external(
        self, session_id: str, takeover: bool, receive: Callable[[FromHost], None]
    ) -> int:
        """A voice agent's socket, by the number returned; `receive` may be called before that."""
        socket_id = next(self._request_ids)
        self._sockets[socket_id] = (session_id, receive)
        try:
            await self._request(ExternalOpen(socket_id, session_id, takeover), COMMAND_TIMEOUT_S)
        except BaseException:
            del self._sockets[socket_id]
            raise
        return socket_id

    async def send_external(self, frame: ExternalInput) -> None:
        await self._host.send(frame)

    async def close_external(self, session_id: str, socket_id: int) -> None:
        if self._sockets.pop(socket_id, None) is not None and self._gone is None:
            await self._host.send(ExternalClose(session_id, socket_id, 1000, ""))

    async def _request(
        self,
        request: OpenSession | Offer | Interrupt | Say | EndSoon | CloseSession | ExternalOpen,
        timeout_s: float,
    ) -> Message:
        if self._gone is not None:
            raise GroupGone(self._gone)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._host.send(request)
                answer = await future
        except TimeoutError:
            kind = type(request).__name__
            raise GroupGone(f"{self.group_id}: no answer to {kind} in {timeout_s:g} s") from None
        finally:
            self._waiting.pop(request.request_id, None)
        if isinstance(answer, Refused):
            raise RequestRefused(answer.status, answer.reason)
        return answer

    async def _receive(self, message: Message) -> None:
        if self._gone is not None:  # counts of a group that is forgotten would be counted twice
            return
        match message:
            case Done(request_id) | Refused(request_id) | Answer(request_id):
                future = self._waiting.get(request_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case SessionState():
                self._on_state(message)
            case HostMetrics():
                self._on_metrics(message)
            case Warming():
                self._on_warming()
            case ExternalRoom() | ExternalOutput() | ExternalClose():
                _, receive = self._sockets.get(message.socket_id, ("", None))
                if receive is not None:
                    receive(message)
            case Failed(_, reason):
                await self._exited(f"{self.group_id}: {reason}")
            case _:
                log.warning("%s sent an unexpected %s", self.group_id, type(message).__name__)

    async def _exited(self, reason: str) -> None:
        if self._gone is None:
            self._give_up(reason)
            await self._on_exit(reason)

    def _give_up(self, reason: str) -> None:
        self._gone = self._gone or reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(GroupGone(reason))
        for socket_id, (session_id, receive) in self._sockets.items():
            receive(ExternalClose(session_id, socket_id, 1011, reason))
