"""Measures the fleet on this machine: decisions, reservations, many sessions, faults.

    python -m scripts.measurements.fleet --out scripts/measurements/fleet.json
    python -m scripts.measurements.fleet --only soak --seconds 1800 --out ...
    python -m scripts.measurements.fleet --only cold_start --set engine.kind=diffusion --out ...

`pool`, `simulated` and `reservation` take a minute. `concurrent` raises the number of real sessions
of the test picture until one no longer gets its rate, `cold_start` lets a group start beside one
that plays, and `soak` kills and stops processes under visitors for as long as it is told: these
want a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

from characters_serve.bench.session import Viewer, circumstances, summary
from characters_serve.fleet.layout import GroupShape, uniform_host
from characters_serve.fleet.pool import Pool
from characters_serve.fleet.simulate import Timing, Visit, generate_trace, simulate
from tests.e2e.rig import Server, running_server

PATTERN = ("engine.kind=pattern", "agent.kind=none", "server.sessions_per_minute=100000")
RATE_FPS = 23.5
SOAK_GROUPS = 3
FAULT_EVERY_S = 5.0
BACK_WITHIN_S = 90.0
SAMPLE_EVERY_S = 5.0
# What the gateway may hold more of in a soak's last quarter than in its second: visitors come and
# go, and sessions are remembered for five minutes.
MAY_GROW = {"rss_mib": 8.0, "descriptors": 4.0, "threads": 1.0, "tasks": 8.0}
# A session's first pictures come in a burst, and its figures after a second.
SETTLE_S = 3.0


def percentiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    named = {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}
    return {name: round(value, digits) for name, value in named.items()}


def pool_decisions() -> dict[str, Any]:
    """A decision is one of reserve, attach, release and reset_done. In processor time."""
    rates: dict[str, int] = {}
    for groups in (1, 100, 10_000):
        pool = Pool(30.0)
        for index in range(groups):
            pool.add(f"g{index}", 0.0)
            pool.started(f"g{index}")
        cycles = 50_000
        began_s = time.process_time()
        for number in range(cycles):
            lease = pool.reserve(f"s{number}", float(number))
            assert lease is not None
            pool.attach(lease)
            pool.release(lease)
            pool.reset_done(lease)
        rates[str(groups)] = round(4 * cycles / (time.process_time() - began_s))
    return {"decisions_per_s_by_groups": rates}


def simulated() -> dict[str, Any]:
    """200 sessions at once on 200 groups, as one more comes; then a large fleet's day."""
    shape = GroupShape(1, decoder=False)
    hosts = [uniform_host(f"h{n}", 8, 8) for n in range(25)]
    visits = [Visit(0.01 * n, 600.0) for n in range(201)]
    full, _ = simulate(visits, hosts, shape, Timing())
    assert (full.most_live, full.refused) == (200, 1)
    trace = generate_trace(100_000, 24.0, 180.0, 0.8, 900.0, seed=1)
    large = [uniform_host(f"h{n}", 8, 8) for n in range(2000)]
    began_s = time.process_time()
    day, _ = simulate(trace, large, GroupShape(3), Timing(queue_size=50), 2.5)
    took_s = time.process_time() - began_s
    tight, _ = simulate(trace, large[:225], GroupShape(3), Timing(queue_size=50), 2.5)
    return {
        "full": full.as_dict(),
        "day_on_2000_hosts": {**day.as_dict(), "simulated_in_processor_s": round(took_s, 2)},
        "day_on_225_hosts": tight.as_dict(),
    }


