"""In: a range of UDP ports and the address that clients know. Out: where a connection listens, and
an answer that says so.

aioice takes any port and announces the machine's own addresses: behind a firewall or a 1:1 NAT no
client would reach them. Remote candidates are not used at all (session/offer.py), so the server's
own are the only way in. Knows nothing of media.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import re
import socket
from collections.abc import Iterable
from typing import Any, Final

import aioice
from aioice.candidate import candidate_foundation, candidate_priority
from aioice.ice import StunProtocol

SUPPORTED_AIOICE: Final = "0.13.0"
RECEIVE_BUFFER_BYTES: Final = 1 << 18

if aioice.__version__ != SUPPORTED_AIOICE:
    raise ImportError(f"aioice {aioice.__version__} is not the supported {SUPPORTED_AIOICE}")


class NoPortFree(RuntimeError):
    """Every port of the range is taken."""


def listen_on(connection: Any, ports: tuple[int, int] | None) -> None:
    """Makes an aioice `Connection` gather its host candidates on ports of the range (inclusive).

    Called before it gathers. The system picks the port where there is no range.
    """

    async def gather(component: int, addresses: list[str], timeout: int = 5) -> list[Any]:
        protocols = []
        for address in addresses:
            protocol = await _bound(connection, address, ports)
            if protocol is not None:
                protocols.append(protocol)
        if not protocols:
            raise NoPortFree(f"no UDP port of {ports} is free")
        for protocol in protocols:
            host, port = protocol.transport.get_extra_info("sockname")[:2]
            protocol.local_candidate = aioice.Candidate(
                foundation=candidate_foundation("host", "udp", host),
                component=component,
                transport="udp",
                priority=candidate_priority(component, "host"),
                host=host,
                port=port,
                type="host",
            )
        connection._protocols += protocols
        return [protocol.local_candidate for protocol in protocols]

    connection.get_component_candidates = gather


async def _bound(connection: Any, address: str, ports: tuple[int, int] | None) -> Any | None:
    """A socket of the connection on that address, or None where none can be had."""
    loop = asyncio.get_running_loop()
    for port in _in_any_order(ports):
        try:
            transport, protocol = await loop.create_datagram_endpoint(
                lambda: StunProtocol(connection), local_addr=(address, port)
            )
        except OSError:
            continue
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        return protocol
    return None


def _in_any_order(ports: tuple[int, int] | None) -> Iterable[int]:
    """Groups share the range without knowing of each other."""
    if ports is None:
        return (0,)
    first, last = ports
    return random.sample(range(first, last + 1), last - first + 1)


def announce(sdp: str, public_address: str | None) -> str:
    """The answer with the public address in place of the machine's own of the same family.

    Each socket keeps its port, as a 1:1 NAT does; candidates of the other family go.
    """
    if public_address is None:
        return sdp
    version = ipaddress.ip_address(public_address).version
    lines = []
    for line in sdp.splitlines():
        if candidate := re.fullmatch(r"(a=candidate:\S+ \d+ \S+ \d+ )(\S+)( .*)", line):
            if ipaddress.ip_address(candidate[2]).version != version:
                continue
            line = f"{candidate[1]}{public_address}{candidate[3]}"
        elif re.match(r"c=IN IP[46] ", line):
            line = f"c=IN IP{version} {public_address}"
        lines.append(line)
    return "\r\n".join(lines) + "\r\n"
