"""In: a session's audio address and secret, a voice. Out: the user's microphone, what was heard.

The client's half of `WS /v1/sessions/{id}/audio` (README, "Bring your own voice agent"), as the two
framework examples beside it need it. Knows no framework.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

MICROPHONE_RATE = 16_000
# A message may have 1 MiB; small ones let a clear overtake more.
PIECE_BYTES = 32 * 1024

Event = dict[str, Any]


class CharacterSocket:
    """`on_event` takes each JSON frame, `on_microphone` 20 ms of 16 kHz mono int16 PCM.

    The calls that send never wait: frames leave in order, as fast as the server has room for them.
    """

    def __init__(
        self,
        url: str,
        secret: str,
        on_event: Callable[[Event], None],
        on_microphone: Callable[[bytes], None],
    ) -> None:
        self._url = url
        self._secret = secret
        self._on_event = on_event
        self._on_microphone = on_microphone
        self._format: tuple[int, int] | None = None
        self._outgoing: asyncio.Queue[str | bytes] = asyncio.Queue()

    async def run(self) -> None:
        """Until the session is over. Raises what `websockets` raises when it cannot connect."""
        headers = {"Authorization": f"Bearer {self._secret}"}
        # A socket that is held back answers pings late: the server says itself when it is gone.
        async with connect(self._url, additional_headers=headers, ping_interval=None) as socket:
            # The microphone is sent from the first start on.
            self.tell("start", sample_rate=24_000)
            self._format = (24_000, 1)
            sender = asyncio.create_task(self._send_all(socket))
            try:
                async for frame in socket:
                    if isinstance(frame, str):
                        self._on_event(json.loads(frame))
                    else:
                        self._on_microphone(frame)
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)

    async def _send_all(self, socket: ClientConnection) -> None:
        try:
            while True:
                await socket.send(await self._outgoing.get())
        except ConnectionClosed:
            return

    def tell(self, kind: str, **fields: object) -> None:
        self._outgoing.put_nowait(json.dumps({"type": kind, **fields}))

    def speak(self, pcm: bytes, sample_rate: int, channels: int) -> None:
        """int16 PCM of the present utterance, or the first of the next one."""
        if self._format != (sample_rate, channels):
            self._format = (sample_rate, channels)
            self.tell("start", sample_rate=sample_rate, channels=channels)
        for first in range(0, len(pcm), PIECE_BYTES):
            self._outgoing.put_nowait(pcm[first : first + PIECE_BYTES])

    def end(self) -> None:
        self.tell("end")

    def clear(self) -> None:
        """Overtakes the sound that has not left yet, but for one piece of each utterance: so the
        server knows of them all, and says of each that it is over."""
        waiting: list[str | bytes] = []
        while not self._outgoing.empty():
            frame = self._outgoing.get_nowait()
            if isinstance(frame, str) or not waiting or isinstance(waiting[-1], str):
                waiting.append(frame)
        for frame in waiting:
            self._outgoing.put_nowait(frame)
        self.tell("clear")
