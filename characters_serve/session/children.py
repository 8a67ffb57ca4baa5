"""In: the group's configuration. Out: its engine and agent processes, started, watched, addressed.

A child that dies is never restarted: its group is at fault and ends. Knows nothing of sessions
beyond passing their messages on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from characters_serve.channels import Channel, endpoint
from characters_serve.config import Config
from characters_serve.messages import (
    AgentEnd,
    AgentStart,
    AgentStarted,
    CharacterEnded,
    CharacterReady,
    EndCharacter,
    Failed,
    GpuMemory,
    Message,
    StartCharacter,
    StepCounts,
    StepInput,
    UserAudio,
    VideoChunk,
    WireError,
)
from characters_serve.processes import ChildProcess

log = logging.getLogger(__name__)

CHARACTER_TIMEOUT_S: Final = 50.0
AGENT_TIMEOUT_S: Final = 20.0
END_TIMEOUT_S: Final = 8.0
# At nice 10 it got a twentieth of a core beside two busy loops, and finished no turn; at 5 the
# 60 ms of work at a turn's end took 320 beside a browser. Its long work is in nicer threads.
AGENT_NICE: Final = 2
# Ten seconds of microphone: an agent that hangs must not fill the memory.
MAX_AGENT_BACKLOG: Final = 500

Reply = TypeVar("Reply")


class Children:
    def __init__(
        self,
        config: Config,
        group_dir: Path,
        *,
        on_agent: Callable[[Message], None],
        on_chunk: Callable[[VideoChunk], None],
        on_counts: Callable[[StepCounts | GpuMemory], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self._config = config
        self._on_agent = on_agent
        self._on_chunk = on_chunk
        self._on_counts = on_counts
        self._on_fault = on_fault
        self._waiting: dict[tuple[type, str], asyncio.Future[Message]] = {}
        self._steps = Channel(endpoint(group_dir, "steps"), "push", bind=True)
        self._chunks = Channel(endpoint(group_dir, "chunks"), "pull", bind=True)
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        engine, package = config.engine, "characters_serve.engine"
        rank, decoder = _threads(engine.rank_threads), _threads(engine.decoder_threads)
        self._engine = (
            [self._child("pattern", f"{package}.pattern", group_dir, environment=_threads(1))]
            if engine.kind == "pattern"
            else [
                self._child(f"rank{n}", f"{package}.rank", group_dir, ("--rank", str(n)), rank)
                for n in range(engine.tensor_parallel)
            ]
        )
        if engine.kind == "diffusion" and config.optimizations.dedicated_decoder:
            self._engine.append(
                self._child("decoder", f"{package}.decoder", group_dir, (), decoder)
            )
        self._agent = (
            None
            if config.agent.kind in ("none", "external")
            else self._child(
                "agent", "characters_serve.agent.worker", group_dir, (), _threads(1), AGENT_NICE
            )
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _all(self) -> list[ChildProcess]:
        return [*self._engine, *([self._agent] if self._agent else [])]

    @property
    def pids(self) -> dict[str, str]:
        return {f"pid_{child.name}": str(child.pid) for child in self._all}

    async def start(self) -> dict[str, str]:
        """Starts all at once; raises ChildFailed, with every child gone, when one cannot."""
        timeout_s = self._config.engine.ready_timeout_s
        starts = [asyncio.create_task(child.start(timeout_s)) for child in self._all]
        try:
            ready = await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.kill()
            raise
        self._tasks = [
            asyncio.create_task(self._receive_chunks(), name="chunks"),
            asyncio.create_task(self._send_agent(), name="agent-outbox"),
        ]
        details = {f"{r.process}_{key}": value for r in ready for key, value in r.details.items()}
        return {**details, **self.pids}

    async def start_character(self, message: StartCharacter) -> None:
        await self._ask_engine(message, CharacterReady, CHARACTER_TIMEOUT_S)

    async def end_character(self, session_id: str) -> None:
        await self._ask_engine(EndCharacter(session_id), CharacterEnded, END_TIMEOUT_S)

    async def start_agent(self, message: AgentStart) -> AgentStarted | None:
        if self._agent is None:
            return None
        return await self._ask(self._agent, message, AgentStarted, AGENT_TIMEOUT_S)

    def end_agent(self, session_id: str) -> None:
        self.to_agent(AgentEnd(session_id))

    def to_agent(self, message: Message) -> None:
        if self._agent is None:
            return
        if isinstance(message, UserAudio) and self._outbox.qsize() >= MAX_AGENT_BACKLOG:
            return
        self._outbox.put_nowait(message)

    async def send_step(self, step: StepInput) -> None:
        await self._steps.send(step)

    async def stop(self, reason: str) -> None:
        timeout_s = self._config.fleet.stop_timeout_s / 2
        await asyncio.gather(*(child.stop(reason, timeout_s) for child in self._all))
        await self._close()

    async def kill(self) -> None:
        await asyncio.gather(*(child.kill() for child in self._all))
        await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._steps.close()
        self._chunks.close()

    def _child(
        self,
        name: str,
        module: str,
        group_dir: Path,
        arguments: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        nice: int = 0,
    ) -> ChildProcess:
        async def receive(message: Message) -> None:
            self._receive(name, message)

        async def left(reason: str) -> None:
            self._on_fault(reason)

        return ChildProcess(
            name,
            module,
            group_dir,
            arguments=arguments,
            environment=environment,
            nice=nice,
            on_message=receive,
            on_exit=left,
            ping_interval_s=self._config.fleet.ping_interval_s,
            ping_timeout_s=self._config.fleet.ping_timeout_s,
        )

    def _receive(self, name: str, message: Message) -> None:
        waiting = self._waiting.get((type(message), name))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
        elif isinstance(message, Failed):
            self._on_fault(f"{name}: {message.reason}")
        elif isinstance(message, StepCounts | GpuMemory):
            self._on_counts(message)
        elif self._agent is not None and name == self._agent.name:
            self._on_agent(message)
        else:
            log.warning("%s sent an unexpected %s", name, type(message).__name__)

    async def _ask_engine(
        self, message: Message, kind: type[CharacterReady | CharacterEnded], timeout_s: float
    ) -> None:
        await asyncio.gather(
            *(self._ask(child, message, kind, timeout_s) for child in self._engine)
        )

    async def _ask(
        self, child: ChildProcess, message: Message, kind: type[Reply], timeout_s: float
    ) -> Reply:
        key = (kind, child.name)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            await child.send(message)
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{child.name} did not answer in {timeout_s:g} s") from None
        finally:
            self._waiting.pop(key, None)
        assert isinstance(reply, kind)
        return reply

    async def _receive_chunks(self) -> None:
        while True:
            try:
                message = await self._chunks.recv()
            except WireError as error:
                self._on_fault(f"the decoder sent no message: {error}")
                return
            if isinstance(message, VideoChunk):
                self._on_chunk(message)

    async def _send_agent(self) -> None:
        while True:
            message = await self._outbox.get()
            if self._agent is not None:
                await self._agent.send(message)


def _threads(count: int) -> dict[str, str]:
    """Spinning workers of one process steal the cores of all the others."""
    number = str(count)
    return {
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
        "OPENBLAS_NUM_THREADS": number,
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }
