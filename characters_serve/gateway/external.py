"""In: an external voice agent's WebSocket. Out: its frames for the session's host, and back.

Who may open it is settled here: the server key or the session's client secret, as an Authorization
header, as a subprotocol, or in the first message, since pages cannot set headers. What the frames
mean is the session host's business. Input is read only while the host has room, so that TCP holds
a fast sender back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Final

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from characters_serve.fleet.base import LeaseLost
from characters_serve.fleet.group import FromHost, Group, GroupGone, RequestRefused
from characters_serve.gateway.auth import bearer
from characters_serve.gateway.problems import Problem
from characters_serve.gateway.service import Gateway
from characters_serve.gateway.sessions import Session, SessionOver
from characters_serve.messages import (
    ExternalClose,
    ExternalInput,
    ExternalOutput,
    ExternalRoom,
)

log = logging.getLogger(__name__)

SUBPROTOCOL: Final = "characters-audio"
TOKEN_PREFIX: Final = "bearer."
AUTH_TIMEOUT_S: Final = 10.0
MAX_FRAME_BYTES: Final = 1024 * 1024
WINDOW_BYTES: Final = 256 * 1024
# Ten seconds of microphone: beyond it an agent that does not read loses sound, then its socket.
MAX_WAITING_FRAMES: Final = 500
SEND_TIMEOUT_S: Final = 10.0


class Bridge:
    """One accepted socket and its session's host."""

    def __init__(self, websocket: WebSocket, session_id: str) -> None:
        self._websocket = websocket
        self._session_id = session_id
        self._unread_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._outgoing: asyncio.Queue[ExternalOutput | ExternalClose] = asyncio.Queue()

    def receive(self, message: FromHost) -> None:
        """Takes what the host says at once."""
        if isinstance(message, ExternalRoom):
            self._unread_bytes -= message.num_bytes
            if self._unread_bytes < WINDOW_BYTES:
                self._room.set()
        elif isinstance(message, ExternalClose) or self._outgoing.qsize() < MAX_WAITING_FRAMES:
            self._outgoing.put_nowait(message)
        elif message.text:
            reason = "the voice agent does not read"
            self._outgoing.put_nowait(
                ExternalClose(self._session_id, message.socket_id, 4408, reason)
            )

    async def run(self, group: Group, socket_id: int) -> None:
        """Until either side is gone."""
        tasks = [
            asyncio.create_task(self._read(group, socket_id), name="external-read"),
            asyncio.create_task(self._write(), name="external-write"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await group.close_external(self._session_id, socket_id)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _read(self, group: Group, socket_id: int) -> None:
        while True:
            await self._room.wait()
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text, pcm = message.get("text") or "", message.get("bytes") or b""
            self._unread_bytes += len(text) + len(pcm)
            if self._unread_bytes >= WINDOW_BYTES:
                self._room.clear()
            await group.send_external(ExternalInput(self._session_id, socket_id, text, pcm))

    async def _write(self) -> None:
        while True:
            message = await self._outgoing.get()
            async with asyncio.timeout(SEND_TIMEOUT_S):
                if isinstance(message, ExternalClose):
                    await _close(self._websocket, message.code, message.reason)
                    return
                if message.text:
                    await self._websocket.send_text(message.text)
                else:
                    await self._websocket.send_bytes(message.pcm)


async def serve_external(
    gateway: Gateway, websocket: WebSocket, session_id: str, wait_s: float
) -> None:
    """One socket from its handshake to its end; every refusal is told in words and as a code."""
    offered = [str(name) for name in websocket.scope.get("subprotocols", [])]
    try:
        gateway.origins.check(websocket.headers)
    except Problem:
        await websocket.close()  # before it is accepted: HTTP 403
        return
    await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
    try:
        token = bearer(websocket.headers) or _offered_token(offered)
        session = await _admitted(gateway, websocket, session_id, token)
        bridge = Bridge(websocket, session_id)
        takeover = websocket.query_params.get("takeover", "") in ("1", "true")
        group, socket_id = await gateway.sessions.external(
            session, takeover, wait_s, bridge.receive
        )
        await bridge.run(group, socket_id)
    except Problem as problem:
        await _refuse(websocket, problem.status, problem.detail)
    except RequestRefused as refused:
        await _refuse(websocket, refused.status, refused.reason)
    except (SessionOver, LeaseLost) as over:
        await _refuse(websocket, 410, f"the session has ended: {over}")
    except GroupGone as gone:
        await _refuse(websocket, 504, f"the session's host did not answer: {gone}")
    except (WebSocketDisconnect, TimeoutError):
        log.info("a voice agent's socket was lost")
        await _close(websocket, 1001, "")


async def _admitted(
    gateway: Gateway, websocket: WebSocket, session_id: str, token: str | None
) -> Session:
    if token is None:
        try:
            async with asyncio.timeout(AUTH_TIMEOUT_S):
                first = json.loads(await websocket.receive_text())
        except (TimeoutError, ValueError, KeyError):
            first = None
        if isinstance(first, dict) and first.get("type") == "auth":
            token = str(first.get("token", "")) or None
    return gateway.session(session_id, token)


def _offered_token(offered: list[str]) -> str | None:
    tokens = [name.removeprefix(TOKEN_PREFIX) for name in offered if name.startswith(TOKEN_PREFIX)]
    return tokens[0] if tokens else None


async def _refuse(websocket: WebSocket, status: int, reason: str) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await websocket.send_text(json.dumps({"type": "error", "message": reason}))
    await _close(websocket, 4000 + status, reason)


async def _close(websocket: WebSocket, code: int, reason: str) -> None:
    """Harmless on a socket that is gone; a close frame has room for 123 bytes of reason."""
    if websocket.application_state is WebSocketState.CONNECTED:
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await websocket.close(code, reason.encode()[:120].decode("utf-8", "ignore"))
