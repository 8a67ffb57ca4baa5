"""In: a traffic trace, hosts with GPUs, the shape of a group. Out: who was served, who waited, at
what cost.

A discrete-event simulation over the pool, the queue and the layout that the server runs on; only
time, visitors and processes are invented. 100,000 sessions on 2,000 hosts take a few seconds.
"""

from __future__ import annotations

import csv
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from characters_serve.fleet.layout import GroupShape, Host, place_as_many
from characters_serve.fleet.pool import Lease, Pool
from characters_serve.fleet.queue import WaitingQueue

DAY_S: Final = 86_400.0
# At the busiest hour of the day there is this much more traffic than on average, at the quietest
# this much less.
DAY_DEPTH: Final = 0.7


class TraceError(ValueError):
    """A trace that cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Visit:
    arrival_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a group is held beside the conversation, and how long a visitor waits for one."""

    prepare_s: float = 1.0
    reset_s: float = 0.5
    queue_size: int = 0
    patience_s: float = 300.0
    reserve_ttl_s: float = 30.0


@dataclass(slots=True)
class Course:
    """(time_s, live, queued) at each change."""

    time_s: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Waits are from arrival to a group, of those who were served; gpu_utilisation is the share
    of all GPU time that was spent in conversations."""

    hosts: int
    gpus: int
    groups: int
    stranded_gpus: int
    arrived: int
    served: int
    refused: int
    gave_up: int
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    longest_queue: int
    most_live: int
    live_minutes: float
    hours: float
    gpu_utilisation: float
    cost_per_live_minute: float | None

    def table(self) -> str:
        """One line for each figure."""
        cost = "-" if self.cost_per_live_minute is None else f"{self.cost_per_live_minute:.4f}"
        of_arrived = 100 / max(1, self.arrived)
        rows = (
            ("hosts, GPUs", f"{self.hosts:,}, {self.gpus:,}"),
            ("groups", f"{self.groups:,} ({self.stranded_gpus:,} GPUs in none)"),
            (
                "sessions",
                f"{self.arrived:,} in {self.hours:.1f} h, at most {self.most_live:,} live",
            ),
            ("served", f"{self.served:,} ({self.served * of_arrived:.2f} %)"),
            ("refused", f"{self.refused:,} ({self.refused * of_arrived:.2f} %)"),
            ("gave up waiting", f"{self.gave_up:,} ({self.gave_up * of_arrived:.2f} %)"),
            ("wait p50 / p95 / p99", " / ".join(f"{wait:.1f}" for wait in self.waits) + " s"),
            ("longest queue", f"{self.longest_queue:,}"),
            ("GPU utilisation", f"{100 * self.gpu_utilisation:.1f} %"),
            ("cost of a live minute", cost),
        )
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    @property
    def waits(self) -> tuple[float, float, float]:
        return self.wait_p50_s, self.wait_p95_s, self.wait_p99_s

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_trace(path: Path) -> list[Visit]:
    """A CSV file with the columns arrival_s and duration_s."""
    visits: list[Visit] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
            rows = csv.DictReader(file)
            if not {"arrival_s", "duration_s"} <= set(rows.fieldnames or ()):
                raise TraceError(f"{path}: the first line must name arrival_s and duration_s")
            visits.extend(_visit(row, f"{path}:{rows.line_num}") for row in rows)
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from None
    if not visits:
        raise TraceError(f"{path}: there are no sessions in it")
    return sorted(visits, key=lambda visit: visit.arrival_s)


def _visit(row: dict[str, Any], where: str) -> Visit:
    try:
        visit = Visit(float(row["arrival_s"]), float(row["duration_s"]))
    except (TypeError, ValueError):
        raise TraceError(f"{where}: two numbers are needed") from None
    if not (0 <= visit.arrival_s < float("inf") and 0 < visit.duration_s < float("inf")):
        raise TraceError(f"{where}: times must be positive")
    if None in row:  # where DictReader puts what is too much: decimal commas, for example
        raise TraceError(f"{where}: there are more values than the first line names")
    return visit


def generate_trace(
    sessions: float, hours: float, median_s: float, sigma: float, longest_s: float, seed: int
) -> list[Visit]:
    """Poisson arrivals, `sessions` on average, that follow the day from midnight on; log-normal
    durations of that median, cut at longest_s. sigma: standard deviation of the logarithm."""
    random = np.random.default_rng(seed)
    count = int(random.poisson(sessions))
    end_s = hours * 3600
    # The integral of 1 - depth x cos(2 pi t / day): given how many come, each arrives by that law.
    at_s = np.linspace(0, end_s, 10_001)
    turn = 2 * np.pi / DAY_S
    expected = at_s - DAY_DEPTH / turn * np.sin(turn * at_s)
    arrivals_s = np.sort(np.interp(random.random(count) * expected[-1], expected, at_s))
    durations_s = np.minimum(random.lognormal(np.log(median_s), sigma, count), longest_s)
    return [Visit(*times) for times in zip(arrivals_s.tolist(), durations_s.tolist(), strict=True)]


class Simulation:
    """Events under an invented clock: each is a time and what happens then."""

    def __init__(self, groups: Sequence[str], timing: Timing) -> None:
        self.pool = Pool(timing.reserve_ttl_s)
        self.queue = WaitingQueue(timing.queue_size, timing.patience_s)
        self.course = Course()
        self.now_s = 0.0
        self.arrived = self.refused = self.gave_up = self.live = 0
        self.longest_queue = self.most_live = 0
        self.live_s = 0.0
        self.waits_s: list[float] = []
        self._timing = timing
        self._waiting: dict[str, Visit] = {}
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        for group_id in groups:
            self.pool.add(group_id, 0.0)
            self.pool.started(group_id)

    def run(self, visits: Sequence[Visit]) -> None:
        """Until the last visitor has left and the last group is clean. visits: by arrival."""
        for visit in visits:
            self._until(visit.arrival_s)
            self._arrive(visit)
        self._until(float("inf"))

    def _until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
        if end_s != float("inf"):
            self.now_s = end_s

    def _in(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        event = (self.now_s + delay_s, next(self._numbers), act, arguments)
        heapq.heappush(self._events, event)

    def _arrive(self, visit: Visit) -> None:
        session_id = f"s{self.arrived}"
        self.arrived += 1
        lease = None if len(self.queue) else self.pool.reserve(session_id, self.now_s)
        if lease is not None:
            self._begin(lease, visit)
        elif self.queue.join(session_id, self.now_s):
            self._waiting[session_id] = visit
            self._in(self._timing.patience_s, self._give_up, session_id)
            self.longest_queue = max(self.longest_queue, len(self.queue))
            self._note()
        else:
            self.refused += 1

    def _begin(self, lease: Lease, visit: Visit) -> None:
        self.waits_s.append(self.now_s - visit.arrival_s)
        self._in(self._timing.prepare_s, self._go_live, lease, visit)

    def _go_live(self, lease: Lease, visit: Visit) -> None:
        if not self.pool.attach(lease):
            raise RuntimeError(f"{lease.group_id} was lost")
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        self.live_s += visit.duration_s
        self._note()
        self._in(visit.duration_s, self._end, lease)

    def _end(self, lease: Lease) -> None:
        if not self.pool.release(lease):
            raise RuntimeError(f"{lease.group_id} was given twice")
        self.live -= 1
        self._note()
        self._in(self._timing.reset_s, self._free, lease)

    def _free(self, lease: Lease) -> None:
        self.pool.reset_done(lease)
        session_id = self.queue.first()
        if session_id is None:
            return
        next_lease = self.pool.reserve(session_id, self.now_s)
        if next_lease is not None:
            self.queue.leave(session_id)
            self._note()
            self._begin(next_lease, self._waiting.pop(session_id))

    def _give_up(self, session_id: str) -> None:
        if self.queue.leave(session_id):
            del self._waiting[session_id]
            self.gave_up += 1
            self._note()

    def _note(self) -> None:
        self.course.time_s.append(self.now_s)
        self.course.live.append(self.live)
        self.course.queued.append(len(self.queue))


def simulate(
    visits: Sequence[Visit],
    hosts: Sequence[Host],
    shape: GroupShape,
    timing: Timing,
    price_per_gpu_hour: float | None = None,
    paid_s: float = 0.0,
) -> tuple[Outcome, Course]:
    """paid_s: how long the hosts are paid for, if not only until the last visitor has left.

    Raises CannotPlace when not one group fits on the hosts.
    """
    placements = place_as_many(hosts, shape)
    group_ids = [f"{p.host}/{'-'.join(map(str, p.ranks))}" for p in placements]
    simulation = Simulation(group_ids, timing)
    simulation.run(visits)
    gpus = sum(len(domain) for host in hosts for domain in host.domains)
    in_groups = len({(p.host, gpu) for p in placements for gpu in p.gpus})
    hours = max(simulation.now_s, paid_s, 1e-9) / 3600
    group_gpu_s = simulation.live_s * in_groups / len(placements)
    minutes = simulation.live_s / 60
    cost = None
    if price_per_gpu_hour is not None and minutes:
        cost = gpus * hours * price_per_gpu_hour / minutes
    waits_s = simulation.waits_s or [0.0]
    p50, p95, p99 = (float(wait) for wait in np.percentile(waits_s, (50, 95, 99)))
    outcome = Outcome(
        hosts=len(hosts),
        gpus=gpus,
        groups=len(placements),
        stranded_gpus=gpus - in_groups,
        arrived=simulation.arrived,
        served=len(simulation.waits_s),
        refused=simulation.refused,
        gave_up=simulation.gave_up,
        wait_p50_s=round(p50, 3),
        wait_p95_s=round(p95, 3),
        wait_p99_s=round(p99, 3),
        longest_queue=simulation.longest_queue,
        most_live=simulation.most_live,
        live_minutes=round(minutes, 2),
        hours=round(hours, 3),
        gpu_utilisation=round(group_gpu_s / (gpus * hours * 3600), 5),
        cost_per_live_minute=None if cost is None else round(cost, 5),
    )
    return outcome, simulation.course


def draw(course: Course, outcome: Outcome, path: Path) -> None:
    """A picture of the day: who is live and who waits, over the groups that there are.

    Raises ImportError where matplotlib, of the extra `plot`, is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    hours = np.asarray(course.time_s) / 3600
    axes.step(hours, course.live, where="post", label="live", color="#2a6fdb", linewidth=1)
    axes.step(hours, course.queued, where="post", label="queued", color="#d9822b", linewidth=1)
    axes.axhline(outcome.groups, color="#888", linestyle="--", linewidth=1, label="groups")
    axes.set_xlabel("hours")
    axes.set_ylabel("sessions")
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{outcome.served:,} served, {outcome.refused:,} refused, {outcome.gave_up:,} gave up; "
        f"wait p95 {outcome.wait_p95_s:.1f} s; GPUs {100 * outcome.gpu_utilisation:.0f} % busy"
    )
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=120)
