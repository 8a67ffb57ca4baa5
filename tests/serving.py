"""How tests start `characters serve`, and where it says that it listens."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


def serve_command(*settings: str, module: str = "characters_serve.cli") -> list[str]:
    given = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", module, "serve", *given]


def address_in(said: str) -> str:
    found = re.search(r"http://\S+:\d+", said)
    assert found is not None, said
    return found[0]


class Server:
    """`characters serve` on the test picture, that listens; it leads a process group of its own.

    run_dir: its own; log: where its lines go, else to the test's.
    """

    def __init__(self, run_dir: Path, *settings: str, log: Path | None = None) -> None:
        self.run_dir = run_dir
        settings = (
            *("engine.kind=pattern", "server.port=0", f"server.run_dir={run_dir}"),
            *("fleet.stop_timeout_s=3", *settings),
        )
        with contextlib.nullcontext() if log is None else log.open("wb") as errors:
            self.process = subprocess.Popen(
                serve_command(*settings),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.said = self.process.stdout
        self.url = address_in(self.said.readline().decode())

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    async def ended(self, within_s: float) -> int:
        return await asyncio.to_thread(self.process.wait, within_s)

    def kill(self) -> None:
        """Whatever it does, and if it has ended already."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.said.close()
