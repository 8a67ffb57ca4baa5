"""The real session host process on the pattern engine, with a real WebRTC client.

A host takes seconds to start: tests that leave it whole share one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from characters_serve.config import (
    AgentConfig,
    Config,
    EngineConfig,
    FleetConfig,
    ModelConfig,
    SessionConfig,
)
from characters_serve.messages import (
    CloseSession,
    Done,
    Failed,
    Interrupt,
    Offer,
    Refused,
    Say,
    UserAudio,
)
from characters_serve.session.children import MAX_AGENT_BACKLOG, Children
from tests.unit.session_rig import Browser, HostParent, ping
from tests.waiting import until

CONFIG = Config(
    model=ModelConfig(width=192, height=128, noise_levels=(1.0, 0.75, 0.5, 0.25)),
    engine=EngineConfig(kind="pattern", passes=3),
    agent=AgentConfig(kind="none"),
    session=SessionConfig(connect_timeout_s=6.0, reconnect_grace_s=3.0),
)

whose_host_is_shared = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HostParent]:
    parent = HostParent(tmp_path_factory.mktemp("g"), CONFIG)
    await parent.start()
    yield parent
    await parent.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def host(shared_host: HostParent) -> AsyncIterator[HostParent]:
    """Without a session, before and after; what was heard before is forgotten.

    As everywhere, no session has the name of another before it.
    """
    for heard in (shared_host.states, shared_host.metrics, shared_host.others):
        heard.clear()
    yield shared_host
    for session_id in {state.session_id for state in shared_host.states}:
        await shared_host.close(session_id)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def has_media(browser: Browser) -> bool:
    return len(browser.pictures) > 3 and len(browser.sounds) > 3


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def envelope(kind: str, **data: object) -> str:
    return json.dumps({"label": "rtvi-ai", "id": "1", "type": kind, "data": data})


@whose_host_is_shared
async def test_a_session_from_open_to_close(host: HostParent) -> None:
    assert isinstance(await host.open("one"), Done)
    browser = Browser()
    await host.connect("one", browser)
    browser.keep_beating()
    await until(lambda: len(browser.pictures) > 48 and len(browser.sounds) > 100)
    browser.channel.send(envelope("client-ready"))
    browser.channel.send(envelope("nonsense"))
    browser.probe.send(ping(5))
    await until(lambda: {"bot-ready", "error"} <= set(browser.kinds()))
    await until(lambda: 5 in [pong["id"] for pong in browser.pongs])
    assert browser.pongs[-1]["media_ms"] > 0
    await until(lambda: "metrics" in browser.kinds())
    numbers = next(e["data"] for e in browser.events if e["type"] == "metrics")
    assert numbers["passes"] == 3
    assert isinstance(await host.ask(lambda n: Interrupt(n, "one")), Done)
    assert isinstance(await host.ask(lambda n: Say(n, "one", "hello")), Done)
    assert isinstance(await host.close("one"), Done)
    await until(lambda: host.state_names("one")[-1] == "ended")
    assert host.state_names("one") == ["starting", "ready", "live", "ending", "ended"]
    ends = [e["data"] for e in browser.events if e["type"] == "server-message"]
    assert {"kind": "session-ending", "reason": "closed by a test", "in_ms": 0} in ends
    reports = len(host.metrics)
    await until(lambda: len(host.metrics) > reports + 1)
    counters = host.metrics[-1].counters
    before = host.metrics[-2].counters
    assert counters["chunks_total"] == before["chunks_total"], "nothing is generated for nobody"
    assert counters["frames_sent_total"] > 40 and counters["interrupts_total"] == 1
    assert host.metrics[-1].gauges.keys() == {
        "host_tasks",
        "self_test_period_ms",
        "group_degraded",
    }
    await browser.close()


@whose_host_is_shared
async def test_requests_that_make_no_sense_are_refused(host: HostParent) -> None:
    refused = await host.ask(lambda n: Offer(n, "none", "v=0", False))
    assert isinstance(refused, Refused) and refused.status == 404
    assert isinstance(await host.ask(lambda n: CloseSession(n, "none", "")), Done)
    await host.open("asked")
    refused = await host.open("too-many")
    assert isinstance(refused, Refused) and refused.status == 409
    for garbage in ("", "garbage", "v=0\r\n" * 100_000):
        refused = await host.ask(partial(Offer, session_id="asked", sdp=garbage, takeover=False))
        assert isinstance(refused, Refused) and refused.status == 400
    browser, second = Browser(microphone=False), Browser()
    await host.connect("asked", browser)
    await until(lambda: "live" in host.state_names("asked"))
    sdp = await second.offer()
    refused = await host.ask(lambda n: Offer(n, "asked", sdp, False))
    assert isinstance(refused, Refused) and refused.status == 409
    refused = await host.ask(lambda n: Offer(n, "asked", "garbage", True))
    assert isinstance(refused, Refused) and refused.status == 400
    count = len(browser.pictures)
    await until(lambda: len(browser.pictures) > count + 10)  # the live client is unharmed
    await host.close("asked")
    await browser.close()
    await second.close()


@whose_host_is_shared
async def test_a_client_that_comes_back_gets_the_same_character(host: HostParent) -> None:
    await host.open("taken-up")
    first, second = Browser(), Browser()
    await host.connect("taken-up", first)
    await until(lambda: len(first.pictures) > 10)
    await first.close()
    await until(lambda: host.state_names("taken-up")[-1] == "reconnecting")
    await host.connect("taken-up", second, takeover=True)
    await until(lambda: len(second.pictures) > 30 and len(second.sounds) > 50)
    assert host.state_names("taken-up") == ["starting", "ready", "live", "reconnecting", "live"]
    third = Browser()
    await host.connect("taken-up", third, takeover=True)  # a takeover of a live session
    await until(lambda: len(third.pictures) > 10)
    for browser in (second, third):
        await browser.close()
    await until(lambda: host.state_names("taken-up")[-1] == "ended")
    assert host.states[-1].reason == "the client did not come back"
    assert isinstance(await host.open("next"), Done)


@whose_host_is_shared
async def test_a_silent_client_is_noticed_and_heard_again(host: HostParent) -> None:
    await host.open("silent")
    browser = Browser()
    await host.connect("silent", browser)
    # It has opened the heartbeat's channel, and dies before its first beat.
    await until(lambda: host.state_names("silent")[-1] == "reconnecting")
    browser.probe.send(ping(2))
    await until(lambda: host.state_names("silent")[-1] == "live")
    await browser.close()


@whose_host_is_shared
async def test_limits_end_a_session_with_notice(host: HostParent) -> None:
    await host.open("long", max_duration_s=3.0)
    browser = Browser()
    await host.connect("long", browser)
    await until(lambda: host.state_names("long")[-1] == "ended")
    assert host.states[-1].reason == "maximum duration"
    ends = [e["data"] for e in browser.events if e["type"] == "server-message"]
    assert [end["kind"] for end in ends] == ["session-ending", "session-ending"]
    assert 0 < ends[0]["in_ms"] <= 1500 and ends[1]["in_ms"] == 0
    await browser.close()
    await host.open("unmet")
    await until(lambda: host.state_names("unmet")[-1] == "ended")
    assert host.states[-1].reason == "no client connected in time"


async def footprint(host: HostParent, pid: int) -> tuple[int, int, int]:
    """File descriptors, threads and asyncio tasks of a host without a session."""
    reports = len(host.metrics)
    await until(lambda: len(host.metrics) > reports + 1)
    return descriptors(pid), threads(pid), int(host.metrics[-1].gauges["host_tasks"])


@whose_host_is_shared
async def test_twelve_sessions_leave_nothing(host: HostParent) -> None:
    pid = host.child.pid
    assert pid is not None
    baseline = (0, 0, 0)
    for number in range(12):
        name = f"session-{number}"
        assert isinstance(await host.open(name), Done)
        browser = Browser()
        await host.connect(name, browser)
        await until(partial(has_media, browser))
        if number % 2:
            await browser.close()
        assert isinstance(await host.close(name), Done)
        await browser.close()
        if number == 4:
            baseline = await footprint(host, pid)
    assert np.max(np.subtract(await footprint(host, pid), baseline)) <= 1


def test_pictures_that_are_gone_leave_no_holes_in_the_heap() -> None:
    """In a process of its own: what malloc is told, it is told for good."""
    script = """
