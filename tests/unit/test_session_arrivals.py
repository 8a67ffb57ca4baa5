"""Transport-wide feedback: what a browser says of each packet's arrival."""

from __future__ import annotations

from struct import pack

import pytest
from aiortc.rtp import RtcpReceiverInfo, RtcpRrPacket
from hypothesis import given
from hypothesis import strategies as st

from characters_serve.session.arrivals import split


def feedback(first: int, ticks: list[int | None], *, reference: int, vectors: bool) -> bytes:
    """ticks: of 0.25 ms after the packet before (the first: after the reference), or None."""
    symbols = [0 if tick is None else 1 if 0 <= tick < 256 else 2 for tick in ticks]
    chunks = b""
    if vectors:
        for begin in range(0, len(symbols), 7):
            seven = (symbols[begin : begin + 7] + [0] * 7)[:7]
            chunk = 0xC000
            for index, symbol in enumerate(seven):
                chunk |= symbol << (12 - 2 * index)
            chunks += pack("!H", chunk)
    else:
        for symbol in symbols:
            chunks += pack("!H", symbol << 13 | 1)
    deltas = b"".join(
        pack("!B" if symbol == 1 else "!h", tick)
        for symbol, tick in zip(symbols, ticks, strict=True)
        if tick is not None
    )
    body = pack("!LLHH", 1, 2, first, len(ticks)) + reference.to_bytes(3, signed=True) + b"\7"
    body += chunks + deltas
    padding = -len(body) % 4
    flags = 0x80 | 0x20 * (padding > 0) | 15
    body += (bytes(padding - 1) + bytes([padding])) if padding else b""
    return pack("!BBH", flags, 205, len(body) // 4) + body


@given(
    first=st.integers(0, 65_535),
    ticks=st.lists(st.none() | st.integers(-32_768, 32_767), min_size=1, max_size=60),
    reference=st.integers(-(2**23), 2**23 - 1),
    vectors=st.booleans(),
)
def test_each_packet_has_its_time(
    first: int, ticks: list[int | None], reference: int, vectors: bool
) -> None:
    report = bytes(RtcpRrPacket(ssrc=5, reports=[RtcpReceiverInfo(6, 0, 0, 9, 0, 0, 0)]))
    packet = feedback(first, ticks, reference=reference, vectors=vectors)
    others, found = split(report + packet + report)
    assert others == report + report
    (news,) = found
    assert news.first == first
    at_s = reference * 0.064
    for tick, time_s in zip(ticks, news.times_s, strict=True):
        at_s += (tick or 0) / 4000
        assert time_s == (None if tick is None else pytest.approx(at_s, abs=1e-6))


def test_runs_and_one_bit_symbols() -> None:
    head = pack("!LLHH", 1, 2, 65_534, 20) + b"\0\0\1" + b"\0"
    run = pack("!H", 1 << 13 | 6)  # six after a small delta
    bits = pack("!H", 0x8000 | 0b10000000000001)  # fourteen, the first and the last arrived
    body = head + run + bits + bytes([4] * 8)
    packet = pack("!BBH", 0x80 | 15, 205, len(body) // 4) + body
    (found,) = split(packet)[1]
    times_s = found.times_s
    assert times_s[:7] == [pytest.approx(0.064 + 0.001 * n) for n in range(1, 8)]
    assert times_s[7:19] == [None] * 12
    assert times_s[19] == pytest.approx(0.072)


@given(st.binary(max_size=80))
def test_a_strangers_bytes_are_passed_on_or_refused(data: bytes) -> None:
    packet = pack("!BBH", 0x8F, 205, 15) + data
    _, found = split(packet)
    assert all(len(news.times_s) <= 65_535 for news in found)


def test_feedback_that_is_cut_short_is_left_out() -> None:
    packet = feedback(3, [4, 5, 300], reference=1, vectors=False)
    for length in range(20, len(packet) - 4, 4):
        assert split(packet[:length]) == (b"", [])
