"""In: the gateway's requests. Out: answers, session states, metrics.

The session host process, one for each group: it starts the group's engine and agent, and holds one
session at a time; the next finds nothing of the last. A child that dies, or an engine that stalls,
ends the session and this process: the gateway builds a new group. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

from characters_serve import logs
from characters_serve.config import Config
from characters_serve.messages import (
    AgentAudio,
    AgentError,
    AgentStart,
    AgentStarted,
    Answer,
    CloseSession,
    Done,
    EndSoon,
    ExternalClose,
    ExternalInput,
    ExternalOpen,
    HostedState,
    Interrupt,
    Message,
    Offer,
    OpenSession,
    PictureReport,
    Refused,
    Say,
    SessionState,
    StartCharacter,
    Transcript,
    TurnTiming,
    UserSpeech,
    VideoChunk,
)
from characters_serve.processes import (
    AsyncControlLink,
    ChildFailed,
    arguments,
    is_permanent,
    read_config,
)
from characters_serve.session.children import Children
from characters_serve.session.counters import SESSION_GAUGES, Counters
from characters_serve.session.external_link import ExternalLink
from characters_serve.session.ice import NoPortFree
from characters_serve.session.live import LiveSession, OfferConflict, SessionLinks
from characters_serve.session.offer import OfferRefused
from characters_serve.session.rehearsal import SESSION_ID as REHEARSAL_ID
from characters_serve.session.rehearsal import least_expression, rehearse
from characters_serve.session.self_test import SESSION_ID as SELF_TEST_ID
from characters_serve.session.self_test import TrialFailed, run_self_test

log = logging.getLogger(__name__)

METRICS_PERIOD_S = 1.0
# For the last event to reach the client before its channel closes.
GOODBYE_S = 0.05
# Sockets do not linger: the last message needs a moment before the process is gone.
LAST_WORD_S = 0.1
M_MMAP_THRESHOLD = -3
LARGE_BUFFER_BYTES = 64 * 1024

_libc = ctypes.CDLL(None)

Request = OpenSession | CloseSession | Offer | Interrupt | Say | EndSoon | ExternalOpen


class Host:
    def __init__(self, config: Config, group_dir: Path) -> None:
        self._config = config
        self._link = AsyncControlLink(group_dir, "host")
        self._counters = Counters()
        self._children = Children(
            config,
            group_dir,
            on_agent=self._from_agent,
            on_chunk=self._from_engine,
            on_counts=self._counters.engine,
            on_fault=self._fault,
        )
        self._session: LiveSession | None = None
        self._external: ExternalLink | None = None
        self._session_id: str | None = None
        self._trace_id = ""
        self._trial_chunks: asyncio.Queue[VideoChunk] = asyncio.Queue()
        diffusion = config.engine.kind == "diffusion"
        self._least_expression = least_expression(config.model) if diffusion else None
        # What the agent says between its start and the session's.
        self._early: list[Message] = []
        self._changing = asyncio.Lock()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._faulty: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Until Shutdown (0) or a fault of the group (1)."""
        try:
            details = await self._children.start()
        except (ChildFailed, OSError) as error:
            await self._link.failed(str(error), permanent=is_permanent(error))
            await asyncio.sleep(LAST_WORD_S)
            return 1
        await self._link.warming()
        try:
            details |= await self._warm_up()
        except (TrialFailed, TimeoutError) as error:
            await self._link.failed(str(error))
            await self._children.kill()
            await asyncio.sleep(LAST_WORD_S)
            return 1
        await self._link.ready(details)
        background = [
            asyncio.create_task(self._send_outbox(), name="outbox"),
            asyncio.create_task(self._send_metrics(), name="metrics"),
        ]
        receive = asyncio.create_task(self._receive(), name="receive")
        ends: list[asyncio.Future[None] | asyncio.Future[str]] = [receive, self._faulty]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._faulty.done():
            await self._end_faulty(self._faulty.result())
            code = 1
        else:
            receive.result()
            await self._close_session("the server is shutting down", "ended")
            await self._children.stop("the group stops")
            code = 0
        for task in (receive, *background, *self._tasks):
            task.cancel()
        await asyncio.gather(receive, *background, *self._tasks, return_exceptions=True)
        return code

    def about(self) -> dict[str, Any]:
        """What a line of this process's log is about."""
        if self._session_id is None:
            return {}
        epoch = self._session.epoch if self._session is not None else 0
        return {**logs.of_session(self._session_id, self._trace_id), "epoch": epoch}

    async def _warm_up(self) -> dict[str, str]:
        """The self-test's findings for Ready's details; a child that dies in it ends it."""
        test = asyncio.create_task(
            run_self_test(self._children, self._config, self._trial_chunks.get, time.monotonic)
        )
        await asyncio.wait((test, self._faulty), return_when=asyncio.FIRST_COMPLETED)
        if not test.done():
            test.cancel()
            await asyncio.gather(test, return_exceptions=True)
            raise TrialFailed(f"self-test: {self._faulty.result()}")
        result = test.result()
        self._counters.gauge("self_test_period_ms", round(result.period_ms, 1))
        self._counters.gauge("group_degraded", float(not result.fast_enough))
        details = {"self_test_period_ms": f"{result.period_ms:.1f}"}
        return details if result.fast_enough else {**details, "degraded": result.degraded}

    # ------------------------------------------------------------ requests

    async def _receive(self) -> None:
        while True:
            message = await self._link.channel.recv()
            if await self._link.answer(message):
                return
            match message:
                # Opening waits for models and closing for peers; neither may delay a ping.
                case (
                    OpenSession()
                    | CloseSession()
                    | Offer()
                    | Interrupt()
                    | Say()
                    | EndSoon()
                    | ExternalOpen()
                ):
                    task = asyncio.create_task(self._serve(message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case ExternalInput() | ExternalClose():
                    self._from_socket(message)

    async def _serve(self, request: Request) -> None:
        try:
            answer = await self._handle(request)
        except Exception as error:
            log.exception("%s failed", type(request).__name__)
            answer = Refused(request.request_id, 500, "the session host failed")
            self._fault(f"{type(request).__name__}: {error}")
        self._outbox.put_nowait(answer)

    async def _handle(self, request: Request) -> Done | Refused | Answer:
        number = request.request_id
        if isinstance(request, OpenSession):
            return await self._open(request)
        session = self._session
        if session is None or session.session_id != request.session_id:
            if isinstance(request, CloseSession):
                async with self._changing:  # it may be closing at this moment
                    return Done(number)
            if self._session_id == request.session_id:
                return Refused(number, 409, "the session is starting or ending")
            return Refused(number, 404, "no such session")
        match request:
            case Offer():
                try:
                    sdp = await session.offer(request.sdp, request.takeover)
                except OfferRefused as error:
                    return Refused(number, 400, str(error))
                except OfferConflict as error:
                    return Refused(number, 409, str(error))
                except NoPortFree as error:
                    log.error("%s (delivery.udp_ports)", error)
                    return Refused(number, 503, str(error))
                return Answer(number, request.session_id, sdp)
            case Interrupt():
                session.interrupt()
            case Say():
                if self._external is not None and not self._external.agent.connected:
                    return Refused(number, 409, "no voice agent is connected")
                session.say(request.text)
            case EndSoon():
                session.end_within(request.reason, request.left_s)
            case ExternalOpen():
                if self._external is None:
                    return Refused(number, 409, "agent.kind is not external")
                return await self._external.open(request)
            case CloseSession():
                await self._close_session(request.reason, "ended")
        return Done(number)

    # ------------------------------------------------------------ one session

    async def _open(self, request: OpenSession) -> Done | Refused:
        number, config = request.request_id, self._config
        expected = 3 * config.model.width * config.model.height
        if len(request.image_rgb) != expected:
            return Refused(number, 400, f"image_rgb must have {expected} bytes")
        async with self._changing:
            if self._session_id is not None:
                return Refused(number, 409, "the group has a session")
            self._session_id, self._trace_id = request.session_id, request.trace_id
            self._early = []
            self._state("starting", "")
            try:
                picture = await self._try_picture(request)
                start = StartCharacter(
                    request.session_id, request.image_rgb, request.seed, request.trace_id
                )
                await self._children.start_character(start)
                agent = await self._start_agent(request)
            except (TimeoutError, TrialFailed) as error:
                self._fault(str(error))
                return Refused(number, 503, str(error))
            links = SessionLinks(
                send_step=self._children.send_step,
                to_agent=self._external.tell if self._external else self._children.to_agent,
                on_state=self._state,
                on_over=self._over,
                on_fault=self._fault,
            )
            self._session = LiveSession(
                config, request, agent, links, self._counters, picture=picture
            )
            for early in self._early:
                self._session.agent(early)
            self._state("ready", "", picture)
        return Done(number)

    async def _try_picture(self, request: OpenSession) -> PictureReport | None:
        """Of an uploaded picture, where the weights come with what is usual for them."""
        if not request.uploaded or self._least_expression is None:
            return None
        return await rehearse(
            self._children,
            self._config,
            request.image_rgb,
            self._least_expression,
            self._trial_chunks.get,
        )

    async def _start_agent(self, request: OpenSession) -> AgentStarted | None:
        if self._config.agent.kind != "external":
            greet = self._config.agent.greet
            start = AgentStart(request.session_id, request.persona, greet, request.trace_id)
            return await self._children.start_agent(start)
        self._external = ExternalLink(
            request.session_id,
            emit=lambda event: self._session.agent(event) if self._session else None,
            queued_ms=lambda: self._session.queued_ms if self._session else 0.0,
            post=self._outbox.put_nowait,
        )
        return await self._external.agent.open()

    def _from_socket(self, message: ExternalInput | ExternalClose) -> None:
        if self._external is None or self._session_id != message.session_id:
            return
        try:
            if isinstance(message, ExternalInput):
                self._external.input(message)
            else:
                self._external.lost(message)
        except Exception as error:
            log.exception("%s failed", type(message).__name__)
            self._fault(f"{type(message).__name__}: {error}")

    def _over(self, reason: str) -> None:
        task = asyncio.create_task(self._close_session(reason, "ended"))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_session(self, reason: str, final: HostedState) -> None:
        async with self._changing:
            session, session_id = self._session, self._session_id
            if session is None or session_id is None:
                return
            self._state("ending", reason)
            session.announce_end(reason, 0)
            await asyncio.sleep(GOODBYE_S)
            self._session = None
            await session.close()
            del session
            if self._external is not None:
                await self._external.close(reason)
                self._external = None
            if final == "ended":
                self._children.end_agent(session_id)
                try:
                    await self._children.end_character(session_id)
                except TimeoutError as error:
                    self._fault(str(error))
            give_back_memory()
            self._state(final, reason)
            self._session_id, self._trace_id = None, ""
            for name in SESSION_GAUGES:
                self._counters.gauge(name, None)

    def _state(self, state: HostedState, reason: str, picture: PictureReport | None = None) -> None:
        if self._session_id is not None:
            self._outbox.put_nowait(SessionState(self._session_id, state, reason, picture))

    # ------------------------------------------------------------ the children

    def _from_engine(self, chunk: VideoChunk) -> None:
        if chunk.session_id in (SELF_TEST_ID, REHEARSAL_ID):
            self._trial_chunks.put_nowait(chunk)
        elif self._session is not None:
            self._session.chunk(chunk)

    def _from_agent(self, message: Message) -> None:
        match message:
            case AgentAudio() | UserSpeech() | Transcript() | TurnTiming() | AgentError():
                if message.session_id != self._session_id:
                    return
                if self._session is None:
                    self._early.append(message)
                else:
                    self._session.agent(message)
            case _:
                log.warning("the agent sent an unexpected %s", type(message).__name__)

    def _fault(self, reason: str) -> None:
        if not self._faulty.done():
            log.error("the group is at fault: %s", reason)
            self._faulty.set_result(reason)

    async def _end_faulty(self, reason: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.fleet.stop_timeout_s):
                await self._close_session(reason, "failed")
        self._outbox.put_nowait(self._counters.take())
        await self._outbox.join()
        await self._link.failed(reason)
        await self._children.kill()
        await asyncio.sleep(LAST_WORD_S)

    # ------------------------------------------------------------ to the gateway

    async def _send_outbox(self) -> None:
        while True:
            await self._link.channel.send(await self._outbox.get())
            self._outbox.task_done()

    async def _send_metrics(self) -> None:
        while True:
            await asyncio.sleep(METRICS_PERIOD_S)
            self._counters.gauge("host_tasks", len(asyncio.all_tasks()))
            self._outbox.put_nowait(self._counters.take())


def give_back_large_buffers() -> None:
    """Lets no buffer of 64 KiB and more into malloc's heap, where pictures leave holes for good.

    glibc keeps away only what is larger than the largest it has seen freed. Over 50 connections the
    heap in use stayed at 14 MB and the unused grew from 20 to 29; so it stays at 3.
    """
    if hasattr(_libc, "mallopt"):  # glibc only
        _libc.mallopt(M_MMAP_THRESHOLD, LARGE_BUFFER_BYTES)


def give_back_memory() -> None:
    """Between sessions: aiortc's objects end in reference cycles, packets leave smaller holes."""
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


async def _main(config: Config, group_dir: Path) -> int:
    loop = asyncio.get_running_loop()
    # The parent decides when a group ends; what a terminal or a service manager sends to every
    # process reaches it too. uvloop, which the parent runs on, resets what is ignored at exec.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)
    host = Host(config, group_dir)
    logs.about(host.about)
    return await host.run()


def main() -> int:
    group_dir = arguments("The session host of one group.").parse_args().group_dir
    give_back_large_buffers()
    # It names addresses of clients.
    logging.getLogger("aioice").setLevel(logging.WARNING)
    config = read_config(group_dir)
    logs.configure(config.server.log_format, process=f"{group_dir.name}/host")
    return asyncio.run(_main(config, group_dir))


if __name__ == "__main__":
    sys.exit(main())
