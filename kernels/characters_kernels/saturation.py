"""Counts values that did not fit their FP8 scale; no step ever waits for the device.

In: kernels add to `counter` on the device. Out: `read()`, the last count that has arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SaturationMonitor:
    """counter: (1,) int32 on the device, an argument of every op that converts to FP8."""

    def __init__(self, device: torch.device) -> None:
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self._arrived = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._last = 0

    def request(self) -> None:
        """Starts a copy to the host behind the work in flight; call it once a step."""
        if self._copied is None:
            self._arrived.copy_(self.counter)
        elif self._copied.query():
            # While a copy is in flight its buffer is left alone; the next step asks again.
            self._last = int(self._arrived)
            self._arrived.copy_(self.counter, non_blocking=True)
            self._copied.record()

    def read(self) -> int:
        """Clamped values up to the last request whose copy has arrived."""
        if self._copied is None or self._copied.query():
            self._last = int(self._arrived)
        return self._last

    def reset(self) -> None:
        """Between sessions, so it waits for a copy in flight: nothing of the old one is read."""
        if self._copied is not None:
            self._copied.synchronize()
        self.counter.zero_()
        self._arrived.zero_()
        self._last = 0


def total(counter: Tensor) -> int:
    """The count now; waits for the device. For tests and benches."""
    return int(counter.cpu())
