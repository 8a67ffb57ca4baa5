"""In: counts and times of a group's sessions. Out: `HostMetrics`, about once a second."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from characters_serve.messages import GpuMemory, HostMetrics, StepCounts

# Observations of this prefix are one stage each of the user's turn.
TURN_STAGE: Final = "turn_stage_ms_"
# Gauges of this prefix are one process each of the group.
GPU_MEMORY: Final = "gpu_memory_bytes_"

COUNTERS: Final = (
    "chunks_total",
    "late_chunks_total",
    "chunk_watchdog_total",
    "underruns_total",
    "held_ms_total",
    "silent_ms_total",
    "sessions_measured_total",
    "sessions_slow_total",
    "frames_sent_total",
    "frames_skipped_total",
    "degraded_chunks_total",
    "hurried_chunks_total",
    "rank_steps_total",
    "eager_steps_total",
    "fp8_saturated_total",
    "plain_sums_total",
    "interrupts_total",
    "agent_errors_total",
    "offers_refused_total",
    "client_messages_refused_total",
)

# Gone with their session; the counters stay.
SESSION_GAUGES: Final = (
    "playout_depth",
    "playout_lead",
    "video_fps",
    "rtt_ms",
    "engine_load",
    "video_kbps",
    "chunk_stalled",
)


class Counters:
    """Counters start at zero with the group and only grow."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._gauges: dict[str, float] = {}
        self._observations: defaultdict[str, list[float]] = defaultdict(list)

    def count(self, name: str, amount: float = 1.0) -> None:
        self._counters[name] += amount

    def gauge(self, name: str, value: float | None) -> None:
        if value is None:
            self._gauges.pop(name, None)
        else:
            self._gauges[name] = value

    def observe(self, name: str, value: float) -> None:
        self._observations[name].append(value)

    def engine(self, said: StepCounts | GpuMemory) -> None:
        """Steps are counted on each rank, so that shares hold for any number of them."""
        match said:
            case StepCounts():
                self.count("rank_steps_total", said.steps)
                self.count("eager_steps_total", said.eager_steps)
                self.count("fp8_saturated_total", said.fp8_saturated)
                self.count("plain_sums_total", said.plain_sums)
            case GpuMemory():
                self.gauge(GPU_MEMORY + said.process, said.used_bytes)

    def take(self) -> HostMetrics:
        """Observations are handed out once."""
        observations, self._observations = self._observations, defaultdict(list)
        return HostMetrics(dict(self._counters), dict(self._gauges), dict(observations))
