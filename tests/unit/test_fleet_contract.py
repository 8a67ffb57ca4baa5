"""What every engine of the fleet does alike: groups start, serve, hang, crash, and no slot is lost.

The same tests for processes of this machine and for a Ray cluster of several nodes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from characters_serve.config import Config
from characters_serve.fleet import group as group_module
from characters_serve.fleet import pool as pool_module
from characters_serve.fleet.base import LeaseLost
from characters_serve.fleet.group import GroupGone, RequestRefused
from tests.fleet_rig import fleet_config, is_alive, leased, running
from tests.waiting import until

ROOT = Path(__file__).parents[2]


class Engine:
    def __init__(self, run_dir: Path, *settings: str) -> None:
        self._run_dir = run_dir
        self._settings = settings

    def config(self, *overrides: str) -> Config:
        return fleet_config(self._run_dir, *self._settings, *overrides)


@pytest.fixture(params=["local", "ray"])
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 0.05)
    if request.param == "local":
        return Engine(tmp_path)
    request.getfixturevalue("ray_cluster")
    return Engine(tmp_path, "fleet.engine=ray", "engine.device=cuda")


async def test_a_group_serves_a_session_and_leaves_nothing(engine: Engine) -> None:
    async with running(engine.config()) as (fleet, heard):
        lease = await leased(fleet)
        group = fleet.group(lease)
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
        assert heard.ready[0]["engine"] == "fake"
        pid = group.pid
        with pytest.raises(LeaseLost):
            fleet.group(lease)
    assert not is_alive(pid)
    assert heard.lost == [] and heard.gone == []


async def test_two_groups_never_meet(engine: Engine) -> None:
    async with running(engine.config("fleet.groups=2")) as (fleet, heard):
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
async def test_a_host_that_dies_or_freezes_is_rebuilt(engine: Engine, words: str) -> None:
    async with running(engine.config()) as (fleet, heard):
        lease = await leased(fleet)
        await fleet.group(lease).say("s1", words)
        await until(lambda: heard.lost == ["s1"])
        await until(lambda: fleet.pool.counts()["ready"] == 1)
        assert len(heard.gone) == 1 and len(heard.ready) == 2
        assert not fleet.pool.holds(lease)
        await leased(fleet, "s2")


async def test_a_stopped_host_is_killed_and_rebuilt(engine: Engine) -> None:
    async with running(engine.config()) as (fleet, heard):
        lease = await leased(fleet)
        pid = fleet.group(lease).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: heard.lost == ["s1"])
        await until(lambda: fleet.pool.counts()["ready"] == 1)
        assert not is_alive(pid)


async def test_a_wrong_configuration_is_told_and_not_tried_again(engine: Engine) -> None:
    config = engine.config("fleet.groups=2", "model.weights=/nowhere")
    async with running(config) as (fleet, heard):
        await until(lambda: len(heard.mistakes) == 2)
        assert all("model.weights: there is no /nowhere" in said for said in heard.mistakes)
        await asyncio.sleep(5 * pool_module.FIRST_BACKOFF_S)
        assert len(heard.gone) == 2 and fleet.pool.counts()["unhealthy"] == 2


async def test_weights_that_have_served_may_come_back(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weights = tmp_path_factory.mktemp("weights")
    async with running(engine.config(f"model.weights={weights}")) as (fleet, heard):
        lease = await leased(fleet)
        weights.rmdir()
        await fleet.group(lease).say("s1", "crash")
        await until(lambda: len(heard.gone) > 1)
        weights.mkdir()
        await until(lambda: fleet.pool.counts()["ready"])
        assert heard.mistakes == []


async def test_a_pending_request_ends_with_its_host(engine: Engine) -> None:
    async with running(engine.config()) as (fleet, _heard):
        lease = await leased(fleet)
        with pytest.raises(GroupGone, match="exited with code 5"):
            await fleet.group(lease).offer("s1", "v=0 crash", False)


async def test_a_host_that_cannot_be_cleaned_is_replaced(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "CLOSE_TIMEOUT_S", 0.3)
    async with running(engine.config()) as (fleet, heard):
        lease = await leased(fleet, instructions="hang on close")
        old_pid = fleet.group(lease).pid
        fleet.release(lease, "done")
        await until(lambda: heard.gone)
        await until(lambda: fleet.pool.counts()["ready"] == 1)
        assert fleet.group(await leased(fleet, "s2")).pid != old_pid


async def test_a_session_that_the_host_ended_itself_frees_the_group(engine: Engine) -> None:
    async with running(engine.config()) as (fleet, heard):
        lease = await leased(fleet)
        await fleet.group(lease).say("s1", "end")
        await until(lambda: ("s1", "ended") in heard.states)
        fleet.release(lease, "max_duration")
        await until(lambda: fleet.pool.counts()["ready"] == 1)
        assert heard.gone == []


async def test_news_of_a_session_that_the_group_does_not_hold_is_ignored(engine: Engine) -> None:
    async with running(engine.config()) as (fleet, heard):
        lease = await leased(fleet)
        await fleet.group(lease).say("s1", "impostor")
        await fleet.group(lease).interrupt("s1")
        assert {session for session, _ in heard.states} == {"s1"}


async def test_an_unused_reservation_is_taken_back(engine: Engine) -> None:
    config = engine.config("fleet.reserve_ttl_s=0.1")
    async with running(config) as (fleet, heard):
        await until(lambda: fleet.pool.counts()["ready"])
        assert await fleet.reserve("s1", 0) is not None
        await until(lambda: heard.lost == ["s1"] and fleet.pool.counts()["ready"] == 1)


async def test_who_comes_while_a_group_is_cleaned_waits_for_it(engine: Engine) -> None:
    async with running(engine.config()) as (fleet, _heard):
        lease = await leased(fleet, instructions="slow close")
        async with asyncio.timeout(1):
            assert await fleet.reserve("s2", 5) is None, "a held group is not waited for"
        fleet.release(lease, "done")
        assert await fleet.reserve("s2", 0) is None
        both = await asyncio.gather(fleet.reserve("s2", 1.5), fleet.reserve("s3", 1.5))
        assert sum(lease is not None for lease in both) == 1


async def test_a_host_that_never_starts_says_why(engine: Engine) -> None:
    async with running(engine.config(), host_module="tests.no_such_host") as (fleet, heard):
        await until(lambda: heard.gone)
        await until(lambda: fleet.pool.reasons())
        assert "exited with code 1" in next(iter(fleet.pool.reasons().values()))
    assert heard.ready == []


async def test_stopping_at_once_leaves_nothing(engine: Engine) -> None:
    async with running(engine.config("fleet.groups=2")):
        await asyncio.sleep(0.3)
