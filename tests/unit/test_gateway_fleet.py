"""Groups as real processes: they start, serve, hang, crash, and no slot is ever lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from characters_serve.config import Config, ConfigError, load_config
from characters_serve.fleet import group as group_module
from characters_serve.fleet import pool as pool_module
from characters_serve.fleet.base import LeaseLost
from characters_serve.fleet.group import Group, GroupGone, RequestRefused
from characters_serve.fleet.local import LocalFleet, LocalHost
from characters_serve.fleet.pool import Lease
from characters_serve.messages import HostMetrics, Persona, SessionState
from characters_serve.processes import ChildFailed

ROOT = Path(__file__).parents[2]
FAKE_HOST = "tests.fake_host"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 0.05)


def fleet_config(run_dir: Path, *overrides: str) -> Config:
    return load_config(
        overrides=[
            f"server.run_dir={run_dir}",
            "engine.ready_timeout_s=20",
            "fleet.stop_timeout_s=2",
            "fleet.ping_interval_s=0.1",
            "fleet.ping_timeout_s=1",
            "model.width=96",
            "model.height=64",
            *overrides,
        ]
    )


def persona(instructions: str = "") -> Persona:
    return Persona("Ada", "Hi", {}, [], instructions)


IMAGE = bytes(96 * 64 * 3)


class Heard:
    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.lost: list[str] = []
        self.gone: list[str] = []
        self.ready: list[dict[str, str]] = []
        self.metrics = 0

    def on_state(self, _lease: Lease, state: SessionState) -> None:
        self.states.append((state.session_id, state.state))

    def on_lost(self, lease: Lease, _reason: str) -> None:
        self.lost.append(lease.session_id)

    def on_gone(self, group_id: str, _reason: str) -> None:
        self.gone.append(group_id)

    def on_metrics(self, _group: str, _report: HostMetrics) -> None:
        self.metrics += 1

    def on_ready(self, _group: str, details: dict[str, str]) -> None:
        self.ready.append(details)


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[tuple[LocalFleet, Heard]]:
    heard = Heard()
    fleet = LocalFleet(
        config,
        on_state=heard.on_state,
        on_lost=heard.on_lost,
        on_gone=heard.on_gone,
        on_metrics=heard.on_metrics,
        on_ready=heard.on_ready,
        host_module=FAKE_HOST,
    )
    fleet.start()
    try:
        yield fleet, heard
    finally:
        await fleet.stop("test over")


async def until(true: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.02)


async def leased(fleet: LocalFleet, session_id: str = "s1", instructions: str = "") -> Lease:
    await until(lambda: fleet.pool.counts()["ready"])
    lease = await fleet.reserve(session_id, 0)
    assert lease is not None
    await fleet.group(lease).open_session(session_id, IMAGE, persona(instructions), 1, 60)
    assert fleet.pool.attach(lease)
    return lease


async def test_a_group_serves_a_session_and_leaves_nothing(tmp_path: Path) -> None:
    async with running(fleet_config(tmp_path)) as (fleet, heard):
        lease = await leased(fleet)
        group = fleet.group(lease)
        assert (tmp_path / lease.group_id / "config.json").is_file()
        assert (await group.offer("s1", "v=0", False)).startswith("v=0")
        await group.interrupt("s1")
        await group.say("s1", "hello")
        with pytest.raises(RequestRefused, match="connected already") as refusal:
            await group.offer("s1", "v=0", False)
        assert refusal.value.status == 409
        assert await group.offer("s1", "v=0", True)
        release = fleet.release(lease, "done")
        assert release is not None and fleet.release(lease, "again") is None
        await release
        assert fleet.pool.counts()["ready"] == 1
        await until(lambda: heard.metrics)
        assert [state for _, state in heard.states] == ["ready", "live", "live", "ended"]
        assert heard.ready == [{"engine": "fake"}]
        pid = group.pid
        with pytest.raises(LeaseLost):
            fleet.group(lease)
    assert list(tmp_path.iterdir()) == [] and not _alive(pid)
    assert heard.lost == [] and heard.gone == []


async def test_two_groups_never_meet(tmp_path: Path) -> None:
    async with running(fleet_config(tmp_path, "fleet.groups=2")) as (fleet, heard):
        await until(lambda: fleet.pool.counts()["ready"] == 2)
        first, second = await leased(fleet, "s1"), await leased(fleet, "s2")
        assert first.group_id != second.group_id
        assert await fleet.reserve("s3", 0) is None
        await fleet.group(first).say("s1", "crash")
        await until(lambda: heard.lost)
        assert heard.lost == ["s1"]
        assert await fleet.group(second).offer("s2", "v=0", False)
        await until(lambda: fleet.pool.counts()["ready"] == 1)


@pytest.mark.parametrize("words", ["crash", "freeze"])
async def test_a_host_that_dies_or_freezes_is_rebuilt(tmp_path: Path, words: str) -> None:
    async with running(fleet_config(tmp_path)) as (fleet, heard):
        lease = await leased(fleet)
        await fleet.group(lease).say("s1", words)
        await until(lambda: heard.lost == ["s1"])
        await until(lambda: fleet.pool.counts()["ready"] == 1)
        assert len(heard.gone) == 1 and len(heard.ready) == 2
        assert len(list(tmp_path.iterdir())) == 1
        assert not fleet.pool.holds(lease)
        await leased(fleet, "s2")


async def test_a_stopped_host_is_killed_and_rebuilt(tmp_path: Path) -> None:
    async with running(fleet_config(tmp_path)) as (fleet, heard):
        lease = await leased(fleet)
        pid = fleet.group(lease).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: heard.lost == ["s1"])
        await until(lambda: fleet.pool.counts()["ready"] == 1)
        assert not _alive(pid)


async def test_a_pending_request_ends_with_its_host(tmp_path: Path) -> None:
    async with running(fleet_config(tmp_path)) as (fleet, _heard):
        lease = await leased(fleet)
        with pytest.raises(GroupGone, match="exited with code 5"):
            await fleet.group(lease).offer("s1", "v=0 crash", False)


async def test_a_host_that_cannot_be_cleaned_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "CLOSE_TIMEOUT_S", 0.3)
    async with running(fleet_config(tmp_path)) as (fleet, heard):
        lease = await leased(fleet, instructions="hang on close")
        old_pid = fleet.group(lease).pid
        fleet.release(lease, "done")
        await until(lambda: heard.gone)
        await until(lambda: fleet.pool.counts()["ready"] == 1)
        assert fleet.group(await leased(fleet, "s2")).pid != old_pid


async def test_a_session_that_the_host_ended_itself_frees_the_group(tmp_path: Path) -> None:
    async with running(fleet_config(tmp_path)) as (fleet, heard):
        lease = await leased(fleet)
        await fleet.group(lease).say("s1", "end")
        await until(lambda: ("s1", "ended") in heard.states)
        fleet.release(lease, "max_duration")
        await until(lambda: fleet.pool.counts()["ready"] == 1)
        assert heard.gone == []


async def test_news_of_a_session_that_the_group_does_not_hold_is_ignored(tmp_path: Path) -> None:
    async with running(fleet_config(tmp_path)) as (fleet, heard):
        lease = await leased(fleet)
        await fleet.group(lease).say("s1", "impostor")
        await fleet.group(lease).interrupt("s1")
        assert {session for session, _ in heard.states} == {"s1"}


async def test_an_unused_reservation_is_taken_back(tmp_path: Path) -> None:
    config = fleet_config(tmp_path, "fleet.reserve_ttl_s=0.1")
    async with running(config) as (fleet, heard):
        await until(lambda: fleet.pool.counts()["ready"])
        assert await fleet.reserve("s1", 0) is not None
        await until(lambda: heard.lost == ["s1"] and fleet.pool.counts()["ready"] == 1)


async def test_who_comes_while_a_group_is_cleaned_waits_for_it(tmp_path: Path) -> None:
    async with running(fleet_config(tmp_path)) as (fleet, _heard):
        lease = await leased(fleet, instructions="slow close")
        async with asyncio.timeout(1):
            assert await fleet.reserve("s2", 5) is None, "a held group is not waited for"
        fleet.release(lease, "done")
        assert await fleet.reserve("s2", 0) is None
        both = await asyncio.gather(fleet.reserve("s2", 1.5), fleet.reserve("s3", 1.5))
        assert sum(lease is not None for lease in both) == 1


async def test_a_host_that_crashes_at_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOST_START", "crash-once")
    monkeypatch.setenv("FAKE_HOST_ONCE", str(tmp_path / "crashed"))
    run_dir = tmp_path / "run"
    async with running(fleet_config(run_dir)) as (fleet, heard):
        await until(lambda: fleet.pool.counts()["ready"])
        assert len(heard.gone) == 1 and len(list(run_dir.iterdir())) == 1


@pytest.mark.parametrize(
    ("start", "reason"),
    [("crash", "exited with code 3"), ("hang", "not ready"), ("failed", "no model on this")],
)
async def test_a_host_that_never_starts_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_HOST_START", start)
    config = fleet_config(tmp_path, "engine.ready_timeout_s=3")
    group = Group(
        "g0",
        config,
        lambda on_message, on_exit: LocalHost(
            "g0", config, tmp_path, on_message, on_exit, host_module=FAKE_HOST
        ),
        on_state=lambda _state: None,
        on_metrics=lambda _metrics: None,
        on_exit=_never,
    )
    with pytest.raises(ChildFailed, match=reason):
        await group.start()
    assert list(tmp_path.iterdir()) == [] and not _alive(group.pid)
    with pytest.raises(GroupGone):
        await group.interrupt("s1")


async def test_stopping_while_groups_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOST_START", "hang")
    async with running(fleet_config(tmp_path)) as (_fleet, _heard):
        await until(lambda: list(tmp_path.glob("*/config.json")))
        await asyncio.sleep(0.3)
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_too_long_for_sockets_is_an_error_that_names_the_setting(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"server\.run_dir is too long"):
        async with running(fleet_config(tmp_path / ("d" * 100))):
            raise AssertionError("started")


async def test_each_group_sees_its_own_gpus(tmp_path: Path) -> None:
    config = fleet_config(tmp_path, "fleet.groups=2", "fleet.gpus=4")
    async with running(config) as (fleet, heard):
        await until(lambda: len(heard.ready) == 2)
        seen = [_environment(fleet.group(await leased(fleet, f"s{n}")).pid) for n in range(2)]
        assert sorted(each["CUDA_VISIBLE_DEVICES"] for each in seen) == ["0,1", "2,3"]


@pytest.mark.parametrize("override", ["engine.tensor_parallel=2", "decoder.shared_by=2"])
async def test_what_is_only_planned_is_not_served(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        async with running(fleet_config(tmp_path, override)):
            raise AssertionError("started")


def _environment(pid: int | None) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


async def _never(reason: str) -> None:
    raise AssertionError(reason)


def _alive(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()
