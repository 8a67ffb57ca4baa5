"""The fused matmul and all-reduce on ranks that are processes and share memory, in Triton's
interpreter: the flags, the waiting and the order of the sum are those of the GPUs."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from characters_kernels import gemm_all_reduce
from characters_kernels.fp8 import to_e4m3
from characters_kernels.gemm_all_reduce import (
    Exchange,
    Plan,
    RankLost,
    gemm_all_reduce_reference,
    gemm_all_reduce_triton,
    region_bytes,
    steady_plan,
)
from characters_kernels.linear_fp8 import linear_fp8_reference
from characters_kernels.residual_norm import residual_norm_reference
from characters_kernels.triton_jit import INSTALLED, INTERPRETED
from tests.ranks_rig import end_ranks, start_ranks

ROWS, COLUMNS, DEPTH = 29, 80, 48
# The interpreter runs a rank's programs one after another, so none may wait for one after it: a
# single program multiplies where that also adds.
PLANS = (Plan(16, 32, 32, 8, 1, 3, 0, 4, 2), Plan(16, 32, 32, 16, 3, 5, 3, 4, 2))
SIZES = (1, 2, 3)
CALLS = 3  # the last one gated
ENDED_S = 120.0
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(rank: int, call: int) -> Inputs:
    """Of every other call integers; ranks have different depths and scales."""
    random = torch.Generator().manual_seed(100 * call + rank)
    depth, clamped = DEPTH + 16 * rank, torch.zeros(1, dtype=torch.int32)
    if call % 2 == 0:
        x = torch.randint(-2, 3, (ROWS, depth), generator=random).float()
        weight = torch.randint(-2, 3, (COLUMNS, depth), generator=random).float()
        scales = torch.tensor([2.0]), torch.tensor([0.5])
    else:
        x = torch.randn(ROWS, depth, generator=random)
        weight = torch.randn(COLUMNS, depth, generator=random)
        scales = torch.tensor([0.5 + rank]), torch.tensor([0.25])
    return to_e4m3(x, clamped), to_e4m3(weight, clamped), *scales


def gate() -> Tensor:
    return torch.arange(COLUMNS).remainder(5).sub(2).to(torch.bfloat16)


def exchange(regions: list[Tensor], rank: int, plan: Plan, timeout_s: float = ENDED_S) -> Exchange:
    addresses = [region.data_ptr() for region in regions]
    return Exchange(regions[rank], addresses, rank, ROWS, COLUMNS, plan, timeout_s)


def launch(end: Exchange, given: Inputs, gate: Tensor | None = None) -> Tensor:
    gemm_all_reduce_triton(*given, gate, *end.arguments)
    return end.out


def run_rank(rank: int, memory: dict[tuple[int, Plan], list[Tensor]], folder: Path) -> None:
    made = {}
    for (size, plan), regions in memory.items():
        if rank >= size:
            continue
        end = exchange(regions, rank, plan)
        for call in range(CALLS):
            if call % size == rank:
                time.sleep(0.05)  # late
            gated = gate() if call == CALLS - 1 else None
            made[size, plan, call] = launch(end, inputs(rank, call), gated).clone()
    torch.save(made, folder / f"{rank}.pt")


@pytest.mark.skipif(
    not (INSTALLED and INTERPRETED), reason="needs Triton's interpreter (TRITON_INTERPRET=1)"
)
def test_one_to_three_ranks_sum_what_each_multiplies(tmp_path: Path) -> None:
    memory = {
        (size, plan): [
            zeros(plan).share_memory_()  # type: ignore[no-untyped-call]
            for _ in range(size)
        ]
        for size in SIZES
        for plan in PLANS
    }
    ranks = start_ranks(run_rank, SIZES[-1], memory, tmp_path)
    assert end_ranks(ranks, ENDED_S) == [0] * SIZES[-1]
    made = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(SIZES[-1])]
    for (size, plan, call), found in made[0].items():
        for other in made[1:size]:
            assert torch.equal(found, other[size, plan, call]), "ranks differ"
        of_all = [inputs(rank, call) for rank in range(size)]
        if call == CALLS - 1:
            held = made[0][size, plan, call - 1].float()
            total = held + gate().float() * gemm_all_reduce_reference(of_all).float()
            assert torch.equal(found.float(), _cut(total))
        elif call % 2 == 0:
            assert torch.equal(found, gemm_all_reduce_reference(of_all))
        else:
            assert error(found, of_all) <= 2 * error(cut_off(of_all), of_all)


def cut_off(of_all: list[Inputs]) -> Tensor:
    """Plain arithmetic with the interpreter's rounding: it cuts float32 off to bf16."""
    partial = [linear_fp8_reference(*each, torch.float32) for each in of_all]
    total = sum((_cut(each) for each in partial), torch.zeros(ROWS, COLUMNS))
    return _cut(total)


def _cut(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -0x10000).view(torch.float32)


