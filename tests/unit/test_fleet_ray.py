"""Groups on a Ray cluster: a lost node, actor or gateway costs one session and no slot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from characters_serve.config import Config, load_config
from characters_serve.fleet import pool as pool_module
from characters_serve.fleet.group import HOST_MODULE
from characters_serve.fleet.layout import GroupShape
from characters_serve.processes import ChildFailed
from tests.fleet_rig import FAKE_HOST, environment_of, fleet_config, is_alive, leased, running
from tests.waiting import until

ray = pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 0.05)


def ray_config(tmp_path: Path, *overrides: str) -> Config:
    return fleet_config(tmp_path, "fleet.engine=ray", "engine.device=cuda", *overrides)


def placements() -> list[dict[str, Any]]:
    from ray.util import placement_group_table

    return [each for each in placement_group_table().values() if each["state"] == "CREATED"]


async def test_each_group_has_gpus_of_its_own_on_one_node(ray_cluster: Any, tmp_path: Path) -> None:
    """Four GPUs on one node and two on the other hold three groups of two."""
    async with running(ray_config(tmp_path, "fleet.groups=3")) as (fleet, _heard):
        await until(lambda: fleet.pool.counts()["ready"] == 3)
        assert [each["strategy"] for each in placements()] == ["STRICT_PACK"] * 3
        nodes = [set(each["bundles_to_node_id"].values()) for each in placements()]
        assert all(len(each) == 1 for each in nodes) and len(set.union(*nodes)) == 2
        pids = [fleet.group(await leased(fleet, f"s{n}")).pid for n in range(3)]
        seen = [environment_of(pid)["CUDA_VISIBLE_DEVICES"] for pid in pids]
        assert sorted(seen) == ["0,1", "0,1", "2,3"]
    await until(lambda: placements() == [])


async def test_a_lost_node_ends_its_session_and_the_group_moves(
    ray_cluster: Any, tmp_path: Path
) -> None:
    async with running(ray_config(tmp_path)) as (fleet, heard):
        lease = await leased(fleet)
        pid = fleet.group(lease).pid
        (home,) = placements()[0]["bundles_to_node_id"].values()
        lost = next(node for node in ray_cluster.worker_nodes if node.node_id == home)
        gpus = int(next(n for n in ray.nodes() if n["NodeID"] == home)["Resources"]["GPU"])
        try:
            ray_cluster.remove_node(lost, allow_graceful=False)
            await until(lambda: heard.lost == ["s1"])
            await until(lambda: not is_alive(pid))
            again = await leased(fleet, "s2")
            assert not fleet.pool.holds(lease)
            (new_home,) = placements()[0]["bundles_to_node_id"].values()
            assert new_home != home
            assert (await fleet.group(again).offer("s2", "v=0", False)).startswith("v=0")
        finally:
            ray_cluster.add_node(num_cpus=4, num_gpus=gpus, include_dashboard=False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_actor_that_dies_or_stops_takes_its_host_with_it(
    ray_cluster: Any, tmp_path: Path, number: signal.Signals
) -> None:
    async with running(ray_config(tmp_path)) as (fleet, heard):
        pid = fleet.group(await leased(fleet)).pid
        assert pid is not None
        os.kill(psutil.Process(pid).ppid(), number)
        await until(lambda: heard.lost == ["s1"])
        await until(lambda: not is_alive(pid))
        await until(lambda: fleet.pool.counts()["ready"] == 1)


async def test_a_group_that_no_node_can_hold_says_why(ray_cluster: Any, tmp_path: Path) -> None:
    from characters_serve.fleet.ray import RayHost, why_no_room

    config = ray_config(tmp_path, "engine.tensor_parallel=4", "model.num_heads=4")
    host = RayHost("g0", config, FAKE_HOST, _ignore, _ignore)
    with pytest.raises(ChildFailed, match=r"needs 5 GPUs .* the most that any host joins is 4"):
        await host.start(1.0)
    assert "all such nodes are taken" in why_no_room(GroupShape(1), 2)
    assert why_no_room(GroupShape(1), 0) == "no node has a free processor"


def test_each_node_has_a_public_address_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from characters_serve.fleet.ray import PUBLIC_ADDRESS_ENV, on_this_node

    config = ray_config(tmp_path)
    monkeypatch.delenv(PUBLIC_ADDRESS_ENV, raising=False)
    assert on_this_node(config) == config
    monkeypatch.setenv(PUBLIC_ADDRESS_ENV, "203.0.113.9")
    assert on_this_node(config).delivery.public_address == "203.0.113.9"
    monkeypatch.setenv(PUBLIC_ADDRESS_ENV, "node.example")
    with pytest.raises(ValueError, match="public_address"):
        on_this_node(config)


async def test_a_gateway_that_dies_leaves_no_host(ray_cluster: Any, tmp_path: Path) -> None:
    config = ray_config(tmp_path, f"fleet.ray_address={ray_cluster.address}")
    code = (
        "import asyncio, sys\n"
        "from characters_serve.config import Config\n"
        "from tests.fleet_rig import leased, running\n"
        "async def main():\n"
        "    async with running(Config.model_validate_json(sys.argv[1])) as (fleet, heard):\n"
        "        print(fleet.group(await leased(fleet)).pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, config.model_dump_json()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    ) as gateway:
        assert gateway.stdout is not None
        pid = int(gateway.stdout.readline())
        assert is_alive(pid)
        gateway.kill()
    await until(lambda: not is_alive(pid))
    await until(lambda: placements() == [])


async def test_a_real_host_answers_an_offer_from_its_node(ray_cluster: Any, tmp_path: Path) -> None:
    """SDP goes through Ray once; picture and sound come straight from the host."""
    from tests.unit.session_rig import Browser

    config = load_config(
        overrides=[
            *("fleet.engine=ray", "engine.kind=pattern", "agent.kind=none"),
            *("model.width=96", "model.height=64"),
        ]
    )
    async with running(config, host_module=HOST_MODULE) as (fleet, heard):
        lease = await leased(fleet)
        browser = Browser(microphone=False)
        await browser.accept(await fleet.group(lease).offer("s1", await browser.offer(), False))
        await until(lambda: len(browser.pictures) > 24 and len(browser.sounds) > 50)
        await until(lambda: ("s1", "live") in heard.states)
        await browser.close()
        release = fleet.release(lease, "done")
        assert release is not None
        await release
        assert fleet.pool.counts()["ready"] == 1


async def _ignore(_told: object) -> None:
    pass
