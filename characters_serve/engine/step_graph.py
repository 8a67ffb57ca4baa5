"""One captured graph for every steady step of a session.

In: a step's noise and condition. Out: its clean chunk. A step in the window's steady state has one
shape; what changes between steps (slot, positions, noise, condition) lies in device tensors, so
that one capture replays them all. A position reset is a kernel of its own before the replay.

The number of keys is part of the shape and follows from the prompt: a session with another prefix
length captures anew, at its start, and takes over the old graph's memory, which therefore lives
until the new capture stands: a pool that no graph uses cannot be captured into. Knows nothing of
what it captures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from characters_serve.model.dit import StepCondition

Run = Callable[[Tensor, StepCondition], Tensor]


class StepGraph:
    """run: (noise, condition) -> clean, without a wait for the device or a new input tensor."""

    def __init__(self, run: Run, noise: Tensor, condition: StepCondition) -> None:
        self._run = run
        self._noise = torch.zeros_like(noise)
        self._condition = StepCondition(*map(torch.zeros_like, condition))
        self._pool = torch.cuda.graph_pool_handle()
        # Kept: the matmul library makes a workspace of 32 MiB for each stream it meets.
        self._side = torch.cuda.Stream(noise.device)  # type: ignore[no-untyped-call]
        self._shape: Hashable = None
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def capture(self, shape: Hashable, steady: AbstractContextManager[None]) -> None:
        """Captures a step inside `steady`, unless the last capture was of the same shape.

        The first run is eager: it compiles kernels and makes the libraries' workspaces, which a
        capture may not. What it writes to the cache is overwritten by the next step.
        """
        if self._shape == shape:
            return
        self._shape = None
        with steady:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._run(self._noise, self._condition)
            torch.cuda.current_stream().wait_stream(self._side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog, a thread of its own, may ask for the state of older work meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                clean = self._run(self._noise, self._condition)
        self._captured, self._shape = (graph, clean), shape

    def release(self) -> None:
        """Forgets the capture. To be called before the ranks part: NCCL waits for every graph that
        holds a collective of its own before it lets go of its communicator."""
        self._captured, self._shape = None, None

    def __call__(self, noise: Tensor, condition: StepCondition) -> Tensor:
        """The clean chunk, valid until the next call."""
        if self._captured is None or self._shape is None:
            raise RuntimeError("no step was captured")
        graph, clean = self._captured
        self._noise.copy_(noise)
        for mine, given in zip(self._condition, condition, strict=True):
            mine.copy_(given)
        graph.replay()
        return clean
