"""In: datagrams between clients and a server. Out: the same, as a bad network delivers them.

Clients are sent here by rewriting the candidate in the answer.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

Address = tuple[str, int]

_CANDIDATE = re.compile(r"(?m)^a=candidate:(\S+) 1 udp (\d+) (\d+\.\d+\.\d+\.\d+) (\d+) typ host")
MAX_CLIENTS = 16


@dataclass(frozen=True, slots=True)
class Conditions:
    """One direction of a network.

    loss: the share lost, in runs of `burst` packets on average. jitter_s: added to the delay,
    evenly from -jitter_s to jitter_s; the order stays, but the share `reorder` waits not at all.
    kbps: what the link carries; what would wait longer than queue_s for it is dropped.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    burst: float = 1.0
    reorder: float = 0.0
    duplicate: float = 0.0
    kbps: float | None = None
    queue_s: float = 0.1
    blackout: bool = False


CLEAN = Conditions()


class Link:
    """Pure: `carry` returns when the datagram arrives; nothing: never, twice: a duplicate."""

    def __init__(self, seed: int) -> None:
        self.conditions = CLEAN
        self.carried = 0
        self.dropped = 0
        self.bytes_carried = 0
        self._random = random.Random(seed)
        self._bad = False
        self._free_s = 0.0
        self._last_s = 0.0

    def carry(self, now_s: float, size: int) -> list[float]:
        conditions = self.conditions
        if conditions.blackout or self._loses(conditions):
            self.dropped += 1
            return []
        sent_s = now_s
        if conditions.kbps is not None:
            began_s = max(now_s, self._free_s)
            if began_s - now_s > conditions.queue_s:
                self.dropped += 1
                return []
            sent_s = self._free_s = began_s + size * 8 / (conditions.kbps * 1000)
        self.carried += 1
        self.bytes_carried += size
        if conditions.reorder and self._random.random() < conditions.reorder:
            return [sent_s]
        jitter_s = self._random.uniform(-1, 1) * conditions.jitter_s
        # Never at the same time: an event loop runs such timers in any order.
        arrives_s = max(self._last_s + 1e-6, sent_s + max(0.0, conditions.delay_s + jitter_s))
        self._last_s = arrives_s
        if conditions.duplicate and self._random.random() < conditions.duplicate:
            return [arrives_s, arrives_s]
        return [arrives_s]

    def _loses(self, conditions: Conditions) -> bool:
        if not conditions.loss:
            return False
        if conditions.burst <= 1:
            return self._random.random() < conditions.loss
        # Two states, all lost in one of them: `burst` is how long it is stayed in.
        into = conditions.loss / (conditions.burst * (1 - conditions.loss))
        leaves = self._random.random() < (1 / conditions.burst if self._bad else into)
        self._bad ^= leaves
        return self._bad


class Relay:
    """Between clients and one server; `down` is towards the clients."""

    def __init__(self, seed: int = 1) -> None:
        self.up = Link(seed)
        self.down = Link(seed + 1)
        self._doors: list[asyncio.DatagramTransport] = []

    def set(self, conditions: Conditions) -> None:
        """In both directions."""
        self.up.conditions = self.down.conditions = conditions

    async def rewrite(self, sdp: str) -> str:
        """The same answer with each IPv4 UDP candidate replaced by a door of this relay."""
        found = _CANDIDATE.findall(sdp)
        if not found:
            raise ValueError("the answer has no IPv4 candidate")
        doors = {}
        for _, _, host, port in found:
            doors[host, port] = await self.open_door((host, int(port)))

        def replace(match: re.Match[str]) -> str:
            foundation, priority, host, port = match.groups()
            door = doors[host, port]
            return f"a=candidate:{foundation} 1 udp {priority} {door[0]} {door[1]} typ host"

        kept = [line for line in sdp.splitlines() if "a=candidate" not in line or "." in line]
        return _CANDIDATE.sub(replace, "\r\n".join(kept) + "\r\n")

    def close(self) -> None:
        for door in self._doors:
            door.close()

    async def open_door(self, server: Address, at: Address | None = None) -> Address:
        """Where clients send to instead of to the server."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _Door(self, server), local_addr=at or (server[0], 0)
        )
        self._doors.append(transport)
        return cast(Address, transport.get_extra_info("sockname"))


class _Door(asyncio.DatagramProtocol):
    """Where clients send to. Each has a socket of its own towards the server, as behind a NAT."""

    def __init__(self, relay: Relay, server: Address) -> None:
        self._relay = relay
        self._server = server
        self._exits: dict[Address, asyncio.Future[asyncio.DatagramTransport]] = {}
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Address) -> None:
        if addr not in self._exits:
            if len(self._exits) >= MAX_CLIENTS:
                return
            self._exits[addr] = asyncio.ensure_future(self._open_exit(addr))
        opened = self._exits[addr]

        def send() -> None:
            opened.add_done_callback(lambda done: self._leave(done, data))

        _schedule(self._relay.up, len(data), send)

    def connection_lost(self, exc: Exception | None) -> None:
        def close(opened: asyncio.Future[asyncio.DatagramTransport]) -> None:
            if not opened.cancelled():
                opened.result().close()

        for opened in self._exits.values():
            opened.add_done_callback(close)

    def from_server(self, data: bytes, client: Address) -> None:
        def send() -> None:
            if not self._transport.is_closing():
                self._transport.sendto(data, client)

        _schedule(self._relay.down, len(data), send)

    async def _open_exit(self, client: Address) -> asyncio.DatagramTransport:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _Exit(self, client), local_addr=(self._server[0], 0)
        )
        return transport

    def _leave(self, opened: asyncio.Future[asyncio.DatagramTransport], data: bytes) -> None:
        if not opened.cancelled() and not opened.result().is_closing():
            opened.result().sendto(data, self._server)


class _Exit(asyncio.DatagramProtocol):
    def __init__(self, door: _Door, client: Address) -> None:
        self._door = door
        self._client = client

    def datagram_received(self, data: bytes, addr: Address) -> None:
        if addr == self._door._server:
            self._door.from_server(data, self._client)


def _schedule(link: Link, size: int, send: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for arrives_s in link.carry(loop.time(), size):
        if arrives_s <= loop.time():
            send()
        else:
            loop.call_at(arrives_s, send)


@asynccontextmanager
async def relayed(seed: int = 1) -> AsyncIterator[Relay]:
    relay = Relay(seed)
    try:
        yield relay
    finally:
        relay.close()
        await asyncio.sleep(0)  # sockets close in the loop's next round
