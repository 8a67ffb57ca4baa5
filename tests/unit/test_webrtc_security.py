"""The media path as OWASP ASVS 5.0, chapter 17 asks for it; the guide in docker/ says what proves
what."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from OpenSSL import SSL

from characters_serve.session.offer import OfferRefused, check_offer
from tests.unit.test_session_flood import door, goes_on
from tests.unit.test_session_loopback import Loop, running
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def client_hello() -> bytes:
    """What a DTLS client says first."""
    stranger = SSL.Connection(SSL.Context(SSL.DTLS_METHOD))
    stranger.set_connect_state()
    with contextlib.suppress(SSL.WantReadError):
        stranger.do_handshake()
    return stranger.bio_read(4096)


@contextlib.asynccontextmanager
async def besieged(datagram: bytes) -> AsyncIterator[Loop]:
    """A connection that is made while a stranger keeps sending this to the server's port."""
    loop = Loop()
    engine = asyncio.create_task(loop.engine())
    answer = await loop.peer.answer(check_offer(await loop.browser.offer()))

    async def besiege() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            while True:
                stranger.sendto(datagram, door(answer))
                await asyncio.sleep(0.002)

    siege = asyncio.create_task(besiege())
    try:
        await asyncio.sleep(0.1)
        await loop.browser.accept(answer)
        yield loop
    finally:
        for task in (siege, engine):
            task.cancel()
        await loop.peer.close()
        await loop.browser.close()


@pytest.mark.parametrize(
    "datagram",
    [client_hello(), b"\x15\xfe\xfd" + bytes(8) + b"\x00\x02\x02\x28"],
    ids=["hello", "alert"],
)
async def test_a_stranger_who_is_faster_does_not_take_the_handshake(datagram: bytes) -> None:
    async with besieged(datagram) as loop:
        await asyncio.wait_for(loop.connected.wait(), 20)
        await until(lambda: len(loop.channels) == 2 and len(loop.browser.pictures) > 2, 20)
        await goes_on(loop)


async def test_each_connection_has_a_certificate_of_its_own_and_strong_ciphers() -> None:
    prints = []
    for _ in range(2):
        async with running() as loop:
            await until(lambda: len(loop.channels) == 2, 20)
            sdp = loop.peer._pc.localDescription.sdp
            prints.append(re.findall(r"a=fingerprint:sha-256 (\S+)", sdp)[0])
            assert "a=setup:active" in sdp, "the server is the client of DTLS"
            ssl = loop.peer._pc.getSenders()[0].transport._ssl
            assert ssl is not None
            cipher = str(ssl.get_cipher_name())
            assert cipher.startswith(("ECDHE-ECDSA-", "TLS_")), cipher
            assert "GCM" in cipher or "CHACHA" in cipher
            assert ssl.get_selected_srtp_profile().startswith((b"SRTP_AEAD", b"SRTP_AES128_CM"))
    assert len(set(prints)) == 2


async def test_a_certificate_that_the_offer_did_not_name_is_turned_away() -> None:
    loop = Loop()
    offer = await loop.browser.offer()
    forged = re.sub(
        r"(a=fingerprint:\S+ )(\S+)",
        lambda match: match[1] + ":".join(["00"] * len(match[2].split(":"))),
        offer,
    )
    await loop.browser.accept(await loop.peer.answer(check_offer(forged)))
    await until(lambda: bool(loop.lost), 20)
    assert not loop.connected.is_set()
    await loop.peer.close()
    await loop.browser.close()


async def test_an_offer_without_a_fingerprint_is_refused() -> None:
    loop = Loop()
    offer = await loop.browser.offer()
    bare = "\r\n".join(line for line in offer.splitlines() if "fingerprint" not in line)
    with pytest.raises(OfferRefused, match="fingerprint"):
        check_offer(bare)
    await loop.peer.close()
    await loop.browser.close()


async def test_a_flood_of_the_clients_own_packets_is_survived() -> None:
    async with running() as loop:
        await until(lambda: len(loop.channels) == 2 and len(loop.heard) > 2, 20)
        transport = loop.browser.pc.getSenders()[0].transport
        for number in range(4000):
            head = b"\x80\x60" + number.to_bytes(2, "big") + bytes(4) + b"many"
            await transport._send_rtp(head + bytes(160))
            if number % 100 == 0:
                await asyncio.sleep(0.005)
        await goes_on(loop)


def checklist() -> list[tuple[str, list[str]]]:
    """Each requirement of the chapter in docker/README.md, with the tests that it names."""
    guide = (ROOT / "docker" / "README.md").read_text()
    rows = re.findall(r"^\| (17\.\d\.\d) \|.*?\|([^|]*)\|$", guide, re.M)
    return [(number, re.findall(r"`(test_\w+)`", proofs)) for number, proofs in rows]


def test_the_checklist_names_the_whole_chapter_and_tests_that_exist() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    rows = checklist()
    chapter = [
        f"17.{part}.{n}" for part, last in ((1, 2), (2, 8), (3, 2)) for n in range(1, last + 1)
    ]
    assert [number for number, _ in rows] == chapter
    for number, tests in rows:
        assert tests or number == "17.2.7", number
        for test in tests:
            assert f"def {test}(" in sources, f"{number}: {test}"
