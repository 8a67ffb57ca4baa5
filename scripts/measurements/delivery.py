"""Measures delivery over bad networks, over many connections, and for minutes, on this machine.

    python -m scripts.measurements.delivery --out scripts/measurements/delivery.json

Twenty minutes without the soak: the test picture at 384x256, which fills its bitrate, through a
relay to a real browser, sent by aiortc alone and by this server, and at 1088x704 over narrow links;
the processor time of one host at that size; a hundred viewers that come and go. `--network NAME`
keeps to some networks, for example `--only networks --network "1 Mbit/s" --network "loss 5 %"`. And
by itself, `--only soak --minutes 30`: two browsers that watch engines which stall and lag. Not a
test: it judges nothing, and says how busy other programs kept the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from playwright.async_api import ViewportSize

from characters_serve.bench.session import Viewer, circumstances, summary
from tests.e2e.rig import Others, Server, browser, new_tab, running_server
from tests.e2e.watching import Figures, Sample, watching
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
NARROW = ("1 Mbit/s", "600 kbit/s")
STOCK_DIFFERS = ("clean", "loss 10 %", "1 Mbit/s", "600 kbit/s")
BLACKOUTS_S = (3, 10, 40)
STALL_EVERY_S = 5.0
FIRST_S = 10.0
SAMPLE_S = 10.0
SETTLING_S = 60.0
QUIET = ("engine.kind=pattern", "agent.kind=none")
LARGE = ("model.width=1088", "model.height=704")
STOCK = "scripts.measurements.stock_server"
SMALL_WINDOW: ViewportSize = {"width": 480, "height": 320}  # a large one costs half a core
ENDLESS = ("session.max_duration_s=100000", "session.idle_timeout_s=100000")


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
    """How soon the pictures are back; or, beyond the grace period, how soon the page gives up."""
    async with watching(server, Conditions(delay_s=0.02)) as watcher:
        await watcher.watch(3)
        watcher.relay.set(Conditions(blackout=True))
        dark_s = time.monotonic()
        while (waited_s := time.monotonic() - dark_s) < blackout_s:
            if await watcher.tab.page.get_attribute("body", "data-phase") == "idle":
                told = await watcher.tab.page.get_by_test_id("error").inner_text()
                freed_s = await asyncio.to_thread(server.seconds_until_free, 30)
                return {
                    "given_up_after_s": round(waited_s, 1),
                    "told": told,
                    "seat_free_after_s": round(waited_s + freed_s, 1),
                }
            await asyncio.sleep(0.1)
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


async def networks(seconds: float, folder: Path, wanted: list[str]) -> dict[str, Any]:
    """With aiortc's own senders, for the networks where they differ, and with ours for all."""
    chosen = {name: NETWORKS[name] for name in NETWORKS if not wanted or name in wanted}
    differing = {name: chosen[name] for name in STOCK_DIFFERS if name in chosen}
    narrow = {name: chosen[name] for name in NARROW if name in chosen}
    with running_server(folder / "a", *QUIET, module=STOCK) as server:
        results: dict[str, Any] = {"stock aiortc": await each(server, differing, seconds)}
    with running_server(folder / "n", *QUIET) as server:
        results |= await each(server, chosen, seconds)
        for blackout_s in BLACKOUTS_S if not wanted else ():
            await asyncio.to_thread(server.when_free)
            name = f"blackout of {blackout_s} s"
            results[name] = await attempt(one_blackout(server, blackout_s))
            sys.stderr.write(f"{name}: {results[name]}\n")
    if narrow:
        with running_server(folder / "b", *QUIET, *LARGE, module=STOCK) as server:
            results["1088x704, stock aiortc"] = await each(server, narrow, seconds)
        with running_server(folder / "l", *QUIET, *LARGE) as server:
            results["1088x704"] = await each(server, narrow, seconds)
    return results


async def each(server: Server, chosen: dict[str, Conditions], seconds: float) -> dict[str, Any]:
    return {name: await named(server, name, chosen[name], seconds) for name in chosen}


async def named(
    server: Server, name: str, conditions: Conditions, seconds: float
) -> dict[str, Any]:
    await asyncio.to_thread(server.when_free)
    result = await attempt(one_network(server, conditions, seconds))
    sys.stderr.write(f"{name}: {result}\n")
    return result


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


