"""Measures delivery over bad networks, over many connections, and for minutes, on this machine.

    python -m scripts.measurements.delivery --out scripts/measurements/delivery.json

The test picture at 384x256, which fills its bitrate, through a relay to a real browser; then
viewers that come and go; then one viewer whose engine is stopped for 0.4 s every 5 s. Not a test:
it judges nothing, and says how busy other programs kept the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from characters_serve.bench.session import Viewer, origin, summary
from tests.e2e.rig import Server, running_server
from tests.e2e.watching import Figures, watching
from tests.relay import CLEAN, Conditions

NETWORKS: dict[str, Conditions] = {
    "clean": CLEAN,
    "loss 2 %": Conditions(delay_s=0.02, loss=0.02),
    "loss 5 %": Conditions(delay_s=0.02, loss=0.05),
    "loss 10 %": Conditions(delay_s=0.02, loss=0.10),
    "loss 5 % in bursts of 4": Conditions(delay_s=0.02, loss=0.05, burst=4),
    "1 Mbit/s": Conditions(delay_s=0.02, kbps=1000),
    "600 kbit/s": Conditions(delay_s=0.02, kbps=600),
    "100 +- 30 ms": Conditions(delay_s=0.1, jitter_s=0.03),
}
BLACKOUTS_S = (3, 10)
STALL_S, STALL_EVERY_S = 0.4, 5.0
SAMPLE_S = 5.0
SETTLING_S = 60.0


async def one_network(server: Server, conditions: Conditions, seconds: float) -> dict[str, Any]:
    async with watching(server, conditions) as watcher:
        samples = await watcher.watch(seconds)
        return {
            "all": asdict(Figures.of(samples)),
            "second_half": asdict(Figures.of(samples[len(samples) // 2 :])),
            "datagrams_dropped": watcher.relay.down.dropped,
            "datagrams_carried": watcher.relay.down.carried,
            "cores_of_others": round(watcher.others.cores, 2),
        }


async def one_blackout(server: Server, blackout_s: float) -> dict[str, Any]:
    async with watching(server, Conditions(delay_s=0.02)) as watcher:
        await watcher.watch(3)
        watcher.relay.set(Conditions(blackout=True))
        await asyncio.sleep(blackout_s)
        watcher.relay.set(Conditions(delay_s=0.02))
        began_s = time.monotonic()
        back_s = None
        before = -1
        while time.monotonic() - began_s < 12:
            decoded = (await watcher.tab.inbound()).get("video", {}).get("framesDecoded", 0)
            # Another connection counts from 0.
            before = decoded if before < 0 or decoded < before else before
            if decoded - before >= 12:
                back_s = round(time.monotonic() - began_s, 2)
                break
            await asyncio.sleep(0.1)
        after = await watcher.watch(5)
        return {
            "back_after_s": back_s,
            "then": asdict(Figures.of(after)),
            "cores_of_others": round(watcher.others.cores, 2),
        }


async def matrix(server: Server, seconds: float) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, conditions in NETWORKS.items():
        await asyncio.to_thread(server.when_free)
        results[name] = await attempt(one_network(server, conditions, seconds))
        sys.stderr.write(f"{name}: {results[name]}\n")
    for blackout_s in BLACKOUTS_S:
        await asyncio.to_thread(server.when_free)
        name = f"blackout of {blackout_s} s"
        results[name] = await attempt(one_blackout(server, blackout_s))
        sys.stderr.write(f"{name}: {results[name]}\n")
    return results


async def attempt(work: Any) -> dict[str, Any]:
    """One network that lets nothing through must not cost the figures of the others."""
    try:
        return dict(await work)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}


def host_state(server: Server) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    tasks = re.search(r"^characters_host_tasks\{.*\} (\S+)$", text, re.M)
    return {
        "rss_mb": round(server.host.memory_info().rss / 1e6, 2),
        "files": server.host.num_fds(),
        "threads": server.host.num_threads(),
        "tasks": float(tasks[1]) if tasks else -1,
    }


async def cycles(server: Server, count: int) -> dict[str, Any]:
    """The first three are the warm-up of memory and caches."""
    joins_s: list[float] = []
    states: list[dict[str, float]] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        for _ in range(count + 3):
            await asyncio.to_thread(server.when_free)
            viewer = Viewer(http)
            try:
                await viewer.join()
                joins_s.append(viewer.seen.pictures[0].at_s - viewer.seen.offered_s)
                await asyncio.sleep(0.5)
            finally:
                await viewer.leave()
            await asyncio.to_thread(server.when_free)
            await asyncio.sleep(1.2)  # a host reports each second
            states.append(host_state(server))
    joins_s = joins_s[3:]
    return {
        "connections": count,
        "join_s_median": round(statistics.median(joins_s), 3),
        "join_s_worst": round(max(joins_s), 3),
        "host_first": states[3],
        "host_last": states[-1],
        "host_rss_mb": [state["rss_mb"] for state in states],
    }


async def soak(server: Server, seconds: float) -> dict[str, Any]:
    engine = server.child("engine.pattern")
    samples: list[tuple[float, dict[str, float]]] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        viewer = Viewer(http)
        try:
            await viewer.join()
            began_s, used_s = time.monotonic(), server.cpu_s()
            while (elapsed_s := time.monotonic() - began_s) < seconds:
                samples.append((elapsed_s, host_state(server)))
                engine.suspend()
                try:
                    await asyncio.sleep(STALL_S)
                finally:
                    engine.resume()
                await asyncio.sleep(STALL_EVERY_S - STALL_S)
            cores = (server.cpu_s() - used_s) / (time.monotonic() - began_s)
        finally:
            await viewer.leave()
    settled = [(at_s, state["rss_mb"]) for at_s, state in samples if at_s >= SETTLING_S]
    slope = None
    if len(settled) > 2:
        times_s, rss_mb = np.array(settled).T
        slope = float(np.polyfit(times_s, rss_mb, 1)[0]) * 600
    return {
        "seconds": seconds,
        "stalls": len(samples),
        "stall_s": STALL_S,
        "viewer": summary(viewer.seen),
        "server_cores": round(cores, 3),
        "host_first": samples[0][1],
        "host_last": samples[-1][1],
        "host_rss_mb_per_10_min": None if slope is None else round(slope, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures delivery over bad networks.")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each network")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--soak", type=float, default=300.0, help="seconds")
    parser.add_argument("--only", choices=("networks", "cycles", "soak"), action="append")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = options.only or ["networks", "cycles", "soak"]
    command = shlex.join(["python", "-m", "scripts.measurements.delivery", *sys.argv[1:]])
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = ("engine.kind=pattern", "agent.kind=none")
        with running_server(Path(folder) / "r", *settings) as server:
            work = {
                "networks": lambda: matrix(server, options.seconds),
                "cycles": lambda: cycles(server, options.cycles),
                "soak": lambda: soak(server, options.soak),
            }
            for name in wanted:
                result[name] = {"command": command, **origin(), **asyncio.run(work[name]())}
                kept = json.loads(options.out.read_text()) if options.out.exists() else {}
                options.out.write_text(json.dumps({**kept, **result}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
