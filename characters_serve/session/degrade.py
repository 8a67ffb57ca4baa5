"""In: how long steps and decodes take, and underruns. Out: how many denoising passes to ask for.

Chunks in which nothing is said may always have fewer; what those cost says nothing of the others.

Pure policy. The rank and the decoder work on different chunks at once, so what must fit a chunk's
period is the slower of the two, unless one process does both. Recovery is tried after a calm time
that doubles whenever it proved too early. Knows nothing of the model.
"""

from __future__ import annotations

from typing import Final

EWMA_WEIGHT: Final = 0.2
LATE_SHARE: Final = 0.9
CALM_S: Final = 5.0
MAX_CALM_S: Final = 80.0
RELAPSE_S: Final = 10.0
# The first chunks of a session load caches and pages; they say nothing of the steady state.
WARMUP_CHUNKS: Final = 6


class DegradeLadder:
    def __init__(
        self,
        *,
        passes: int,
        degraded_passes: int,
        idle_passes: int,
        period_s: float,
        overlapped: bool,
    ) -> None:
        self.degraded = False
        self._passes = passes
        self._degraded_passes = degraded_passes
        self._idle_passes = idle_passes
        self._period_ms = period_s * 1000
        self._overlapped = overlapped
        self._ewma_ms: float | None = None
        self._seen = 0
        self._calm_s = CALM_S
        self._trouble_s = 0.0
        self._recovered_s: float | None = None

    @property
    def passes(self) -> int:
        """Of a chunk that speaks."""
        return self._degraded_passes if self.degraded else self._passes

    @property
    def idle_passes(self) -> int:
        return min(self._idle_passes, self.passes)

    @property
    def load(self) -> float:
        """Share of the period that a chunk costs, smoothed."""
        return (self._ewma_ms or 0.0) / self._period_ms

    def chunk(self, now_s: float, passes: int, step_ms: float, decode_ms: float) -> None:
        self._seen += 1
        if self._seen <= WARMUP_CHUNKS or passes < self.passes:
            return
        cost_ms = max(step_ms, decode_ms) if self._overlapped else step_ms + decode_ms
        if self._ewma_ms is None:
            self._ewma_ms = cost_ms
        self._ewma_ms += EWMA_WEIGHT * (cost_ms - self._ewma_ms)
        if self.load > LATE_SHARE:
            self._trouble(now_s)
        elif self.degraded and now_s - self._trouble_s >= self._calm_s:
            self.degraded = False
            self._recovered_s = now_s

    def underrun(self, now_s: float) -> None:
        if self._seen >= WARMUP_CHUNKS:
            self._trouble(now_s)

    def _trouble(self, now_s: float) -> None:
        self._trouble_s = now_s
        if self.degraded or self._degraded_passes >= self._passes:
            return
        self.degraded = True
        relapsed = self._recovered_s is not None and now_s - self._recovered_s < RELAPSE_S
        self._calm_s = min(MAX_CALM_S, self._calm_s * 2) if relapsed else CALM_S
        self._ewma_ms = None  # what the full passes cost says nothing of the fewer