async def cores(seconds: float, folder: Path) -> dict[str, Any]:
    """What one host takes of the processor at the production picture's size."""
    results: dict[str, Any] = {}
    for codec in ("vp8", "h264"):
        settings = (*QUIET, *LARGE, f"delivery.video_codec={codec}")
        with running_server(folder / codec, *settings) as server:
            results[codec] = await one_size(server, seconds)
    return results


async def one_size(server: Server, seconds: float) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        viewer = Viewer(http)
        try:
            await viewer.join()
            await asyncio.sleep(3)
            before, began_s, others = thread_times_s(server), time.monotonic(), Others()
            await asyncio.sleep(seconds)
            after, elapsed_s = thread_times_s(server), time.monotonic() - began_s
            cores_of_others = others.cores
        finally:
            await viewer.leave()
    used = {thread: (after[thread] - before.get(thread, 0.0)) / elapsed_s for thread in after}
    loop = used.pop(server.host.pid)
    return {
        "viewer": summary(viewer.seen),
        "cores_of_the_loop": round(loop, 3),  # sockets, encryption, pacing
        "cores_of_its_encoder": round(sum(used.values()), 3),
        "cores_of_others": round(cores_of_others, 2),
    }


def thread_times_s(server: Server) -> dict[int, float]:
    return {each.id: each.user_time + each.system_time for each in server.host.threads()}


async def cycles(count: int, folder: Path) -> dict[str, Any]:
    with running_server(folder / "c", *QUIET) as server:
        return await come_and_go(server, count)


async def come_and_go(server: Server, count: int) -> dict[str, Any]:
    """The first ten are the warm-up of memory and caches; then the host is looked at every ten."""
    joins_s: list[float] = []
    states: list[dict[str, float]] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        for number in range(1, count + 11):
            await asyncio.to_thread(server.when_free)
            viewer = Viewer(http)
            try:
                await viewer.join()
                joins_s.append(viewer.seen.pictures[0].at_s - viewer.seen.offered_s)
                await asyncio.sleep(0.5)
            finally:
                await viewer.leave()
            if number % 10 == 0:
                await asyncio.to_thread(server.when_free)
                await asyncio.sleep(1.2)  # a host reports each second
                states.append(host_state(server))
    joins_s = joins_s[10:]
    return {
        "connections": count,
        "join_s_median": round(statistics.median(joins_s), 3),
        "join_s_p95": round(float(np.quantile(joins_s, 0.95)), 3),
        "host_first": states[0],
        "host_last": states[-1],
        "host_rss_mb": [state["rss_mb"] for state in states],
    }


@dataclass(frozen=True)
class SoakKind:
    """stall_s: how long the engine is stopped, every STALL_EVERY_S."""

    settings: tuple[str, ...] = ()
    stall_s: float = 0.0


SOAKS = {
    "a stall of 0.4 s every 5 s": SoakKind(stall_s=0.4),
    "23.5 fps, a step of 263 ms every 42": SoakKind(
        ("engine.pattern.step_ms=168", "engine.pattern.long_step_ms=263")
    ),
}


async def stalls(server: Server, kind: SoakKind) -> None:
    engine = server.child("engine.pattern")
    while True:
        await asyncio.sleep(STALL_EVERY_S - kind.stall_s)
        engine.suspend()
        try:
            await asyncio.sleep(kind.stall_s)
        finally:
            engine.resume()