async def reservations(server: Server, count: int) -> dict[str, Any]:
    """From the request to its answer, and to a character that is ready; one after another."""
    answered_ms: list[float] = []
    ready_ms: list[float] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        for _ in range(count):
            began_s = time.perf_counter()
            created = await http.post("/v1/sessions", json={"character": "mira"})
            answered_ms.append((time.perf_counter() - began_s) * 1000)
            session = created.raise_for_status().json()
            path = f"/v1/sessions/{session['id']}"
            headers = {"Authorization": f"Bearer {session['client_secret']['value']}"}
            while (await http.get(path, headers=headers)).json()["status"] != "ready":
                await asyncio.sleep(0.002)
            ready_ms.append((time.perf_counter() - began_s) * 1000)
            await http.delete(path, headers=headers)
            await asyncio.to_thread(server.when_free)
    return {
        "sessions": count,
        "answered_ms": percentiles(answered_ms, 1),
        "ready_ms": percentiles(ready_ms, 1),
    }


async def watch_together(server: Server, viewers: int, seconds: float) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        watching = [Viewer(http) for _ in range(viewers)]
        try:
            await asyncio.gather(*(viewer.join() for viewer in watching))
            await asyncio.sleep(seconds)
        finally:
            await asyncio.gather(*(viewer.leave() for viewer in watching))
    return [summary(viewer.seen) for viewer in watching]


def concurrent(seconds: float) -> dict[str, Any]:
    """The viewers decode on the same cores: what a server alone carries is more."""
    tried: list[dict[str, Any]] = []
    for sessions in range(1, 17):
        with serving(sessions) as server:
            used_s, began_s = server.cpu_s(), time.monotonic()
            seen = asyncio.run(watch_together(server, sessions, seconds))
            cores = (server.cpu_s() - used_s) / (time.monotonic() - began_s)
        slowest = min(each["fps"] for each in seen)
        tried.append(
            {"sessions": sessions, "slowest_fps": slowest, "server_cores": round(cores, 2)}
        )
        sys.stderr.write(f"{tried[-1]}\n")
        if slowest < RATE_FPS:
            break
    kept = [each["sessions"] for each in tried if each["slowest_fps"] >= RATE_FPS]
    return {"at_rate": max(kept, default=0), "seconds": seconds, "tried": tried}


async def cold_starts(server: Server, count: int) -> dict[str, Any]:
    """One group plays while the other is killed and starts anew; and as long while nothing does."""
    spans: dict[str, list[tuple[float, float]]] = {"quiet": [], "cold": []}
    health_ms: list[float] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

        async def free_groups(wanted: int) -> None:
            while True:
                asked_s = time.monotonic()
                free = (await http.get("/healthz/ready")).json()["free"]
                health_ms.append((time.monotonic() - asked_s) * 1000)
                if free == wanted:
                    return
                await asyncio.sleep(0.02)

        viewer = Viewer(http)
        try:
            await viewer.join()
            await asyncio.sleep(SETTLE_S)
            await free_groups(1)
            playing = await playing_group(http)
            health_ms.clear()
            for _ in range(count):
                cold = next(h for h in server.gateway.children() if playing not in command_of(h))
                cold.kill()
                began_s = time.monotonic()
                await free_groups(0)
                await free_groups(1)
                ready_s = time.monotonic()
                spans["cold"].append((began_s, ready_s))
                await asyncio.sleep(ready_s - began_s)
                spans["quiet"].append((ready_s, time.monotonic()))
            assert await playing_group(http) == playing
        finally:
            await viewer.leave()
    shown_s = [picture.at_s for picture in viewer.seen.pictures]
    return {
        "starts": count,
        "start_s": percentiles([end - begin for begin, end in spans["cold"]], 1),
        "frame_interval_ms": {
            name: percentiles(
                [
                    (after - before) * 1000
                    for before, after in pairwise(shown_s)
                    if any(begin <= before and after <= end for begin, end in times)
                ],
                1,
            )
            for name, times in spans.items()
        },
        "healthz_ms": percentiles(health_ms, 1),
    }


def command_of(process: psutil.Process) -> str:
    return shlex.join(process.cmdline())


