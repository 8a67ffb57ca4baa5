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

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Run = Callable[[list[Tensor], Any], Tensor]


class StepGraph:
    """run: (noises, condition) -> clean, without a wait for the device or a new input tensor.

    condition: tensors in lists and named tuples, nested as the model likes.
    """

    def __init__(self, run: Run, noises: list[Tensor], condition: Any) -> None:
        self._run = run
        self._noises = zeros_like(noises)
        self._condition = zeros_like(condition)
        self._pool = torch.cuda.graph_pool_handle()
        # Kept: the matmul library makes a workspace of 32 MiB for each stream it meets.
        self._side = torch.cuda.Stream(noises[0].device)  # type: ignore[no-untyped-call]
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
                self._run(self._noises, self._condition)
            torch.cuda.current_stream().wait_stream(self._side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog, a thread of its own, may ask for the state of older work meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                clean = self._run(self._noises, self._condition)
        self._captured, self._shape = (graph, clean), shape

    def release(self) -> None:
        """Forgets the capture. To be called before the ranks part: NCCL waits for every graph that
        holds a collective of its own before it lets go of its communicator."""
        self._captured, self._shape = None, None

    def __call__(self, noises: list[Tensor], condition: Any) -> Tensor:
        """The clean chunk, valid until the next call."""
        if self._captured is None or self._shape is None:
            raise RuntimeError("no step was captured")
        graph, clean = self._captured
        mine, given = (self._noises, self._condition), (noises, condition)
        # One launch: the text of an open model alone is 80 tensors.
        torch._foreach_copy_(list(tensors_of(mine)), list(tensors_of(given)))
        graph.replay()
        return clean


def tensors_of(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    else:
        for part in tree:
            yield from tensors_of(part)


def zeros_like(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return torch.zeros_like(tree, memory_format=torch.contiguous_format)
    parts = map(zeros_like, tree)
    return type(tree)(*parts) if hasattr(tree, "_fields") else list(parts)
