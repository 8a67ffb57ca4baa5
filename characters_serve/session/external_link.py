"""In: what an external agent's socket sent. Out: speech for the session, frames for the socket.

One session's socket: who holds it, and how much of what it sent may wait here. Input is answered
with room for more only while less than a minute of speech is queued, so a fast sender is held back
by its own connection and nothing is dropped. Knows no WebSocket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from characters_serve.agent.base import Emit
from characters_serve.agent.external import ExternalAgent
from characters_serve.messages import (
    AgentInterrupt,
    AgentSay,
    Done,
    ExternalClose,
    ExternalInput,
    ExternalOpen,
    ExternalOutput,
    ExternalRoom,
    MarkReached,
    Message,
    Playback,
    Refused,
    UserAudio,
    UserText,
)

MAX_QUEUED_MS: Final = 60_000.0
ROOM_POLL_S: Final = 0.1
# Who opens a socket anew may be here before the end of the one that it lost.
LEAVES_WITHIN_S: Final = 1.0
# WebSocket close codes: the usual ones, and the HTTP statuses from 4000 on.
CLOSED, REPLACED = 1000, 4409


class ExternalLink:
    def __init__(
        self,
        session_id: str,
        emit: Emit,
        queued_ms: Callable[[], float],
        post: Callable[[Message], None],
    ) -> None:
        self.agent = ExternalAgent(session_id, emit, self._send)
        self._session_id = session_id
        self._queued_ms = queued_ms
        self._post = post
        self._socket_id: int | None = None
        self._vacant = asyncio.Event()
        self._closed = False
        self._owed_bytes = 0
        self._waiting: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ the gateway's side

    async def open(self, request: ExternalOpen) -> Done | Refused:
        """With takeover at once; else when there is no other, for whose end it waits a moment."""
        if request.takeover:
            self._drop(REPLACED, "another voice agent took over")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVES_WITHIN_S):
                while self._socket_id is not None:
                    await self._vacant.wait()
        if self._closed:
            return Refused(request.request_id, 409, "the session is ending")
        if self._socket_id is not None:
            return Refused(request.request_id, 409, "the session has a voice agent already")
        self._socket_id = request.request_id
        self._vacant.clear()
        self.agent.connect()
        return Done(request.request_id)

    def input(self, frame: ExternalInput) -> None:
        if frame.socket_id != self._socket_id:
            return
        if frame.text:
            self.agent.text(frame.text)
        else:
            self.agent.pcm(frame.pcm)
        self._owed_bytes += len(frame.pcm) + len(frame.text)
        self._give_room()

    def lost(self, frame: ExternalClose) -> None:
        if frame.socket_id == self._socket_id:
            self._let_go()

    async def close(self, reason: str) -> None:
        """The session ends: nothing of the socket is left."""
        self._closed = True
        await self.agent.close()
        self._drop(CLOSED, reason)
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)

    def _drop(self, code: int, reason: str) -> None:
        if self._socket_id is not None:
            self._post(ExternalClose(self._session_id, self._socket_id, code, reason))
            self._let_go()

    def _let_go(self) -> None:
        self.agent.disconnect()
        self._socket_id = None
        self._owed_bytes = 0
        self._vacant.set()

    def _give_room(self) -> None:
        if self._queued_ms() < MAX_QUEUED_MS:
            if self._socket_id is not None and self._owed_bytes:
                self._post(ExternalRoom(self._session_id, self._socket_id, self._owed_bytes))
            self._owed_bytes = 0
        elif self._waiting is None or self._waiting.done():
            self._waiting = asyncio.create_task(self._wait_for_room(), name="external-room")

    async def _wait_for_room(self) -> None:
        while self._queued_ms() >= MAX_QUEUED_MS:
            await asyncio.sleep(ROOM_POLL_S)
        self._give_room()

    def _send(self, frame: str | bytes) -> None:
        if self._socket_id is None:
            return
        text, pcm = (frame, b"") if isinstance(frame, str) else ("", frame)
        self._post(ExternalOutput(self._session_id, self._socket_id, text, pcm))

    # ------------------------------------------------------------ the session's side

    def tell(self, message: Message) -> None:
        match message:
            case UserAudio(pcm_16k=pcm):
                self.agent.hear(pcm)
            case AgentInterrupt(utterance_id=utterance_id):
                self.agent.interrupt(utterance_id)
            case Playback():
                self.agent.playback(message)
            case AgentSay(text=text):
                self.agent.say(text)
            case UserText(text=text):
                self.agent.read(text)
            case MarkReached(name=name):
                self.agent.mark_reached(name)