async def playing_group(http: httpx.AsyncClient) -> str:
    """The group whose session sends pictures."""
    (group,) = re.findall(
        r'^characters_video_fps\{group="(.+)"\}', (await http.get("/metrics")).text, re.M
    )
    return str(group)


class Soak:
    """Visitors and faults that know nothing of each other; the groups are counted all along."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.chance = random.Random(seed)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.miscounts = 0
        self.held: dict[str, list[float]] = {name: [] for name in ("at_s", *MAY_GROW)}

    async def run(self, seconds: float) -> dict[str, Any]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=30, limits=limits
        ) as self.http:
            until_s = time.monotonic() + seconds
            acts = [self._visit] * (2 * SOAK_GROUPS) + [self._fault, self._count, self._sample]
            await asyncio.gather(*(self._repeat(act, until_s) for act in acts))
            began_s = time.monotonic()
            free = 0
            while free < SOAK_GROUPS and time.monotonic() - began_s < BACK_WITHIN_S:
                await asyncio.sleep(0.2)
                free = (await self.http.get("/healthz/ready")).json()["free"]
        return {
            "seconds": seconds,
            "groups": SOAK_GROUPS,
            "visits": dict(self.outcomes),
            "faults": dict(self.faults),
            "times_miscounted": self.miscounts,
            "lost_slots": SOAK_GROUPS - free,
            "all_free_after_s": round(time.monotonic() - began_s, 1),
            "gateway": {name: course(self.held["at_s"], self.held[name]) for name in MAY_GROW},
        }

    async def _repeat(self, act: Callable[[], Any], until_s: float) -> None:
        while time.monotonic() < until_s:
            await act()

    async def _visit(self) -> None:
        """Some watch, some leave early, some vanish, some send nonsense."""
        await asyncio.sleep(self.chance.expovariate(1.0))
        try:
            kind = self.chance.choice(("watch", "leave", "nonsense", "vanish"))
            if kind == "watch":
                await self._watch()
            else:
                await self._glance(kind)
            self.outcomes[kind] += 1
        except (httpx.HTTPError, TimeoutError, ConnectionError, RuntimeError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            self.outcomes[f"{type(error).__name__} {status or ''}".strip()] += 1
            await asyncio.sleep(1)

    async def _watch(self) -> None:
        viewer = Viewer(self.http)
        try:
            async with asyncio.timeout(40):
                await viewer.join()
                await asyncio.sleep(self.chance.uniform(0, 5))
        finally:
            await viewer.leave()

    async def _glance(self, kind: str) -> None:
        created = await self.http.post("/v1/sessions", json={"character": "mira"})
        session = created.raise_for_status().json()
        path = f"/v1/sessions/{session['id']}"
        headers = {"Authorization": f"Bearer {session['client_secret']['value']}"}
        if kind == "nonsense":
            await self.http.post(
                f"{path}/webrtc",
                content="v=0\r\nnonsense",
                headers={**headers, "Content-Type": "application/sdp"},
            )
        if kind != "vanish":
            await asyncio.sleep(self.chance.uniform(0, 2))
            await self.http.delete(path, headers=headers)

    async def _fault(self) -> None:
        await asyncio.sleep(self.chance.expovariate(1 / FAULT_EVERY_S))
        children = self.server.gateway.children(recursive=True)
        if not children:
            return
        victim = self.chance.choice(children)
        fault = self.chance.choice(("kill", "stop", "pause"))
        try:
            if fault == "kill":
                victim.kill()
            else:
                victim.suspend()
                if fault == "pause":
                    await asyncio.sleep(self.chance.uniform(0.1, 1.0))
                    victim.resume()
        except psutil.NoSuchProcess:
            return
        self.faults[fault] += 1

    async def _count(self) -> None:
        await asyncio.sleep(1)
        groups = (await self.http.get("/healthz/ready")).json()["groups"]
        self.miscounts += sum(groups.values()) != SOAK_GROUPS

    async def _sample(self) -> None:
        await asyncio.sleep(SAMPLE_EVERY_S)
        text = (await self.http.get("/metrics")).text
        (tasks,) = re.findall(r"^characters_gateway_tasks (\S+)", text, re.M)
        gateway = self.server.gateway
        now = {
            "at_s": time.monotonic(),
            "rss_mib": gateway.memory_info().rss / 2**20,
            "descriptors": gateway.num_fds(),
            "threads": gateway.num_threads(),
            "tasks": float(tasks),
        }
        for name, value in now.items():
            self.held[name].append(value)


def course(at_s: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """The medians of the second and of the last quarter, and the second half's slope an hour."""
    quarter = len(values) // 4
    hours = [second / 3600 for second in at_s[2 * quarter :]]
    return {
        "second_quarter": round(statistics.median(values[quarter : 2 * quarter]), 2),
        "last_quarter": round(statistics.median(values[-quarter:]), 2),
        "slope_per_hour": round(
            statistics.linear_regression(hours, values[2 * quarter :]).slope, 2
        ),
    }


