"""Message channels between the processes of one machine: ZeroMQ over Unix sockets.

In: messages. Out: messages. Each socket's file lives in its group's own folder, so groups on one
machine never meet. Knows nothing of what the messages mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import zmq
import zmq.asyncio

from characters_serve.messages import Message, decode, encode

# A Unix socket's path holds at most 107 bytes.
_MAX_SOCKET_PATH = 107


def endpoint(group_dir: Path, name: str) -> str:
    """The address of one of the group's sockets, for example `control-rank0` or `chunks`."""
    path = group_dir / f"{name}.sock"
    if len(bytes(path)) > _MAX_SOCKET_PATH:
        raise ValueError(f"server.run_dir is too long for a socket: {path}")
    return f"ipc://{path}"


def _open(
    context: zmq.Context[zmq.Socket[bytes]] | zmq.asyncio.Context,
    kind: int,
    address: str,
    bind: bool,
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket  # type: ignore[return-value]


class Channel:
    """An asyncio end. `pair` speaks both ways, `push` only sends, `pull` only receives."""

    def __init__(self, address: str, kind: str, *, bind: bool) -> None:
        self._socket = _open(zmq.asyncio.Context.instance(), _KINDS[kind], address, bind)

    async def send(self, message: Message) -> None:
        await self._socket.send_multipart(encode(message))  # type: ignore[misc]

    async def recv(self) -> Message:
        return decode(await self._socket.recv_multipart())  # type: ignore[misc]

    def close(self, linger_ms: int = 0) -> None:
        """linger_ms: how long unsent messages may still take to leave, for a child's last word."""
        self._socket.close(linger_ms)


class BlockingChannel:
    """A blocking end, for processes whose loop computes."""

    def __init__(self, address: str, kind: str, *, bind: bool) -> None:
        self.socket = _open(zmq.Context.instance(), _KINDS[kind], address, bind)

    def send(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    def recv(self) -> Message:
        return decode(self.socket.recv_multipart())

    def close(self) -> None:
        self.socket.close()


class Inbox:
    """Yields messages from several blocking channels; the first listed is read first."""

    def __init__(self, *channels: BlockingChannel) -> None:
        self._channels = channels
        self._poller = zmq.Poller()
        for channel in channels:
            self._poller.register(channel.socket, zmq.POLLIN)

    def messages(self, timeout_s: float) -> Iterator[Message | None]:
        """Endless; yields None when nothing came for timeout_s."""
        while True:
            ready = dict(self._poller.poll(round(timeout_s * 1000)))
            channel = next((c for c in self._channels if c.socket in ready), None)
            yield channel.recv() if channel else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()


_KINDS = {"pair": zmq.DEALER, "push": zmq.PUSH, "pull": zmq.PULL}