async def soak(server: Server, name: str, kind: SoakKind, seconds: float) -> dict[str, Any]:
    """A real browser that only watches; its counters each second, the host's each ten."""
    browsers: list[Sample] = []
    hosts: list[tuple[float, dict[str, float]]] = []
    async with browser() as launched:
        tab = await new_tab(launched, server, size=SMALL_WINDOW)
        await tab.talk()
        stalling = asyncio.create_task(stalls(server, kind)) if kind.stall_s else None
        others, began_s, used_s = Others(), time.monotonic(), server.cpu_s()
        try:
            while (elapsed_s := time.monotonic() - began_s) < seconds:
                inbound = await tab.inbound()
                if "video" in inbound and "audio" in inbound:
                    browsers.append(Sample.of(inbound))
                if not hosts or elapsed_s - hosts[-1][0] >= SAMPLE_S:
                    hosts.append((elapsed_s, await asyncio.to_thread(host_state, server)))
                if len(browsers) % 60 == 0:
                    sys.stderr.write(f"{name}: {round(elapsed_s)} s, {hosts[-1][1]}\n")
                await asyncio.sleep(1)
            cores = (server.cpu_s() - used_s) / (time.monotonic() - began_s)
            cores_of_others = others.cores
        finally:
            if stalling is not None:
                stalling.cancel()
                await asyncio.gather(stalling, return_exceptions=True)
        await tab.page.get_by_test_id("stop").click()
        await tab.reach("idle")
    return {
        "seconds": seconds,
        **watched(browsers),
        **kept(hosts),
        "server_cores": round(cores, 3),
        "cores_of_others": round(cores_of_others, 2),
    }


def watched(samples: list[Sample]) -> dict[str, Any]:
    """av_ms: the voice's playout time minus the picture's, as the browser estimates it."""
    began_s = samples[0].at_s
    offsets = [(s.at_s - began_s, s.av_ms) for s in samples if s.av_ms is not None]
    first = [av_ms for at_s, av_ms in offsets if at_s < FIRST_S]
    rest = [av_ms for at_s, av_ms in offsets if at_s >= FIRST_S]
    minutes = [
        [av_ms for at_s, av_ms in offsets if minute <= at_s / 60 < minute + 1]
        for minute in range(1, int(offsets[-1][0] // 60))
    ]
    medians = [round(statistics.median(minute), 1) for minute in minutes if minute]
    slope = np.polyfit(np.arange(len(medians)), medians, 1)[0] if len(medians) > 2 else None
    return {
        "browser": asdict(Figures.of(samples)),
        "concealed_samples": samples[-1].concealed - samples[0].concealed,
        "av_ms_first_10_s": [round(av_ms) for av_ms in first],
        "av_ms_median": round(statistics.median(rest), 1),
        "av_ms_p95": round(float(np.quantile(np.abs(rest), 0.95)), 1),
        "av_ms_each_minute": medians,
        "av_slope_ms_per_min": None if slope is None else round(float(slope), 3),
    }


def kept(samples: list[tuple[float, dict[str, float]]]) -> dict[str, Any]:
    """What the host holds, once settled."""
    settled = [(at_s, state) for at_s, state in samples if at_s >= SETTLING_S]
    slope = None
    if len(settled) > 2:
        times_s, rss_mb = np.array([(at_s, state["rss_mb"]) for at_s, state in settled]).T
        slope = round(float(np.polyfit(times_s, rss_mb, 1)[0]) * 600, 2)
    return {
        "host_rss_mb_per_10_min": slope,
        "host_rss_mb": [state["rss_mb"] for _, state in samples[::6]],
        **{
            f"host_{name}": [min(values), max(values)]
            for name in ("files", "threads", "tasks")
            if (values := [state[name] for _, state in settled])
        },
    }


async def soaks(seconds: float, folder: Path) -> dict[str, Any]:
    """All kinds at once, each with a server and a browser of its own."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                running_server(folder / f"s{number}", *QUIET, *ENDLESS, *kind.settings)
            )
            for number, kind in enumerate(SOAKS.values())
        ]
        works = [
            attempt(soak(server, name, kind, seconds))
            for server, (name, kind) in zip(servers, SOAKS.items(), strict=True)
        ]
        return dict(zip(SOAKS, await asyncio.gather(*works), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures delivery over bad networks.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each network")
    parser.add_argument("--network", choices=NETWORKS, action="append", default=[])
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the soak")
    parser.add_argument("--only", choices=("networks", "cores", "cycles", "soak"), action="append")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = options.only or ["networks", "cores", "cycles"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]] = {
            "networks": lambda: networks(options.seconds, folder, options.network),
            "cores": lambda: cores(options.seconds, folder),
            "cycles": lambda: cycles(options.cycles, folder),
            "soak": lambda: soaks(60 * options.minutes, folder),
        }
        for part in wanted:
            result = {**circumstances(), **asyncio.run(parts[part]())}
            before = json.loads(options.out.read_text()) if options.out.exists() else {}
            options.out.write_text(json.dumps({**before, part: result}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
