"""Checks and times the out-projection with its sum over the ranks: apart, and in the fused kernel.

    characters bench kernels --op gemm_all_reduce --config configs/characters-57b.yaml --ranks 2

In: a geometry and a number of ranks, each a process with a GPU of its own. Out: for rank 0's
out-projection at TP=2, 3 and 4, microseconds of the library's matmul alone, of NCCL's and of the
two-shot all-reduce alone, of matmul and NCCL in turn, and of the fused kernel; of the fused kernel
and the norm that follows it, with gate and residual in the norm (`fused_norm_us`) and in the sum
(`gated_norm_us`); and which share of NCCL's time the fused kernel hides: (matmul + all-reduce -
fused) / all-reduce. `--sweep-seconds` then tries other plans of the kernel. With `--ranks 1` there
are no collectives, and the kernel, which has nobody to sum with, shows what its matmul costs. The
last line of the output, and the file, are one JSON.

All are captured chains of calls whose weights take turns, replayed on all ranks at once. Nothing is
timed before the kernel's sums are right: they are compared, as every rank has them, with sums that
it makes by itself of the inputs of all.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from characters_kernels.fp8 import E4M3
from characters_kernels.gemm_all_reduce import (
    Exchange,
    Plan,
    gemm_all_reduce_reference,
    region_bytes,
    steady_plan,
)
from characters_kernels.linear_fp8 import linear_fp8
from characters_kernels.residual_norm import residual_norm
from characters_serve.bench.members import SETTLE_SHARE, following
from characters_serve.bench.origin import device_name, origin, report, save
from characters_serve.bench.rank_step import random_e4m3
from characters_serve.config import Config, EngineConfig, ModelConfig, Optimizations
from characters_serve.engine.device import choose_device
from characters_serve.engine.ranks import Ranks, SharedMemory
from characters_serve.engine.steady_sum import TwoShotProduct, exchange_over
from characters_serve.model.dit import NORM_EPS
from characters_serve.model.linear import out_projection_cut
from characters_serve.model.shard import deal
from characters_serve.model.steady import out_projection_rows

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]

_SHAPES: Final = (2, 3, 4)
_TURNS: Final = 4
_CHAIN: Final = 24
_SLEEP_CYCLES: Final = 50_000_000


class WrongSum(RuntimeError):
    """The fused kernel's result is not what it should be."""


class Member:
    """One rank, joined, with the exchange of the steady shape."""

    def __init__(self, engine: EngineConfig, folder: Path, rank: int) -> None:
        self.device, _ = choose_device(engine, rank)
        torch.cuda.set_device(self.device)
        self.ranks = Ranks(engine, folder, rank, self.device)
        self.ranks.join()
        count = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.plan = steady_plan(count)

    def exchange(self, rows: int, columns: int, plan: Plan) -> Exchange:
        count, ranks = region_bytes(rows, columns, plan), self.ranks
        if ranks.size == 1:
            region = torch.zeros(count, dtype=torch.uint8, device=self.device)
            memory = SharedMemory(region, [region.data_ptr()], multicast=0, handle=None)
        else:
            memory = ranks.share(count)
        return exchange_over(memory, ranks, rows, columns, plan, in_switch=False)

    def of_rank_0(self, x: Tensor) -> Tensor:
        """x, on the host, is overwritten on the others."""
        if self.ranks.size > 1:
            dist.broadcast(x, src=0)
        return x

    def agreed(self, number: float) -> float:
        """Rank 0's number, on every rank."""
        return float(self.of_rank_0(torch.tensor([number], dtype=torch.float64)))

    def captured(self, calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
        calls()  # compiles, and makes workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            calls()
        return graph

    def call_us(self, calls: Sequence[Callable[[], object]], seconds: float) -> float:
        """Of one of the calls, which take turns, replayed on all ranks equally often."""

        def chain() -> None:
            for index in range(_CHAIN):
                calls[index % len(calls)]()

        graph = self.captured(chain)
        self.agreed(0.0)
        started_s = time.perf_counter()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        once_s = (time.perf_counter() - started_s) / 3
        replays = int(self.agreed(max(8, seconds / once_s)))
        marks = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(replays + 1)
        ]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        times_ms = [a.elapsed_time(b) for a, b in pairwise(marks)]
        return float(median(times_ms[int(replays * SETTLE_SHARE) :])) / _CHAIN * 1000


def check(member: Member, rows: int, columns: int, depth: int, plan: Plan) -> dict[str, float]:
    """Raises WrongSum. Returns the fused and the plain path's relative errors on random inputs."""
    exchange = member.exchange(rows, columns, plan)
    size, rank = member.ranks.size, member.ranks.rank
    _check_integers(member, exchange, depth)
    of_all = [_random(member.device, rows, columns, depth, seed=other) for other in range(size)]
    exact = torch.zeros(rows, columns, dtype=torch.float64, device=member.device)
    for x, weight, x_scale, weight_scale in of_all:
        exact += (x.double() @ weight.double().T) * (x_scale * weight_scale)
    fused = exchange(*of_all[rank]).clone()
    exchange.check()
    plain = member.ranks.all_reduce(linear_fp8(*of_all[rank], torch.bfloat16))
    _same_bits(member, fused)
    errors = {name: _error(found, exact) for name, found in (("fused", fused), ("plain", plain))}
    if not errors["fused"] <= 2 * errors["plain"]:
        raise WrongSum(
            f"relative error {errors['fused']:.1e}, of the plain path {errors['plain']:.1e}"
        )
    return errors


