"""In: counts, times and what the hosts report. Out: one Prometheus registry for each app.

Host counters start at zero with each rebuilt group; what is exported never falls. No session id,
address or text is ever a label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from characters_serve.messages import HostMetrics
from characters_serve.session.counters import COUNTERS, GAUGES, GPU_MEMORY, TURN_STAGE

# Else a second series for each counter, which nothing here reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A chunk has 166.7 ms at 24 fps.
_CHUNK_MS = (5, 10, 20, 40, 60, 80, 100, 120, 140, 166.7, 200, 250, 350, 500, 1000)
_TURN_MS = (100, 200, 300, 400, 500, 750, 1000, 1200, 1500, 2000, 2500, 3000, 5000, 10_000)
_ENCODE_MS = (1, 2, 3, 5, 8, 12, 20, 30, 41.7, 60, 100, 250)
# A session is slow at half a picture a second below its rate: 23.5 at 24.
_FPS = (1, 5, 10, 15, 20, 22, 23, 23.5, 23.9, 24, 24.5, 30)
_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MAX_HOST_SERIES = 200
_MAX_STAGES = 24
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class Metrics:
    def __init__(
        self,
        *,
        sessions_by_state: Callable[[], Mapping[str, int]],
        groups_by_state: Callable[[], Mapping[str, int]],
        tasks: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Live(sessions_by_state, groups_by_state))
        self._hosts = _Hosts()
        self.registry.register(self._hosts)
        # process_resident_memory_bytes, process_open_fds and so on, of the gateway
        ProcessCollector(registry=self.registry)
        loop = Gauge("characters_gateway_tasks", "Of its event loop", registry=self.registry)
        loop.set_function(tasks)
        self.sessions_created = Counter(
            "characters_sessions_created", "Sessions admitted", registry=self.registry
        )
        self.sessions_ended = Counter(
            "characters_sessions_ended",
            "Sessions over",
            ["state", "reason"],
            registry=self.registry,
        )
        self.sessions_refused = Counter(
            "characters_sessions_refused",
            "Session requests turned away because of load",
            ["why"],
            registry=self.registry,
        )
        self.groups_lost = Counter(
            "characters_groups_lost", "Groups that died or were discarded", registry=self.registry
        )
        self.http_requests = Counter(
            "characters_http_requests",
            "HTTP requests",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.http_seconds = Histogram(
            "characters_http_request_seconds",
            "Time to answer",
            ["route"],
            buckets=_REQUEST_S,
            registry=self.registry,
        )
        self._observed = {
            name: Histogram(f"characters_{name}", text, buckets=buckets, registry=self.registry)
            for name, text, buckets in (
                ("step_ms", "Denoising time of one chunk", _CHUNK_MS),
                ("decode_ms", "Decoding time of one chunk", _CHUNK_MS),
                ("encode_ms", "Encoding time of one picture", _ENCODE_MS),
                ("session_fps", "New pictures a second over a whole session", _FPS),
                ("turn_latency_ms", "End of the user's speech to the character's voice", _TURN_MS),
            )
        }
        self._turn_stages = Histogram(
            "characters_turn_stage_ms",
            "End of the user's speech to each stage of the answer",
            ["stage"],
            buckets=_TURN_MS,
            registry=self.registry,
        )
        self._stages: set[str] = set()

    def absorb(self, group_id: str, report: HostMetrics) -> None:
        self._hosts.absorb(group_id, report)
        for name, values in report.observations.items():
            if name.startswith(TURN_STAGE):
                self._absorb_stage(name.removeprefix(TURN_STAGE), values)
                continue
            histogram = self._observed.get(name)
            if histogram is None:
                if len(self._observed) >= _MAX_HOST_SERIES or not _NAME.fullmatch(name):
                    continue
                histogram = self._observed[name] = Histogram(
                    f"characters_{name}",
                    "Observed by the session hosts",
                    buckets=_TURN_MS,
                    registry=self.registry,
                )
            for value in values:
                histogram.observe(value)

    def _absorb_stage(self, stage: str, values: list[float]) -> None:
        if stage not in self._stages:
            if len(self._stages) >= _MAX_STAGES or not _NAME.fullmatch(stage):
                return
            self._stages.add(stage)
        for value in values:
            self._turn_stages.labels(stage).observe(value)

    def forget(self, group_id: str) -> None:
        """The group is gone: its gauges go with it, its counts stay."""
        self._hosts.forget(group_id)

    def render(self) -> bytes:
        return generate_latest(self.registry)


# The first that is found in a reason's words; what hosts and the gateway say, never users.
_REASONS = (
    ("ended by the user", "user"),
    ("maximum duration", "max_duration"),
    ("idle timeout", "idle"),
    ("no client connected", "never_connected"),
    ("did not come back", "connection_lost"),
    ("shutting down", "shutdown"),
    ("reservation expired", "reservation_expired"),
    ("in the queue", "left_queue"),
    ("no chunk", "engine_stalled"),
    ("exited with code", "process_died"),
    ("not answered for", "process_died"),
    ("no answer to", "host_silent"),
)


def end_reason(reason: str) -> str:
    """One of a few words for why a session ended; `other` for what is not known here."""
    return next((label for words, label in _REASONS if words in reason), "other")


class _Live(Collector):
    """Counted when they are asked for, so they cannot drift from the truth."""

    def __init__(
        self,
        sessions: Callable[[], Mapping[str, int]],
        groups: Callable[[], Mapping[str, int]],
    ) -> None:
        self._sources = (
            (
                "characters_sessions",
                "Sessions by state; one that is over stays for five minutes",
                sessions,
            ),
            ("characters_groups", "Groups by state", groups),
        )

    def collect(self) -> Iterable[Metric]:
        for name, text, count in self._sources:
            family = GaugeMetricFamily(name, text, labels=["state"])
            for state, number in count().items():
                family.add_metric([state], number)
            yield family


class _Hosts(Collector):
    def __init__(self) -> None:
        # From the start, so that a rate over the first count is no gap.
        self._totals: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._last: dict[tuple[str, str], float] = {}
        self._gauges: dict[str, dict[str, float]] = {}

    def absorb(self, group_id: str, report: HostMetrics) -> None:
        for name, value in report.counters.items():
            if not _NAME.fullmatch(name):
                continue
            if name not in self._totals and len(self._totals) >= _MAX_HOST_SERIES:
                continue
            grown = value - self._last.get((group_id, name), 0.0)
            self._totals[name] = self._totals.get(name, 0.0) + grown
            self._last[group_id, name] = value
        self._gauges[group_id] = {
            name: value for name, value in report.gauges.items() if _NAME.fullmatch(name)
        }

    def forget(self, group_id: str) -> None:
        self._gauges.pop(group_id, None)
        for key in [key for key in self._last if key[0] == group_id]:
            del self._last[key]

    def collect(self) -> Iterable[Metric]:
        for name, total in self._totals.items():
            yield CounterMetricFamily(
                f"characters_{name.removesuffix('_total')}",
                COUNTERS.get(name, "Counted by the session hosts"),
                value=total,
            )
        families: dict[str, GaugeMetricFamily] = {}
        for group_id, gauges in self._gauges.items():
            for said, value in gauges.items():
                name, labels = said, {"group": group_id}
                if said.startswith(GPU_MEMORY):
                    name = GPU_MEMORY.removesuffix("_")
                    labels["process"] = said.removeprefix(GPU_MEMORY)
                if name not in families:
                    text = GAUGES.get(name, "Measured by the session hosts")
                    families[name] = GaugeMetricFamily(
                        f"characters_{name}", text, labels=list(labels)
                    )
                families[name].add_metric(list(labels.values()), value)
        yield from families.values()
