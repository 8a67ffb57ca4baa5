"""The bad network does what it says: on an invented clock, and with real datagrams."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import cast

import pytest

from tests.relay import CLEAN, Conditions, Link, relayed

PACKET_S = 0.001


def link(**conditions: float) -> Link:
    made = Link(seed=7)
    made.conditions = Conditions(**conditions)  # type: ignore[arg-type]
    return made


def fates(made: Link, count: int = 20_000, size: int = 100) -> list[list[float]]:
    return [made.carry(number * PACKET_S, size) for number in range(count)]


def test_a_clean_link_carries_at_once() -> None:
    made = link()
    assert fates(made, 10)[1:] == [[number * PACKET_S] for number in range(1, 10)]


@pytest.mark.parametrize("burst", [1.0, 4.0])
def test_loss_has_its_share_and_its_runs(burst: float) -> None:
    lost = [not fate for fate in fates(link(loss=0.1, burst=burst))]
    assert sum(lost) / len(lost) == pytest.approx(0.1, abs=0.015)
    runs = [len(list(group)) for is_lost, group in groupby(lost) if is_lost]
    assert sum(runs) / len(runs) == pytest.approx(burst if burst > 1 else 1.11, rel=0.1)


def test_jitter_keeps_the_order_and_reordering_does_not() -> None:
    arrivals = [fate[0] for fate in fates(link(delay_s=0.1, jitter_s=0.03))]
    delays = [arrival - number * PACKET_S for number, arrival in enumerate(arrivals)]
    assert arrivals == sorted(set(arrivals))
    assert min(delays) >= 0.07 and max(delays) <= 0.131
    arrivals = [fate[0] for fate in fates(link(delay_s=0.1, reorder=0.05))]
    early = sum(arrival == number * PACKET_S for number, arrival in enumerate(arrivals))
    assert early / len(arrivals) == pytest.approx(0.05, abs=0.01)


def test_duplicates_come_twice() -> None:
    twice = sum(len(fate) == 2 for fate in fates(link(duplicate=0.2)))
    assert twice / 20_000 == pytest.approx(0.2, abs=0.02)


def test_a_narrow_link_queues_then_drops() -> None:
    made = link(kbps=400, queue_s=0.1)  # half of what is sent
    waits = [fate[0] - n * PACKET_S for n, fate in enumerate(fates(made)) if fate]
    assert max(waits) == pytest.approx(0.102, abs=0.001)
    assert made.bytes_carried * 8 / 20 / 1000 == pytest.approx(400, rel=0.02)
    assert made.dropped == pytest.approx(10_000, rel=0.02)


def test_nothing_passes_a_blackout_and_all_do_after_it() -> None:
    made = link()
    made.conditions = Conditions(blackout=True)
    assert not any(fates(made, 10))
    made.conditions = CLEAN
    assert all(fates(made, 10))


def test_the_same_seed_is_the_same_network() -> None:
    conditions = {"loss": 0.1, "burst": 3.0, "jitter_s": 0.02, "delay_s": 0.05}
    assert fates(link(**conditions)) == fates(link(**conditions))


class Echo(asyncio.DatagramProtocol):
    """Answers each datagram, or keeps it."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.received: list[bytes] = []
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.received.append(data)
        if self.answers:
            self.transport.sendto(data, addr)


async def test_datagrams_pass_both_ways_and_clients_are_kept_apart() -> None:
    loop = asyncio.get_running_loop()
    local = ("127.0.0.1", 0)
    server, _ = await loop.create_datagram_endpoint(lambda: Echo(answers=True), local_addr=local)
    host, port = server.get_extra_info("sockname")
    answer = (
        f"v=0\r\na=candidate:x 1 udp 2130706431 {host} {port} typ host\r\n"
        "a=candidate:y 1 udp 2130706431 fe80::1 5000 typ host\r\na=end-of-candidates\r\n"
    )
    clients = []
    async with relayed() as relay:
        rewritten = await relay.rewrite(answer)
        fields = rewritten.split("\r\n")[1].split()
        door = fields[4], int(fields[5])
        assert door != (host, port) and rewritten.count("a=candidate") == 1
        for _ in range(2):
            _, client = await loop.create_datagram_endpoint(
                lambda: Echo(answers=False), local_addr=local
            )
            clients.append(client)
        relay.set(Conditions(delay_s=0.05))
        began_s = loop.time()
        for number, client in enumerate(clients):
            client.transport.sendto(b"%d" % number, door)
        async with asyncio.timeout(5):
            while not all(client.received for client in clients):
                await asyncio.sleep(0.005)
        assert loop.time() - began_s >= 0.1
        assert [client.received for client in clients] == [[b"0"], [b"1"]]
        with pytest.raises(ValueError, match="no IPv4"):
            await relay.rewrite("v=0\r\n")
    for transport in (server, *(client.transport for client in clients)):
        transport.close()
    await asyncio.sleep(0)
