"""The contract between a parent and the processes it starts.

A child is Ready or Failed by a deadline, answers pings, acknowledges Shutdown and leaves; one that
does not is killed. A child whose parent dies is killed by the kernel. `ChildProcess` is the
parent's side, `ControlLink` the child's; both speak over one `pair` channel that the parent binds.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from characters_serve.channels import BlockingChannel, Channel, endpoint
from characters_serve.config import Config
from characters_serve.messages import (
    Failed,
    Message,
    Ping,
    Pong,
    Ready,
    Shutdown,
    ShutdownAck,
    Warming,
)

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class ChildFailed(RuntimeError):
    """A child that did not become ready, or is gone; the message says which and why.

    permanent: another try would fail as well: what is wrong is the configuration.
    """

    def __init__(self, reason: str, *, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


def is_permanent(error: Exception) -> bool:
    """Of what ended a start: whether another try would fail as well."""
    return isinstance(error, ChildFailed) and error.permanent


def arguments(description: str) -> argparse.ArgumentParser:
    """What every child is started with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--group-dir", type=Path, required=True)
    return parser


def read_config(group_dir: Path) -> Config:
    """The resolved configuration, which whoever starts a group writes into its folder."""
    return Config.model_validate_json((group_dir / "config.json").read_text())


class ChildProcess:
    """One supervised child, started as `python -m MODULE --group-dir DIR ...`."""

    def __init__(
        self,
        name: str,
        module: str,
        group_dir: Path,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        nice: int = 0,
        on_message: Callable[[Message], Awaitable[None]],
        on_exit: Callable[[str], Awaitable[None]],
        ping_interval_s: float = 1.0,
        ping_timeout_s: float = 10.0,
    ) -> None:
        self.name = name
        self._argv = [sys.executable, "-m", module, "--group-dir", str(group_dir), *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self._nice = nice
        self._on_message = on_message
        self._on_exit = on_exit
        self._ping_interval_s = ping_interval_s
        self._ping_timeout_s = ping_timeout_s
        self._channel = Channel(endpoint(group_dir, f"control-{name}"), "pair", bind=True)
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._acknowledged = asyncio.Event()
        self._stopping = False
        self._unanswered = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, timeout_s: float) -> Ready:
        """Starts the child and waits for its Ready; on failure it is gone when this raises."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, env=self._environment, preexec_fn=lambda: _prepare_child(self._nice)
            )
        except OSError as error:  # no process, memory or descriptor left
            await self.kill()
            raise ChildFailed(f"{self.name} cannot be started: {error.strerror}") from error
        self._tasks = [
            asyncio.create_task(self._receive(), name=f"{self.name}-receive"),
            asyncio.create_task(self._watch_exit(), name=f"{self.name}-exit"),
        ]
        try:
            ready = await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            await self.kill()
            raise ChildFailed(f"{self.name}: not ready after {timeout_s:g} s") from None
        except ChildFailed:
            await self.kill()
            raise
        self._tasks.append(asyncio.create_task(self._ping(), name=f"{self.name}-ping"))
        return ready

    async def send(self, message: Message) -> None:
        await self._channel.send(message)

    async def stop(self, reason: str, timeout_s: float) -> None:
        """Shutdown, acknowledgement, exit; what does not answer in time is killed."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            await self._channel.send(Shutdown(reason))
            try:
                await asyncio.wait_for(self._acknowledged.wait(), timeout_s)
                await asyncio.wait_for(self._process.wait(), timeout_s)
            except TimeoutError:
                log.warning("%s did not stop in %g s; killing it", self.name, timeout_s)
        await self.kill()

    async def kill(self) -> None:
        """Ends the child at once and closes everything of ours that belonged to it."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        await asyncio.gather(
            *(task for task in self._tasks if task is not current), return_exceptions=True
        )
        self._tasks = []
        if not self._ready.done():
            self._ready.cancel()
        self._channel.close()

    async def _receive(self) -> None:
        while True:
            message = await self._channel.recv()
            self._unanswered = 0
            match message:
                case Ready():
                    if not self._ready.done():
                        self._ready.set_result(message)
                case Failed(_, reason, permanent):
                    if not self._ready.done():
                        failure = ChildFailed(f"{self.name}: {reason}", permanent=permanent)
                        self._ready.set_exception(failure)
                    else:
                        await self._on_message(message)
                case Pong():
                    pass
                case ShutdownAck():
                    self._acknowledged.set()
                case _:
                    await self._on_message(message)

    async def _watch_exit(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        reason = f"{self.name} exited with code {code}"
        if not self._ready.done():
            # Its Failed message may still be in the socket: let the reader have it first.
            await asyncio.sleep(0.1)
            if not self._ready.done():
                self._ready.set_exception(ChildFailed(reason))
        elif not self._stopping:
            log.error("%s", reason)
            await self._on_exit(reason)

    async def _ping(self) -> None:
        """Silence is counted in pings: a parent that was itself stopped accuses no child."""
        sequence = 0
        self._unanswered = 0
        while True:
            await asyncio.sleep(self._ping_interval_s)
            silent_s = self._unanswered * self._ping_interval_s
            if silent_s >= self._ping_timeout_s and not self._stopping:
                log.error("%s has not answered for %.1f s; killing it", self.name, silent_s)
                if self._process is not None and self._process.returncode is None:
                    self._process.kill()  # _watch_exit reports it
                return
            sequence += 1
            self._unanswered += 1
            await self._channel.send(Ping(sequence))


def _prepare_child(nice: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A terminal's Ctrl-C and a service manager's SIGTERM reach every process at once; the parent
    # decides when a child ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if nice:
        os.nice(nice)


class ControlLink:
    """A computing child's end of its control channel."""

    def __init__(self, group_dir: Path, name: str) -> None:
        self.name = name
        self.channel = BlockingChannel(endpoint(group_dir, f"control-{name}"), "pair", bind=False)

    def ready(self, details: dict[str, str]) -> None:
        self.channel.send(Ready(self.name, os.getpid(), details))

    def failed(self, reason: str, *, permanent: bool = False) -> None:
        self.channel.send(Failed(self.name, reason, permanent))

    def answer(self, message: Message | None) -> bool:
        """Handles supervision; True when the child must leave its loop."""
        match message:
            case Ping(sequence):
                self.channel.send(Pong(sequence))
            case Shutdown():
                self.channel.send(ShutdownAck(self.name))
                return True
        return False


class AsyncControlLink:
    """An asyncio child's end of its control channel."""

    def __init__(self, group_dir: Path, name: str) -> None:
        self.name = name
        self.channel = Channel(endpoint(group_dir, f"control-{name}"), "pair", bind=False)

    async def ready(self, details: dict[str, str]) -> None:
        await self.channel.send(Ready(self.name, os.getpid(), details))

    async def warming(self) -> None:
        await self.channel.send(Warming(self.name))

    async def failed(self, reason: str, *, permanent: bool = False) -> None:
        await self.channel.send(Failed(self.name, reason, permanent))

    async def answer(self, message: Message) -> bool:
        """Handles supervision; True when the child must leave its loop."""
        match message:
            case Ping(sequence):
                await self.channel.send(Pong(sequence))
            case Shutdown():
                await self.channel.send(ShutdownAck(self.name))
                return True
        return False