import ctypes
from characters_serve.session.host import give_back_large_buffers

class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
give_back_large_buffers()
bytearray(16 << 20)  # freed at once: glibc would now keep all that is smaller
before = mallinfo2().arena
pictures = [bytearray(384 * 256 * 3 // 2) for _ in range(100)]
grown = mallinfo2().arena - before
assert grown < 1 << 20, grown
"""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("glibc 2.33 or newer tells what its heap holds")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def test_an_engine_that_dies_fails_the_session_and_ends_the_group(tmp_path: Path) -> None:
    host = HostParent(tmp_path, CONFIG)
    await host.start()
    await host.open("one")
    browser = Browser()
    await host.connect("one", browser)
    await until(lambda: len(browser.pictures) > 5)
    os.kill(int(host.details["pid_pattern"]), signal.SIGKILL)
    await until(lambda: bool(host.exits))
    assert host.state_names("one")[-1] == "failed"
    assert host.states[-1].reason == "pattern exited with code -9"
    failures = [m for m in host.others if isinstance(m, Failed)]
    assert [failure.reason for failure in failures] == ["pattern exited with code -9"]
    await browser.close()
    await host.child.kill()


async def test_the_diffusion_engine_plays_and_its_decoder_may_not_hang(tmp_path: Path) -> None:
    """What answers no ping is killed, so that this is also how one that dies is noticed."""
    model = ModelConfig(weights="synthetic")
    config = Config(
        model=model,
        engine=EngineConfig(device="cpu", stall_timeout_s=60.0),
        agent=AgentConfig(kind="none"),
        fleet=FleetConfig(ping_timeout_s=5.0),
    )
    host = HostParent(tmp_path, config)
    await host.start()
    browser = await host.reach_second_session()
    os.kill(int(host.details["pid_decoder"]), signal.SIGSTOP)
    await until(lambda: bool(host.exits))
    assert host.states[-1].state == "failed"
    assert host.states[-1].reason == "decoder exited with code -9"
    for name in ("pid_rank0", "pid_decoder"):
        assert not Path(f"/proc/{host.details[name]}").exists()
    await browser.close()
    await host.child.kill()


def watched(host: HostParent, gauge: str) -> bool:
    return bool(host.metrics) and host.metrics[-1].gauges.get(gauge) == 1


async def test_an_engine_that_hangs_is_the_groups_fault(tmp_path: Path) -> None:
    host = HostParent(tmp_path, CONFIG)
    await host.start()
    await host.open("one")
    browser = Browser()
    await host.connect("one", browser)
    await until(lambda: len(browser.pictures) > 5)
    browser.keep_beating()
    os.kill(int(host.details["pid_pattern"]), signal.SIGSTOP)
    await until(lambda: host.exits or watched(host, "chunk_stalled"))
    assert not host.exits and host.metrics[-1].counters["chunk_watchdog_total"] == 1
    await until(lambda: bool(host.exits))
    assert host.state_names("one")[-1] == "failed"
    states = [e["data"] for e in browser.events if e["type"] == "server-message"]
    assert {"kind": "avatar-state", "state": "stalled"} in states
    await browser.close()
    await host.child.kill()


async def test_how_long_a_group_may_be_without_a_chunk_is_configured(tmp_path: Path) -> None:
    engine = EngineConfig(kind="pattern", stall_timeout_s=1.0)
    host = HostParent(tmp_path, CONFIG.model_copy(update={"engine": engine}))
    await host.start()
    await host.open("one")
    os.kill(int(host.details["pid_pattern"]), signal.SIGSTOP)
    browser = Browser()
    await host.connect("one", browser)
    await until(lambda: bool(host.exits))
    failed = next(state for state in host.states if state.state == "failed")
    assert "no chunk for" in failed.reason
    # The kernel's ping of the stopped process would have taken ten times as long.
    assert float(failed.reason.split()[-2]) < 9
    await browser.close()
    await host.child.kill()


async def test_a_host_that_is_stopped_in_a_session_ends_it_first(tmp_path: Path) -> None:
    host = HostParent(tmp_path, CONFIG)
    await host.start()
    engine = int(host.details["pid_pattern"])
    await host.open("one")
    browser = Browser()
    await host.connect("one", browser)
    await until(lambda: len(browser.pictures) > 5)
    await host.stop()
    assert host.child.pid is not None and not Path(f"/proc/{host.child.pid}").exists()
    await until(lambda: not Path(f"/proc/{engine}").exists())
    await browser.close()


async def test_a_killed_host_takes_its_children_with_it(tmp_path: Path) -> None:
    host = HostParent(tmp_path, CONFIG)
    await host.start()
    engine = int(host.details["pid_pattern"])
    assert host.child.pid is not None
    os.kill(host.child.pid, signal.SIGKILL)
    await until(lambda: bool(host.exits))
    await until(lambda: not Path(f"/proc/{engine}").exists())
    await host.child.kill()


async def test_an_agent_that_reads_nothing_costs_a_bounded_memory(tmp_path: Path) -> None:
    children = Children(
        CONFIG.model_copy(update={"agent": AgentConfig(kind="local")}),
        tmp_path,
        **dict.fromkeys(("on_agent", "on_chunk", "on_counts", "on_fault"), print),
    )
    for _ in range(2 * MAX_AGENT_BACKLOG):
        children.to_agent(UserAudio("one", bytes(640)))
    assert children._outbox.qsize() == MAX_AGENT_BACKLOG
    children.end_agent("one")
    assert children._outbox.qsize() == MAX_AGENT_BACKLOG + 1, "only sound may be dropped"
    await children.kill()