def error(found: Tensor, of_all: list[Inputs]) -> float:
    exact = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for x, weight, x_scale, weight_scale in of_all:
        exact += (x.double() @ weight.double().T) * (x_scale * weight_scale)
    return float((found.double() - exact).norm())


def test_a_norm_of_the_rounded_residual_is_as_good_as_the_plain_path() -> None:
    """A gated sum is rounded before the norm, which otherwise sees float32; but so is the plain
    path's. Measured after one block and after many."""
    exact = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain, gated, exact = exact.clone(), exact.clone(), exact.double()
    scale, shift = torch.ones(COLUMNS), torch.zeros(COLUMNS)
    for block in range(1, 24, 2):
        of_all = [inputs(rank, block) for rank in range(2)]
        factor = 1 + 0.1 * gate()
        plain = plain + factor * gemm_all_reduce_reference(of_all)
        gated = gemm_all_reduce_reference(of_all, factor, gated)
        for x, weight, x_scale, weight_scale in of_all:
            exact += factor * (x.double() @ weight.double().T) * (x_scale * weight_scale)
        normed = torch.zeros(ROWS, COLUMNS)
        residual_norm_reference(
            gated, None, None, scale, shift, 1e-6, torch.ones(1), normed, torch.zeros(1)
        )
        of_exact, of_plain = (
            functional.layer_norm(x.double(), (COLUMNS,), eps=1e-6) for x in (exact, plain)
        )
        assert (normed - of_exact).norm() <= 2 * (of_plain - of_exact).norm(), block


def zeros(plan: Plan) -> Tensor:
    return torch.zeros(region_bytes(ROWS, COLUMNS, plan), dtype=torch.uint8)


@pytest.mark.skipif(
    not (INSTALLED and INTERPRETED), reason="needs Triton's interpreter (TRITON_INTERPRET=1)"
)
def test_a_rank_that_does_not_come_ends_the_wait_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings: list[int] = []

    def clock() -> int:
        readings.append(len(readings) * 10**9)
        return readings[-1]

    monkeypatch.setattr(gemm_all_reduce, "now_ns", clock)
    plan = PLANS[1]
    adding = plan.programs - plan.adding_from
    regions = [zeros(plan) for _ in range(2)]
    ends = [exchange(regions, rank, plan, timeout_s=20.0) for rank in range(2)]
    for end in ends:
        end.check()
    launch(ends[0], inputs(0, 0))
    assert not ends[0].out.any(), "a sum without the other rank's part"
    for end in ends:
        with pytest.raises(RankLost, match="waited for another's tiles for 20 s"):
            end.check()
    readings.clear()
    launch(ends[0], inputs(0, 1))
    launch(ends[1], inputs(1, 0))
    slices = plan.tiles(ROWS, COLUMNS) * plan.rows // plan.slice_rows
    assert len(readings) <= 2 * (2 * adding + 1) + slices, "still waits"


def test_impossible_exchanges_say_why() -> None:
    plan = PLANS[0]
    region = zeros(plan)
    with pytest.raises(ValueError, match="not the memory at this rank's address"):
        Exchange(region, [zeros(plan).data_ptr(), 0], 0, ROWS, COLUMNS, plan, 1.0)
    with pytest.raises(ValueError, match="multiples of 16"):
        Exchange(region, [region.data_ptr()], 0, ROWS, COLUMNS - 8, plan, 1.0)
    for wrong in ({"computing": 0}, {"adding_from": 3, "computing": 3}, {"programs": 0}):
        with pytest.raises(ValueError, match=r"impossible numbers|nobody"):
            Exchange(region, [region.data_ptr()], 0, ROWS, COLUMNS, plan._replace(**wrong), 1.0)


@pytest.mark.skipif(not INSTALLED, reason="needs Triton")
def test_a_copy_of_the_shared_sum_and_other_shapes_are_refused() -> None:
    region = zeros(PLANS[0])
    end = exchange([region], 0, PLANS[0])
    x, weight, x_scale, weight_scale = inputs(0, 0)
    out, *others = end.arguments
    with pytest.raises(ValueError, match="not a copy of it"):
        gemm_all_reduce_triton(x, weight, x_scale, weight_scale, None, out.clone(), *others)
    in_switch = dataclasses.replace(end, multicast=end.addresses[0])
    for refused, wrong in ((end, gate()[:-1]), (end, gate().float()), (in_switch, gate())):
        with pytest.raises(ValueError, match="a gate must be"):
            launch(refused, (x, weight, x_scale, weight_scale), wrong)
    with pytest.raises(ValueError, match="the exchange is for"):
        launch(end, (x[:16], weight, x_scale, weight_scale))


def test_the_steady_plan_leaves_programs_that_only_add_and_takes_two_rounds() -> None:
    plan = steady_plan(132)
    assert plan.programs == 132 and plan.programs > plan.computing
    assert plan.tiles(768, 9216) <= 2 * plan.computing
