"""Where a connection listens and what it announces: ports of a range, an address behind a NAT."""

from __future__ import annotations

import contextlib
import re
import socket

import pytest

from characters_serve.config import ConfigError, DeliveryConfig, load_config
from characters_serve.session.ice import NoPortFree, announce
from characters_serve.session.offer import check_offer
from tests.relay import relayed
from tests.unit.test_session_loopback import Loop
from tests.waiting import until

CANDIDATE = re.compile(r"(?m)^a=candidate:\S+ 1 udp \d+ (\S+) (\d+) typ host")

ANSWER = (
    "v=0\r\n"
    "c=IN IP4 10.0.0.5\r\n"
    "a=candidate:a 1 udp 2130706431 10.0.0.5 40001 typ host\r\n"
    "a=candidate:b 1 udp 2130706431 172.17.0.1 40002 typ host\r\n"
    "a=candidate:c 1 udp 2130706431 fd00::5 40003 typ host\r\n"
    "a=end-of-candidates\r\n"
)


def free_ports(count: int) -> tuple[int, int]:
    """A range of ports that nobody listens on."""
    for first in range(42_000, 60_000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                probe.bind(("", port))
            return first, first + count - 1
    pytest.skip("no free ports")


def test_the_public_address_takes_the_place_of_the_machines_own() -> None:
    assert announce(ANSWER, None) == ANSWER
    told = announce(ANSWER, "203.0.113.9")
    assert CANDIDATE.findall(told) == [("203.0.113.9", "40001"), ("203.0.113.9", "40002")]
    assert "c=IN IP4 203.0.113.9\r\n" in told and told.endswith("a=end-of-candidates\r\n")
    sixth = announce(ANSWER, "2001:db8::9")
    assert CANDIDATE.findall(sixth) == [("2001:db8::9", "40003")]
    assert "c=IN IP6 2001:db8::9\r\n" in sixth


async def test_media_stays_on_the_ports_of_the_range_until_none_is_left() -> None:
    ports = free_ports(8)
    loops = [Loop(udp_ports=ports) for _ in range(9)]
    taken: set[tuple[str, int]] = set()
    answered = 0
    try:
        with pytest.raises(NoPortFree):
            for loop in loops:
                answer = await loop.peer.answer(check_offer(await loop.browser.offer()))
                answered += 1
                found = [(host, int(port)) for host, port in CANDIDATE.findall(answer)]
                assert found and not taken & set(found)
                assert all(ports[0] <= port <= ports[1] for _, port in found)
                taken |= set(found)
        assert answered == 8
        await loops[0].peer.close()
        again = Loop(udp_ports=ports)  # what was given back is used again
        loops.append(again)
        assert await again.peer.answer(check_offer(await again.browser.offer()))
    finally:
        for loop in loops:
            await loop.peer.close()
            await loop.browser.close()


async def test_a_client_beyond_a_nat_reaches_the_announced_address() -> None:
    async with relayed() as nat:
        loop = Loop(public_address="127.0.0.1")
        try:
            answer = await loop.peer.answer(check_offer(await loop.browser.offer()))
            own = CANDIDATE.findall(loop.peer._pc.localDescription.sdp)
            inside = {(host, int(port)) for host, port in own if "." in host}
            for address in inside:
                await nat.open_door(address, at=("127.0.0.1", address[1]))
            assert {host for host, _ in CANDIDATE.findall(answer)} == {"127.0.0.1"}
            await loop.browser.accept(answer)
            await until(loop.connected.is_set, 15)
            assert nat.down.carried > 0 and nat.up.carried > 0
        finally:
            await loop.peer.close()
            await loop.browser.close()


@pytest.mark.parametrize(
    "setting",
    ["public_address=my.host", "udp_ports=[80, 90]", "udp_ports=[5000, 4000]", "udp_ports=[5000]"],
)
def test_settings_that_cannot_be(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        load_config(overrides=[f"delivery.{setting}"])


def test_by_default_the_system_picks_and_nothing_is_announced() -> None:
    assert (DeliveryConfig().public_address, DeliveryConfig().udp_ports) == (None, None)
