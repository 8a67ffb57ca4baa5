"""Code of many small operations, captured once in a CUDA graph and replayed.

Training is bound by the host wherever a step runs hundreds of operations on small tensors: 12 ms
each for the renderer's preparation and 20 ms for the optimiser's, against less than one replayed;
and the transformer's losses with their gradients took 86 ms of which the GPU worked 45.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def capture(
    run: Callable[[], None], stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """A graph of what `run` does to tensors that stay where they are. It must have run before, on
    the stream, if one is given."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


class Replayed:
    """A function of tensors alone, to one tensor; captured for each shape of its inputs on GPUs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._captured: dict[
            tuple[torch.Size, ...], tuple[list[Tensor], torch.cuda.CUDAGraph, list[Tensor]]
        ] = {}

    @torch.no_grad()
    def __call__(self, *given: Tensor) -> Tensor:
        if not given[0].is_cuda:
            return self._function(*given)
        shapes = tuple(x.shape for x in given)
        if shapes not in self._captured:
            inputs, results = [x.clone() for x in given], [self._function(*given)]

            def run() -> None:
                results[:] = [self._function(*inputs)]

            self._captured[shapes] = inputs, capture(run), results
        inputs, graph, results = self._captured[shapes]
        for mine, x in zip(inputs, given, strict=True):
            mine.copy_(x)
        graph.replay()
        return results[0].clone()


class ReplayedGradients:
    """Losses, the first of which is differentiated, and its gradients: one graph on a GPU.

    losses: a function of tensors whose shapes never change, and of parameters that stay where they
    are. The first calls run as they are, since they compile; then the graph is captured.
    """

    _EAGER_CALLS = 3

    def __init__(
        self, losses: Callable[..., tuple[Tensor, ...]], parameters: Iterable[nn.Parameter]
    ) -> None:
        self._losses = losses
        self._parameters = list(parameters)
        self._calls = 0
        on_gpu = self._parameters[0].is_cuda
        self._side = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._inputs: list[Tensor] = []
        self._results: tuple[Tensor, ...] = ()
        self._gradients: list[Tensor | None] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The losses, valid until the next call; gradients replace those of the parameters."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._side is None:
            return self._run(given)
        self._calls += 1
        if self._calls <= self._EAGER_CALLS:
            # Aside, as the capture will be: gradients are added up on the stream they began on.
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                results = self._run(given)
            torch.cuda.current_stream().wait_stream(self._side)
            return results
        return self._replay(given, self._graph or self._capture(given))

    def _replay(self, given: tuple[Tensor, ...], graph: torch.cuda.CUDAGraph) -> tuple[Tensor, ...]:
        for mine, x in zip(self._inputs, given, strict=True):
            mine.copy_(x)
        graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._results

    def _capture(self, given: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        self._inputs = [x.clone() for x in given]

        def run() -> None:
            self._results = self._run(tuple(self._inputs))

        self._graph = capture(run, self._side)
        self._gradients = [parameter.grad for parameter in self._parameters]
        return self._graph

    def _run(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        losses = self._losses(*given)
        losses[0].backward()  # type: ignore[no-untyped-call]
        return tuple(loss.detach() for loss in losses)
