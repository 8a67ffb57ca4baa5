"""Groups as processes of this machine: folders, GPUs, back-off; what all engines do alike is in
test_fleet_contract.py."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from characters_serve.config import Config, ConfigError
from characters_serve.fleet import pool as pool_module
from characters_serve.fleet.group import Group, GroupGone
from characters_serve.fleet.local import LocalHost
from characters_serve.messages import HostMetrics
from characters_serve.processes import ChildFailed
from tests.fleet_rig import FAKE_HOST, environment_of, fleet_config, is_alive, leased, running
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 0.05)


async def test_a_group_has_a_folder_that_ends_with_it(tmp_path: Path) -> None:
    async with running(fleet_config(tmp_path)) as (fleet, _heard):
        lease = await leased(fleet)
        assert (tmp_path / lease.group_id / "config.json").is_file()
        old_pid = fleet.group(lease).pid
        await fleet.group(lease).say("s1", "crash")
        await until(lambda: fleet.pool.counts()["ready"])
        assert len(list(tmp_path.iterdir())) == 1 and not is_alive(old_pid)
    assert list(tmp_path.iterdir()) == []


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
    group = alone(fleet_config(tmp_path, "engine.ready_timeout_s=3"), tmp_path, on_exit=_never)
    with pytest.raises(ChildFailed, match=reason):
        await group.start()
    assert list(tmp_path.iterdir()) == [] and not is_alive(group.pid)
    with pytest.raises(GroupGone):
        await group.interrupt("s1")


async def test_a_group_that_is_gone_has_nothing_more_to_report(tmp_path: Path) -> None:
    """Its process may still be there for a moment, and its last report on the way."""
    gone: list[str] = []
    reports: list[HostMetrics] = []

    async def on_exit(reason: str) -> None:
        gone.append(reason)

    group = alone(fleet_config(tmp_path), tmp_path, on_exit=on_exit, on_metrics=reports.append)
    await group.start()
    try:
        await until(lambda: reports)
        await group.discard("it cannot be trusted")
        seen = len(reports)
        await asyncio.sleep(0.5)  # the host reports ten times a second
        assert gone == ["it cannot be trusted"] and len(reports) == seen
    finally:
        await group.kill("test over")


async def test_a_group_comes_back_when_the_disk_has_room_again(tmp_path: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, unlimited[1]))
    try:
        async with running(fleet_config(tmp_path)) as (fleet, heard):
            await until(lambda: len(heard.gone) > 1)
            assert "File too large" in next(iter(fleet.pool.reasons().values()))
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            await until(lambda: fleet.pool.counts()["ready"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


async def test_a_group_comes_back_when_processes_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    run_dir = tmp_path / "run"
    async with running(fleet_config(run_dir)) as (fleet, heard):
        await until(lambda: len(heard.gone) > 1)
        reason = next(iter(fleet.pool.reasons().values()))
        assert reason == "host cannot be started: No such file or directory"
        assert list(run_dir.iterdir()) == []
        monkeypatch.setattr(sys, "executable", interpreter)
        await until(lambda: fleet.pool.counts()["ready"])


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


async def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_setting(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(ConfigError, match=rf"server\.run_dir: {folder}: "):
            async with running(fleet_config(folder)):
                raise AssertionError("started")


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        (("fleet.gpus=4",), ["0,1", "2,3"]),
        # Ranks come first, the decoder last: it is the one that both name.
        (("fleet.gpus=3", "decoder.shared_by=2"), ["0,1", "2,1"]),
    ],
)
async def test_each_group_sees_its_own_gpus(
    tmp_path: Path, settings: tuple[str, ...], seen: list[str]
) -> None:
    config = fleet_config(tmp_path, "fleet.groups=2", *settings)
    async with running(config) as (fleet, heard):
        await until(lambda: len(heard.ready) == 2)
        pids = [fleet.group(await leased(fleet, f"s{n}")).pid for n in range(2)]
        assert sorted(environment_of(pid)["CUDA_VISIBLE_DEVICES"] for pid in pids) == seen


async def test_what_is_shared_must_be_dealt_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decoder\.shared_by: fleet\.gpus"):
        async with running(fleet_config(tmp_path, "decoder.shared_by=2")):
            raise AssertionError("started")


def alone(
    config: Config,
    run_dir: Path,
    *,
    on_exit: Callable[[str], Awaitable[None]],
    on_metrics: Callable[[HostMetrics], None] = lambda _report: None,
) -> Group:
    """A group on a fake host, without a fleet."""
    return Group(
        "g0",
        config,
        lambda on_message, left: LocalHost(
            "g0", config, run_dir, on_message, left, host_module=FAKE_HOST
        ),
        on_state=lambda _state: None,
        on_metrics=on_metrics,
        on_exit=on_exit,
    )


async def _never(reason: str) -> None:
    raise AssertionError(reason)