@contextmanager
def serving(groups: int, *more: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        settings = (*PATTERN, f"fleet.groups={groups}", "session.connect_timeout_s=5", *more)
        with running_server(Path(folder) / "r", *settings) as server:
            yield server


def with_groups(
    groups: int, measure: Callable[[Server, int], Any], count: int, *more: str
) -> dict[str, Any]:
    with serving(groups, *more) as server:
        return dict(asyncio.run(measure(server, count)))


def held_memory() -> str:
    """What living programs map: another one's shared memory is no trace of the server."""
    maps = []
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended
            maps.append(file.read_text())
    return "\n".join(maps)


def soak(seconds: float, seed: int) -> dict[str, Any]:
    """`passed`: no slot was lost or counted wrongly, nothing was left behind, no bug was logged,
    and the gateway held no more at the end. `serving` itself fails on processes or folders left."""
    before = set(Path("/dev/shm").iterdir())
    with serving(SOAK_GROUPS) as server:
        result = asyncio.run(Soak(server, seed).run(seconds))
        result["tracebacks_logged"] = server.log.read_text("utf-8", "replace").count("Traceback")
    in_use = held_memory()
    new = set(Path("/dev/shm").iterdir()) - before
    result["shared_memory_left"] = sum(str(path) not in in_use for path in new)
    result["grown"] = [
        name
        for name, held in result["gateway"].items()
        if held["last_quarter"] > held["second_quarter"] + MAY_GROW[name]
    ]
    wrong = ("lost_slots", "times_miscounted", "tracebacks_logged", "shared_memory_left", "grown")
    return {"passed": not any(result[name] for name in wrong), **result}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the fleet of this machine.")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of the soak")
    parser.add_argument("--watch", type=float, default=20.0, help="seconds of each `concurrent`")
    parser.add_argument("--reservations", type=int, default=100)
    parser.add_argument("--starts", type=int, default=10, help="of `cold_start`")
    parser.add_argument("--set", action="append", default=[], help="for the server of `cold_start`")
    parser.add_argument("--seed", type=int, default=0)
    parts = ("pool", "simulated", "reservation", "concurrent", "cold_start", "soak")
    parser.add_argument("--only", choices=parts, action="append")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "pool": pool_decisions,
        "simulated": simulated,
        "reservation": lambda: with_groups(1, reservations, options.reservations),
        "concurrent": lambda: concurrent(options.watch),
        "cold_start": lambda: with_groups(2, cold_starts, options.starts, *options.set),
        "soak": lambda: soak(options.seconds, options.seed),
    }
    for name in options.only or parts:
        result = {**circumstances(), **work[name]()}
        sys.stderr.write(f"{name}: {json.dumps(result)}\n")
        kept = json.loads(options.out.read_text()) if options.out.exists() else {}
        options.out.write_text(json.dumps({**kept, name: result}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
