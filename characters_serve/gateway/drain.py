"""In: signals. Out: a server that ends its conversations, then leaves. Knows no session's state.

The first signal, SIGTERM or Ctrl-C, begins to drain: not ready, no new sessions, and those that
live are told when they end. The second ends everything at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn

log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """drain returns when no session is left or their time is up."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._drain = drain
        self._draining: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)  # type: ignore[arg-type]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1 or not self.started or self._loop is None:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())
        self._draining.add_done_callback(self._drained)

    def _drained(self, draining: asyncio.Future[None]) -> None:
        if not draining.cancelled() and draining.exception() is not None:
            log.error("draining failed", exc_info=draining.exception())
        self.should_exit = True
