"""The fused matmul and all-reduce on one GPU that two to four ranks share.

Each has a stream, memory and multiprocessors of its own, so that all their programs run at once, as
they do on GPUs of their own. What this leaves open is the link between those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from characters_kernels.gemm_all_reduce import (
    Exchange,
    Plan,
    RankLost,
    gemm_all_reduce,
    gemm_all_reduce_reference,
    region_bytes,
    steady_plan,
)
from characters_kernels.linear_fp8 import linear_fp8
from characters_serve.bench.gemm_all_reduce import integers
from characters_serve.bench.rank_step import random_e4m3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU of Hopper's class"),
]

COLUMNS, DEPTH = 9216, 1024
CALLS = 3
LATE_CYCLES = 20_000_000
NEVER_WAITED_FOR = 1 << 40
TIMEOUT_S = 20.0
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def plan_for(size: int, kind: str = "steady") -> Plan:
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    steady = steady_plan(multiprocessors // size)
    return {
        "steady": steady,
        "only others add": steady._replace(adding_from=steady.computing),
        "all multiply": steady._replace(columns=128, stages=3, computing=steady.programs),
    }[kind]


class Group:
    """Ranks on one GPU, joined by addresses in its memory."""

    def __init__(self, size: int, rows: int, plan: Plan, timeout_s: float = TIMEOUT_S) -> None:
        self.size, self.rows, self._tiles = size, rows, plan.tiles(rows, COLUMNS)
        count = region_bytes(rows, COLUMNS, plan)
        self._regions = [torch.zeros(count, dtype=torch.uint8, device="cuda") for _ in range(size)]
        addresses = [region.data_ptr() for region in self._regions]
        self.ends = [
            Exchange(region, addresses, rank, rows, COLUMNS, plan, timeout_s)
            for rank, region in enumerate(self._regions)
        ]
        self.streams = [
            torch.cuda.Stream()  # type: ignore[no-untyped-call]
            for _ in range(size)
        ]

    def integers(self, seed: int) -> list[Inputs]:
        """Of all ranks, which have different depths."""
        device = torch.device("cuda")
        return [
            integers(device, self.rows, COLUMNS, DEPTH + 16 * rank, 10 * seed + rank)
            for rank in range(self.size)
        ]

    def forget(self) -> None:
        """The default stream's work is over too, when a rank's begins."""
        torch.cuda.synchronize()
        for region, end in zip(self._regions, self.ends, strict=True):
            region.zero_()
            end.counts.zero_()
        torch.cuda.synchronize()

    def one_by_one(self, calls: Sequence[Callable[[], object]]) -> None:
        """Compiles and loads what the calls launch. That may wait for the GPU, and so must come
        before a rank on it waits for another."""
        for region in self._regions:
            region[-8 * (self._tiles + 2) : -8].view(torch.int64).fill_(NEVER_WAITED_FOR)
        torch.cuda.synchronize()
        self._launch(calls, torch.cuda.synchronize)
        self.forget()

    def together(self, calls: Sequence[Callable[[], object]], late: int = -1) -> None:
        torch.cuda.synchronize()
        if late >= 0:
            with torch.cuda.stream(self.streams[late]):
                torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        self._launch(calls, lambda: None)
        torch.cuda.synchronize()
        for end in self.ends:
            end.check()

    def _launch(self, calls: Sequence[Callable[[], object]], between: Callable[[], None]) -> None:
        for stream, call in zip(self.streams, calls, strict=True):
            with torch.cuda.stream(stream):
                call()
            between()

    def captured(self, calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
        """A graph for each rank."""
        self.one_by_one(calls)
        replays: list[Callable[[], object]] = []
        for stream, call in zip(self.streams, calls, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                call()
            replays.append(graph.replay)
        self.one_by_one(replays)
        return replays


def chains(
    group: Group, gate: Tensor | None = None
) -> tuple[list[list[Inputs]], list[list[Tensor]], list[Callable[[], object]]]:
    """For each call and rank its inputs; for each rank what its calls leave, and those calls."""
    made = [group.integers(call) for call in range(CALLS)]
    found = [[torch.zeros_like(end.out) for _ in made] for end in group.ends]

    def chain(rank: int) -> Callable[[], object]:
        def run() -> None:
            for inputs, kept in zip(made, found[rank], strict=True):
                kept.copy_(group.ends[rank](*inputs[rank], gate))

        return run

    return made, found, [chain(rank) for rank in range(group.size)]


def renewed(group: Group, made: list[list[Inputs]], replay: int) -> None:
    for call, of_all in enumerate(made):
        for old, new in zip(of_all, group.integers(100 * replay + call), strict=True):
            for kept, fresh in zip(old, new, strict=True):
                kept.copy_(fresh)


@pytest.mark.parametrize(
    ("size", "rows", "kind"),
    [
        (2, 768, "steady"),
        (2, 757, "only others add"),
        (2, 768, "all multiply"),
        (3, 757, "steady"),
        (4, 768, "steady"),
    ],
)
def test_replayed_chains_are_exact_whoever_is_late(size: int, rows: int, kind: str) -> None:
    group = Group(size, rows, plan_for(size, kind))
    made, found, calls = chains(group)
    replays = group.captured(calls)
    for replay in range(size + 1):
        renewed(group, made, replay)
        group.together(replays, late=replay % size)
        for call, of_all in enumerate(made):
            expected = gemm_all_reduce_reference(of_all)
            for rank in range(size):
                assert torch.equal(found[rank][call], expected), (replay, call, rank)


@pytest.mark.parametrize("size", [2, 3])
def test_a_gated_sum_is_added_to_what_every_rank_holds(size: int) -> None:
    group = Group(size, 768, plan_for(size))
    gate = torch.randint(-2, 3, (COLUMNS,), device="cuda").to(torch.bfloat16)
    made, found, calls = chains(group, gate)
    replays = group.captured(calls)
    held = torch.zeros_like(group.ends[0].out)
    for replay in range(2):
        renewed(group, made, replay)
        group.together(replays, late=replay)
        for call, of_all in enumerate(made):
            held = gemm_all_reduce_reference(of_all, gate, held)
            for rank in range(size):
                assert torch.equal(found[rank][call], held), (replay, call, rank)


def test_sums_of_random_numbers_are_as_good_as_the_plain_path() -> None:
    """At the depth that a quarter of the 57B model has."""
    group, depth = Group(3, 768, plan_for(3)), 10_240
    scales = torch.full((2, 1), 0.02, device="cuda")
    device = torch.device("cuda")
    of_all = [
        (random_e4m3(device, 768, depth), random_e4m3(device, COLUMNS, depth), *scales)
        for _ in range(3)
    ]

    def call(rank: int) -> Callable[[], object]:
        return lambda: group.ends[rank](*of_all[rank])

    calls = [call(rank) for rank in range(3)]
    group.one_by_one(calls)
    group.together(calls)
    exact = torch.zeros(768, COLUMNS, dtype=torch.float64, device="cuda")
    plain = torch.zeros(768, COLUMNS, device="cuda")
    for x, weight, x_scale, weight_scale in of_all:
        exact += (x.double() @ weight.double().T) * (x_scale * weight_scale)
        plain += linear_fp8(x, weight, x_scale, weight_scale, torch.bfloat16)
    fused = group.ends[0].out
    assert all(torch.equal(end.out, fused) for end in group.ends)
    error, of_plain = (
        float((sums.double() - exact).norm()) for sums in (fused, plain.to(torch.bfloat16))
    )
    assert error <= 2 * of_plain


def test_calls_that_are_read_before_the_next_stay_so_under_the_compiler() -> None:
    group = Group(2, 768, plan_for(2))
    made = [group.integers(call) for call in range(CALLS)]
    doubled: list[list[Tensor]] = [[], []]

    def chain(rank: int) -> Callable[[], object]:
        _, _, *constants = group.ends[rank].arguments

        def calls(out: Tensor, counts: Tensor, of_rank: list[Inputs]) -> list[Tensor]:
            results = []
            for inputs in of_rank:
                gemm_all_reduce(*inputs, None, out, counts, *constants)
                results.append(2 * out)
            return results

        compiled = torch.compile(calls, fullgraph=True, dynamic=False)
        end = group.ends[rank]

        def run() -> None:
            doubled[rank].clear()  # nothing is allocated while another rank waits
            doubled[rank] = compiled(end.out, end.counts, [each[rank] for each in made])

        return run

    calls = [chain(rank) for rank in range(2)]
    group.one_by_one(calls)
    for _ in range(2):
        group.together(calls)
        for call, of_all in enumerate(made):
            for rank in range(2):
                expected = 2 * gemm_all_reduce_reference(of_all)
                assert torch.equal(doubled[rank][call], expected), (call, rank)


def test_a_rank_that_does_not_come_ends_the_wait_and_is_told() -> None:
    group = Group(2, 768, plan_for(2), timeout_s=0.2)
    made, found, calls = chains(group)
    replays = group.captured(calls)
    for rank, replay in enumerate(replays):  # one after the other has given up
        with torch.cuda.stream(group.streams[rank]):
            replay()
        torch.cuda.synchronize()
        for end in group.ends:
            with pytest.raises(RankLost, match=r"waited for another's tiles for 0\.2 s"):
                end.check()
    group.forget()
    group.together(replays)
    for call, of_all in enumerate(made):
        expected = gemm_all_reduce_reference(of_all)
        assert all(torch.equal(kept[call], expected) for kept in found)
