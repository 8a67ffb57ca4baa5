"""In: counts and times of a group's sessions. Out: `HostMetrics`, about once a second."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from characters_serve.messages import GpuMemory, HostMetrics, StepCounts

# Observations of this prefix are one stage each of the user's turn.
TURN_STAGE: Final = "turn_stage_ms_"
# Gauges of this prefix are one process each of the group.
GPU_MEMORY: Final = "gpu_memory_bytes_"

# What each says of itself in /metrics.
COUNTERS: Final = {
    "chunks_total": "Chunks that came from the engine",
    "late_chunks_total": "Chunks that came after the picture before them had to be held",
    "chunk_watchdog_total": "Times that a live session had no chunk for two seconds",
    "held_ms_total": "Milliseconds in which a picture was held",
    "silent_ms_total": "Of those, milliseconds in the middle of speech",
    "sessions_measured_total": "Sessions that streamed long enough to have a rate",
    "sessions_slow_total": "Of those, sessions half a picture a second or more below their rate",
    "frames_sent_total": "Pictures handed to encoders",
    "frames_skipped_total": "Pictures that passed unsent while the process was stalled",
    "degraded_chunks_total": "Chunks asked for while the engine ran late, with fewer passes",
    "hurried_chunks_total": "Chunks of speech with fewer passes, to be heard sooner",
    "rank_steps_total": "Steps, counted on each rank",
    "eager_steps_total": "Of those, steps that the captured graph declined",
    "fp8_saturated_total": "Values clamped because they did not fit their FP8 scale",
    "plain_sums_total": "Sums over the ranks outside of the steady shape",
    "interrupts_total": "Times that the character was silenced",
    "agent_errors_total": "Faults that voice agents reported",
    "offers_refused_total": "SDP offers refused",
    "client_messages_refused_total": "Data channel messages refused",
}

# Gone with their session; the counters stay.
SESSION_GAUGES: Final = {
    "playout_depth": "Chunks in hand",
    "playout_lead": "Chunks that are kept in hand, those being made included",
    "video_fps": "Pictures sent in the last second",
    "rtt_ms": "Round trip to the client",
    "engine_load": "Share of a chunk's time that it costs",
    "video_kbps": "Rate that the video encoder is given",
    "chunk_stalled": "1 where a live session has had no chunk for two seconds",
}
GAUGES: Final = SESSION_GAUGES | {
    "self_test_period_ms": "Time between two chunks in the group's self-test",
    "group_degraded": "1 where that was longer than a chunk plays",
    "host_tasks": "Of the session host's event loop",
    GPU_MEMORY.removesuffix("_"): "In use on a process's GPU",
}


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
