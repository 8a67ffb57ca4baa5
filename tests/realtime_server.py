"""In: a script of answers. Out: a live server of the OpenAI Realtime event protocol on a free port.

It speaks a 500 Hz tone for each response, keeps all that it was sent, and refuses what the real one
refuses: a second response, a cancel of nothing, the truncation of an unknown item.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

RATE = 24_000
PIECE_S = 0.1
WORDS = "One two. Three four."

Event = dict[str, Any]


def tone(seconds: float) -> bytes:
    wave = 9000 * np.sin(2 * np.pi * 500 / RATE * np.arange(round(seconds * RATE)))
    return bytes(wave.astype("<i2").tobytes())


class RealtimeServer:
    """old_names: the event names from before the protocol's general availability."""

    def __init__(self) -> None:
        self.received: list[Event] = []
        self.requests: list[Request] = []
        self.refuse_status: int | None = None
        self.old_names = False
        self.seconds = 0.5
        self.pause_s = 0.0
        self.think_s = 0.0
        self.url = ""
        self.socket: ServerConnection | None = None
        self._numbers = itertools.count(1)
        self._response: asyncio.Task[None] | None = None
        self._items: set[str] = set()

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.received if event["type"] == kind]

    async def send(self, kind: str, **fields: Any) -> None:
        assert self.socket is not None
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def error(self, code: str) -> None:
        await self.send("error", error={"type": "invalid_request_error", "code": code})

    async def call(self, response_id: str, call_id: str, name: str, arguments: str) -> None:
        item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
        kind = "response.function_call_arguments.done"
        await self.send(kind, response_id=response_id, call_id=call_id, arguments=arguments)
        await self.send("response.output_item.done", response_id=response_id, item=item)

    def begin_response(self) -> None:
        self._response = asyncio.create_task(self._respond(f"r{next(self._numbers)}"))

    async def drop_connection(self) -> None:
        assert self.socket is not None
        self.socket.transport.abort()
        await self.socket.wait_closed()

    def admit(self, connection: ServerConnection, request: Request) -> Response | None:
        self.requests.append(request)
        if self.refuse_status is not None:
            return connection.respond(self.refuse_status, "no")
        return None

    async def handle(self, socket: ServerConnection) -> None:
        self.socket = socket
        await self.send("session.created", session={})
        try:
            async for frame in socket:
                event = json.loads(frame)
                self.received.append(event)
                await self._take(event)
        except ConnectionClosed:
            pass
        finally:
            if self._response is not None:
                self._response.cancel()

    async def _take(self, event: Event) -> None:
        active = self._response is not None and not self._response.done()
        match event["type"]:
            case "session.update":
                await self.send("session.updated", session=event["session"])
            case "response.create" if active:
                await self.error("conversation_already_has_active_response")
            case "response.create":
                self.begin_response()
            case "response.cancel" if self._response is not None and active:
                self._response.cancel()
                await asyncio.gather(self._response, return_exceptions=True)
            case "response.cancel":
                await self.error("response_cancel_not_active")
            case "conversation.item.truncate":
                known = event["item_id"] in self._items
                if known:
                    await self.send("conversation.item.truncated", **{**event, "type": "x"})
                else:
                    await self.error("item_truncate_invalid_item_id")

    async def _respond(self, response_id: str) -> None:
        audio = "response.audio" if self.old_names else "response.output_audio"
        place = {"response_id": response_id, "item_id": f"i{response_id}", "content_index": 0}
        self._items.add(place["item_id"])  # type: ignore[arg-type]
        status = "cancelled"
        await self.send("response.created", response={"id": response_id})
        try:
            await asyncio.sleep(self.think_s)
            await self.send(
                "response.output_item.added",
                response_id=response_id,
                item={"id": place["item_id"]},
            )
            pcm, words = tone(self.seconds), WORDS.split()
            size = round(PIECE_S * RATE) * 2 - 1  # pieces cut within a sample
            for first in range(0, len(pcm), size):
                if words:
                    await self.send(f"{audio}_transcript.delta", **place, delta=f"{words.pop(0)} ")
                delta = base64.b64encode(pcm[first : first + size]).decode()
                await self.send(f"{audio}.delta", **place, delta=delta)
                await asyncio.sleep(self.pause_s)
            await self.send(f"{audio}_transcript.done", **place, transcript=WORDS)
            await self.send(f"{audio}.done", **place)
            status = "completed"
        finally:
            await self.send("response.done", response={"id": response_id, "status": status})


@asynccontextmanager
async def realtime_server() -> AsyncIterator[RealtimeServer]:
    made = RealtimeServer()
    async with serve(made.handle, "127.0.0.1", 0, process_request=made.admit) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        made.url = f"ws://127.0.0.1:{port}/v1/realtime"
        yield made
