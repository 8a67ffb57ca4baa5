"""What strangers and a client gone wrong can put on the wire: the session goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pylibsrtp
import pytest

from characters_serve.session import peer
from characters_serve.session.events import MAX_MESSAGE_BYTES, MAX_MESSAGES_PER_S
from tests.unit.session_rig import HandClock
from tests.unit.test_session_loopback import Loop, running
from tests.waiting import until

DATAGRAMS = 3000


def malformed(seed: int) -> Iterator[bytes]:
    """Datagrams that begin like each protocol of the port, and empty and short ones."""
    randomness = random.Random(seed)
    yield b""
    for first in range(256):
        yield bytes([first])
    stun = bytes.fromhex("000100002112a442") + bytes(12)
    for _ in range(DATAGRAMS):
        body = randomness.randbytes(randomness.randrange(1, 120))
        yield randomness.choice(
            (
                stun[:3] + bytes([randomness.randrange(64)]) + stun[4:] + body,
                b"\x16\xfe\xfd" + body,
                b"\x17\xfe\xfd\x00\x01" + body,
                b"\x15\xfe\xfd" + bytes(8) + b"\x00\x02\x02\x28",  # an alert: handshake failure
                b"\x80\x6f" + body,
                b"\x80" + bytes([randomness.randrange(192, 209)]) + body,
                body,
            )
        )


def door(sdp: str) -> tuple[str, int]:
    found = re.search(r"a=candidate:\S+ 1 udp \d+ (\d+\.\d+\.\d+\.\d+) (\d+) typ host", sdp)
    assert found is not None
    return found[1], int(found[2])


async def goes_on(loop: Loop) -> None:
    """Pictures, the voice, and messages both ways, after whatever has happened."""
    pictures, sounds, heard = (
        len(kept) for kept in (loop.browser.pictures, loop.browser.sounds, loop.heard)
    )
    loop.browser.channel.send("still here")
    await until(lambda: ("events", "still here") in loop.messages)
    await until(lambda: len(loop.browser.pictures) > pictures + 12)
    await until(lambda: len(loop.browser.sounds) > sounds + 12)
    await until(lambda: len(loop.heard) > heard + 12)
    assert loop.lost == []


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING or r.exc_info]


async def test_malformed_datagrams_of_strangers_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as loop:
        await until(lambda: len(loop.channels) == 2 and len(loop.browser.pictures) > 2, 20)
        address = door(loop.peer._pc.localDescription.sdp)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            for number, datagram in enumerate(malformed(1)):
                stranger.sendto(datagram, address)
                if number % 50 == 0:
                    await asyncio.sleep(0.005)
        await goes_on(loop)
    assert complaints(caplog) == []


@pytest.mark.parametrize("first", [0x80, 0x90, 0xB1], ids=["plain", "extended", "padded"])
async def test_malformed_packets_of_the_client_itself_change_nothing(
    first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its packets are authenticated, so they pass into the parsers."""
    randomness = random.Random(first)
    async with running() as loop:
        await until(lambda: len(loop.channels) == 2 and len(loop.heard) > 2, 20)
        (transport,) = {s.transport for s in loop.browser.pc.getSenders()}
        audio: Any = loop.browser.pc.getSenders()[0]
        types = (0x6F, 0x60, 200, 201, 202, 204, 205, 206, 207)  # a goodbye (203) is none
        sent = 0
        for number in range(1500):
            head = bytes([first | randomness.randrange(16), randomness.choice(types)])
            length = randomness.randrange(8)
            data = head + bytes([0, length]) + audio._ssrc.to_bytes(4, "big")
            data += randomness.randbytes(randomness.choice((4, 4 * length, 40)))
            with contextlib.suppress(pylibsrtp.Error):  # it encrypts no nonsense of some kinds
                await transport._send_rtp(data)
                sent += 1
            if number % 50 == 0:
                await asyncio.sleep(0.005)
        assert sent > 300
        await goes_on(loop)
    assert complaints(caplog) == []


async def test_floods_of_messages_are_cut_and_the_channel_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as loop:
        await until(lambda: len(loop.channels) == 2, 20)
        clock = HandClock(time.monotonic() + 60)
        monkeypatch.setattr(peer, "time", clock)
        for _ in range(30):
            loop.browser.channel.send("x" * (MAX_MESSAGE_BYTES + 1))
        for number in range(500):
            loop.browser.channel.send(f"flood {number}")
        await until(lambda: loop.peer.messages_refused == 530 - MAX_MESSAGES_PER_S)
        clock.now_s += 1.1
        await goes_on(loop)


async def test_a_packet_that_cannot_be_handled_is_logged_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as loop:
        await until(lambda: len(loop.channels) == 2, 20)
        sender: Any = loop.peer._pc.getSenders()[0]
        failures = 0

        async def fail(packet: object) -> None:
            nonlocal failures
            failures += 1
            raise KeyError("a mistake of ours")

        sender._handle_rtcp_packet = fail
        await until(lambda: failures >= 2)
        await goes_on(loop)
    assert complaints(caplog) == ["a packet was dropped"]