def _check_integers(member: Member, exchange: Exchange, depth: int) -> None:
    """An odd number of calls in a graph, the last one gated, replayed with new inputs, another rank
    late each time."""
    size, rank, replays = member.ranks.size, member.ranks.rank, 5
    rows, columns = exchange.rows, exchange.columns
    some = torch.arange(columns, device=member.device).remainder(5).sub(2).to(torch.bfloat16)
    gates = (None, None, some)
    calls = len(gates)
    made = [integers(member.device, rows, columns, depth, 0) for _ in range(calls)]
    found = [torch.empty_like(exchange.out) for _ in range(calls)]

    def chain() -> None:
        for inputs, gate, kept in zip(made, gates, found, strict=True):
            kept.copy_(exchange(*inputs, gate))

    graph = member.captured(chain)
    for replay in range(replays):
        seeds = [
            [100 * replay + 10 * call + other for other in range(size)] for call in range(calls)
        ]
        for call, inputs in enumerate(made):
            fresh = integers(member.device, rows, columns, depth, seeds[call][rank])
            for old, new in zip(inputs, fresh, strict=True):
                old.copy_(new)
        for kept in found:
            kept.fill_(float("nan"))
        if rank == replay % size:
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        graph.replay()
        exchange.check()
        expected = torch.zeros_like(exchange.out)
        for call, kept in enumerate(found):
            of_all = [integers(member.device, rows, columns, depth, seed) for seed in seeds[call]]
            expected = gemm_all_reduce_reference(of_all, gates[call], expected)
            if not torch.equal(kept, expected):
                wrong = int((kept != expected).sum())
                raise WrongSum(f"replay {replay}, call {call}: {wrong} of {kept.numel()} differ")


def integers(device: torch.device, rows: int, columns: int, depth: int, seed: int) -> Inputs:
    """-1, 0 and 1: sums of a few thousand products stay where float32 is exact."""
    random = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, device=device, generator=random).to(E4M3)

    one = torch.ones(1, device=device)
    return draw(rows, depth), draw(columns, depth), one, one.clone()


def _random(device: torch.device, rows: int, columns: int, depth: int, seed: int) -> Inputs:
    torch.manual_seed(seed)
    scale = torch.full((1,), 0.01 * (1 + seed), device=device)
    x, weight = random_e4m3(device, rows, depth), random_e4m3(device, columns, depth)
    return x, weight, scale, torch.full((1,), 0.002, device=device)


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _same_bits(member: Member, out: Tensor) -> None:
    """Raises WrongSum on ranks whose bits are not those of rank 0."""
    mine = out.view(torch.uint8).cpu()
    if not torch.equal(mine, member.of_rank_0(mine.clone())):
        raise WrongSum("the ranks have different bits")


def time_shape(
    member: Member, rows: int, columns: int, depth: int, seconds: float
) -> dict[str, float]:
    ranks = member.ranks
    x, weights, one = _timed_inputs(member.device, rows, columns, depth)
    exchange = member.exchange(rows, columns, member.plan)
    us: dict[str, float] = {}

    def time_calls(name: str, call: Callable[..., object]) -> None:
        calls = [partial(call, x, weight, one, one) for weight in weights]
        us[name] = round(member.call_us(calls, seconds), 1)

    matmul = partial(linear_fp8, dtype=torch.bfloat16)
    time_calls("gemm_us", matmul)
    if ranks.size > 1:
        two_shot = TwoShotProduct(ranks, rows, columns)
        partial_sum = torch.zeros_like(exchange.out)
        time_calls("nccl_us", lambda *_: ranks.all_reduce(partial_sum))
        time_calls("two_shot_us", lambda *_: two_shot.all_reduce())
        time_calls("unfused_us", lambda *inputs: ranks.all_reduce(matmul(*inputs)))
        time_calls("unfused_two_shot_us", two_shot)
    time_calls("fused_us", exchange)
    for name, then_norm in _norms(exchange):
        time_calls(name, then_norm)
    exchange.check()
    if ranks.size > 1:
        hidden = (us["gemm_us"] + us["nccl_us"] - us["fused_us"]) / us["nccl_us"]
        us["hidden_share"] = round(hidden, 3)
    return us


def _norms(exchange: Exchange) -> Iterator[tuple[str, Callable[..., None]]]:
    """The fused kernel and the norm after it, which adds the gated sum to x or finds it there."""
    like = exchange.out
    x, out = torch.zeros_like(like), torch.zeros_like(like, dtype=E4M3)
    gate, scale, shift = (torch.full_like(like[0], 0.01) for _ in range(3))
    out_scale = torch.full((1,), 0.02, device=like.device)
    saturated = torch.zeros(1, dtype=torch.int32, device=like.device)

    def norm(x: Tensor, branch: Tensor | None, gate: Tensor | None) -> None:
        residual_norm(x, branch, gate, scale, shift, NORM_EPS, out_scale, out, saturated)

    gated = partial(exchange, gate=gate)
    yield "fused_norm_us", lambda *inputs: norm(x, exchange(*inputs), gate)
    yield "gated_norm_us", lambda *inputs: norm(gated(*inputs), None, None)


