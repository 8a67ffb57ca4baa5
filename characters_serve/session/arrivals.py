"""In: decrypted RTCP datagrams. Out: the same without transport-wide feedback, and what that says.

The feedback is that of draft-holmer-rmcat-transport-wide-cc-extensions-01, which browsers send for
each packet that carries the extension's number: when it arrived, by the browser's clock. Knows
nothing of what is done with it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from struct import error as StructError
from struct import unpack_from
from typing import Final

EXTENSION: Final = "http://www.ietf.org/id/draft-holmer-rmcat-transport-wide-cc-extensions-01"
FEEDBACK: Final = "transport-cc"

_RTPFB: Final = 205
_FORMAT: Final = 15
_REFERENCE_S: Final = 0.064
_DELTA_S: Final = 0.00025
_ARRIVED: Final = (1, 2)  # symbols: after a delta of one byte, of two with a sign


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Packets from number `first` on: seconds on the receiver's clock, or None for not arrived."""

    first: int
    times_s: list[float | None]


def split(datagram: bytes) -> tuple[bytes, list[Arrivals]]:
    """Takes a compound packet apart. Feedback that is cut short is as if it were lost."""
    others = bytearray()
    found: list[Arrivals] = []
    offset = 0
    while offset + 4 <= len(datagram):
        size = 4 + 4 * int.from_bytes(datagram[offset + 2 : offset + 4])
        packet = datagram[offset : offset + size]
        if packet[1] == _RTPFB and packet[0] & 0x1F == _FORMAT:
            with suppress(StructError):
                found.append(_parse(packet))
        else:
            others += packet
        offset += size
    return bytes(others + datagram[offset:]), found


def _parse(packet: bytes) -> Arrivals:
    first, count = unpack_from("!HH", packet, 12)
    reference = int.from_bytes(packet[16:19], signed=True)
    symbols, offset = _symbols(packet, 20, count)
    at_s = reference * _REFERENCE_S
    times_s: list[float | None] = []
    for symbol in symbols:
        if symbol not in _ARRIVED:
            times_s.append(None)
            continue
        (delta,) = unpack_from("!B" if symbol == 1 else "!h", packet, offset)
        offset += symbol
        at_s += delta * _DELTA_S
        times_s.append(at_s)
    return Arrivals(first, times_s)


def _symbols(packet: bytes, offset: int, count: int) -> tuple[list[int], int]:
    """One for each packet, and where their deltas begin."""
    symbols: list[int] = []
    while len(symbols) < count:
        (chunk,) = unpack_from("!H", packet, offset)
        offset += 2
        if not chunk & 0x8000:
            symbols += [chunk >> 13] * (chunk & 0x1FFF)
        elif chunk & 0x4000:
            symbols += [chunk >> shift & 3 for shift in range(12, -1, -2)]
        else:
            symbols += [chunk >> shift & 1 for shift in range(13, -1, -1)]
    return symbols[:count], offset
