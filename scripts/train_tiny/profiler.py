"""Where a training step's time goes: one profile of each stage, printed as a table."""

from __future__ import annotations

import torch
from torch.profiler import profile

_FIRST, _LAST = 30, 32


class StepProfiler:
    """Call `tick` after each step; profiles two steps of each stage when enabled."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._profile: profile | None = None

    def tick(self, stage: str, step: int) -> None:
        if self._enabled and step == _FIRST:
            self._profile = profile()
            self._profile.start()
        elif self._profile is not None and step == _LAST:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profile.stop()
            key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            table = self._profile.key_averages().table(sort_by=key, row_limit=25)
            print(f"{stage}, {_LAST - _FIRST} steps\n{table}", flush=True)
            self._profile = None