def _timed_inputs(
    device: torch.device, rows: int, columns: int, depth: int
) -> tuple[Tensor, list[Tensor], Tensor]:
    weights = [random_e4m3(device, columns, depth) for _ in range(_TURNS)]
    return random_e4m3(device, rows, depth), weights, torch.full((1,), 0.01, device=device)


def other_plans(steady: Plan) -> Iterator[Plan]:
    """One thing changed at a time, most telling first."""
    programs = steady.programs
    for adding in (8, 24, 12, 4, 0):
        yield steady._replace(computing=programs - adding)
    yield steady._replace(stages=3)
    for adding in (16, 24):
        yield steady._replace(computing=programs - adding, adding_from=programs - adding)
    for slice_rows in (32, 128):
        yield steady._replace(slice_rows=slice_rows)
    for tile, warps, stages in (
        ((128, 128, 128), 8, 4),
        ((128, 128, 128), 4, 4),
        ((256, 128, 128), 8, 4),
        ((128, 256, 64), 8, 4),
        ((64, 256, 128), 4, 4),
    ):
        for adding in (8, 16):
            rows, columns, depth = tile
            yield steady._replace(
                rows=rows,
                slice_rows=min(rows, steady.slice_rows),
                columns=columns,
                depth=depth,
                computing=programs - adding,
                warps=warps,
                stages=stages,
            )


def time_plan(member: Member, rows: int, columns: int, depth: int, plan: Plan) -> dict[str, Any]:
    row: dict[str, Any] = {"depth": depth, "plan": plan._asdict()}
    x, weights, one = _timed_inputs(member.device, rows, columns, depth)
    exchange = member.exchange(rows, columns, plan)
    calls = [partial(exchange, x, weight, one, one) for weight in weights]
    fused_us = member.call_us(calls, 0.3)
    exchange.check()
    return row | {"fused_us": round(fused_us, 1)}


def _depth(model: ModelConfig, tensor_parallel: int) -> int:
    """Rank 0's, which no other rank has more of."""
    return out_projection_cut(model, deal(model, tensor_parallel)[0]).width


def _measure(
    member: Member,
    model: ModelConfig,
    optimizations: Optimizations,
    seconds: float,
    sweep_s: float,
    result: dict[str, Any],
    out: Path | None,
) -> None:
    """The same on every rank; rank 0's `result` is the one that is kept."""
    rows, columns = out_projection_rows(model, optimizations), model.dim
    result["plan"] = member.plan._asdict()
    result["relative_errors"] = check(member, rows, columns, 1024, member.plan)
    result["shapes"] = {}
    for tensor_parallel in sorted(_SHAPES, reverse=True):
        depth = _depth(model, tensor_parallel)
        row = time_shape(member, rows, columns, depth, seconds)
        result["shapes"][f"tp{tensor_parallel}"] = {"rows": rows, "depth": depth} | row
        save(result, out)
    until_s = time.monotonic() + sweep_s
    result["plans"] = []
    for plan in other_plans(member.plan):
        if member.agreed(time.monotonic()) > member.agreed(until_s):
            break
        for tensor_parallel in (4, 2):
            row = time_plan(member, rows, columns, _depth(model, tensor_parallel), plan)
            result["plans"].append(row)
        save(result, out)


def _follow(config_json: str, folder: Path, rank: int, seconds: float, sweep_s: float) -> None:
    config = Config.model_validate_json(config_json)
    member = Member(config.engine, folder, rank)
    _measure(member, config.model, config.optimizations, seconds, sweep_s, {}, None)
    member.ranks.leave()


def run(config: Config, options: argparse.Namespace) -> int:
    if not 1 <= options.ranks <= torch.cuda.device_count():
        raise SystemExit(
            f"characters bench kernels --op gemm_all_reduce: {options.ranks} GPUs are needed, "
            f"torch sees {torch.cuda.device_count()}"
        )
    engine = config.engine.model_copy(update={"tensor_parallel": options.ranks})
    config = config.model_copy(update={"engine": engine})
    timing = {"seconds": options.seconds, "sweep_s": options.sweep_seconds}
    with following(config, partial(_follow, **timing)) as folder:
        member = Member(config.engine, folder, 0)
        result: dict[str, Any] = {
            "model": config.model.name,
            "ranks": options.ranks,
            "transport": "peer to peer; nothing is reduced in the switch"
            if options.ranks > 1
            else "none",
            "nccl_nvls_enable": os.environ.get("NCCL_NVLS_ENABLE", "not set"),
            "device": device_name(member.device),
            **origin(),
        }
        _measure(
            member, config.model, config.optimizations, **timing, result=result, out=options.out
        )
        member.ranks.leave()
    report(result, options.out)
    return 0
