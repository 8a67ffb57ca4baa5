"""FP8 matmul of an out-projection and the sum of its partial results over all ranks, in one kernel.

    x        (M, K)  e4m3, row-major; K, this rank's part of the inputs, may differ between ranks
    weight   (N, K)  e4m3, row-major
    x_scale, weight_scale    one float32 element each, this rank's own
    gate     (N,)    bf16, the same on all ranks, or None
    out      (M, N)  bf16, written: sum over the ranks of x @ weight.T * (x_scale * weight_scale);
                     with a gate, out + gate * sum: the residual stream itself, alike on all ranks

Every partial result is rounded to bf16, as between a matmul and a collective; they are added in
float32 in the order of the ranks, gated there, and rounded once, by one rank, so that all ranks
have the same bits. `out` lies in memory that the ranks share, and is valid until the next call of
its `Exchange`: whatever reads it comes before that call, on the same stream. N and K must be
multiples of 16.

How it runs. Programs below `computing` multiply, one tile after another, into their own rank's
memory. Tile t belongs to rank t % world: who has finished a tile tells its owner, and an owner that
has heard of all ranks reads their partial results over NVLink, adds, and writes the sum to every
rank. Programs from `computing` on do only that, while later tiles are multiplied; the others join
once they have no tile left, so a program that still multiplies never waits for another rank. All
programs must run at once, so there are at most as many as multiprocessors.

Nothing is ever set back: flags are int64 counters that only grow, each program counts its calls in
device memory, and so the launch can be replayed from a CUDA graph. No call can run ahead of its
peers by more than itself, since it ends only when every rank has added all that it owns.

A rank that is gone is waited for `timeout_s`, by the GPU's clock. Whoever has waited in vain leaves
its sum out and says so to every rank before it goes on, so a rank that has not been told
(`Exchange.check`) has right sums. From then on nobody waits, and the launches of a graph run
through. What they write is of no use; the ranks must be made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from characters_kernels.fp8 import E4M3
from characters_kernels.linear_fp8 import linear_fp8_reference
from characters_kernels.triton_jit import INSTALLED, jit, now_ns, tl

if INSTALLED:
    from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT: Final = 16
"""Bytes of a thread's access; also what the tensor copy engine asks of addresses and strides."""


class RankLost(RuntimeError):
    """A rank has waited in vain for another: the sums since then are wrong on all."""


class Plan(NamedTuple):
    """How a call is cut into programs; the same on all ranks.

    rows, columns, depth: of the matmul's tile. slice_rows: of what a program adds at a time.
    computing, programs: how many multiply, and how many there are. adding_from: the first that
    adds; 0 for all, `computing` for those only that do not multiply.
    """

    rows: int
    columns: int
    depth: int
    slice_rows: int
    computing: int
    programs: int
    adding_from: int
    warps: int
    stages: int

    def tiles(self, rows: int, columns: int) -> int:
        return -(-rows // self.rows) * -(-columns // self.columns)


def steady_plan(multiprocessors: int) -> Plan:
    """For 757 or 768 rows and 9,216 columns: 216 tiles, which any number of programs from 108 to
    215 multiplies in two rounds. So on 132 multiprocessors up to 24 can add and cost no time."""
    return Plan(128, 256, 128, 64, multiprocessors - 16, multiprocessors, 0, 8, 4)


def region_bytes(rows: int, columns: int, plan: Plan) -> int:
    """Of what each rank shares: its partial results, the sum, a flag for each tile and two more."""
    return 2 * 2 * rows * columns + 8 * (plan.tiles(rows, columns) + 2)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's end of the fused matmuls of one shape. Made once; calls follow each other.

    region: (region_bytes,) uint8, this rank's shared memory, zeros when the first rank calls.
    addresses: of the regions of all ranks, in their order, as this process sees them.
    timeout_s: how long a call waits for the other ranks.
    multicast: the address of all regions at once: the switch adds, which has never been run. 0:
    peer to peer. keep: what the addresses are valid for as long as it lives.
    """

    region: Tensor
    addresses: Sequence[int]
    rank: int
    rows: int
    columns: int
    plan: Plan
    timeout_s: float
    multicast: int = 0
    keep: object = None
    out: Tensor = field(init=False)
    counts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size, plan = 2 * self.rows * self.columns, self.plan
        if self.region.data_ptr() != self.addresses[self.rank]:
            raise ValueError("region is not the memory at this rank's address")
        if any(address % _ALIGNMENT for address in self.addresses) or self.columns % _ALIGNMENT:
            raise ValueError(f"addresses and columns must be multiples of {_ALIGNMENT}")
        if not 0 <= plan.adding_from <= plan.computing <= plan.programs:
            raise ValueError(f"impossible numbers of programs: {plan}")
        if plan.adding_from == plan.programs or plan.computing == 0:
            raise ValueError(f"nobody adds, or nobody multiplies: {plan}")
        device = self.region.device
        if device.type == "cuda":
            available = torch.cuda.get_device_properties(device).multi_processor_count
            if plan.programs > available:
                raise ValueError(f"{plan.programs} programs cannot run at once on {available} SMs")
        out = self.region[size : 2 * size].view(torch.bfloat16).view(self.rows, self.columns)
        counts = torch.zeros(1 + plan.programs, dtype=torch.int64, device=device)
        object.__setattr__(self, "out", out)
        object.__setattr__(self, "counts", counts)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        x_scale: Tensor,
        weight_scale: Tensor,
        gate: Tensor | None = None,
    ) -> Tensor:
        """out."""
        gemm_all_reduce(x, weight, x_scale, weight_scale, gate, *self.arguments)
        return self.out

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The op's own from `out` on."""
        timeout_ns = round(self.timeout_s * 1e9)
        addresses, plan = list(self.addresses), list(self.plan)
        return self.out, self.counts, addresses, self.multicast, self.rank, plan, timeout_ns

    def check(self) -> None:
        """Waits for the current stream's calls, and raises RankLost where their sums are not to be
        used."""
        if int(self.region[-8:].view(torch.int64)):
            raise RankLost(f"a rank has waited for another's tiles for {self.timeout_s:g} s")


def gemm_all_reduce_reference(
    inputs: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """inputs: x, weight, x_scale and weight_scale of every rank, in their order. residual: what
    `out` held, where there is a gate."""
    partial = [linear_fp8_reference(*each, torch.bfloat16).float() for each in inputs]
    total = torch.zeros_like(partial[0])
    for each in partial:
        total += each
    if gate is not None and residual is not None:
        total = residual.float() + gate.float() * total
    return total.to(torch.bfloat16)


@jit
def _at(region, first, TYPE: tl.constexpr):
    """Byte `first` of a region, as a pointer to TYPE."""
    return tl.multiple_of((region + first).to(tl.pointer_type(TYPE)), 16)


@jit
def _comes(flag, wanted, until):
    """Waits for a flag; whether it came in time."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen < wanted) & (now_ns() < until):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    return seen >= wanted


@jit
def _tell_all(regions, flags, index, WORLD: tl.constexpr):
    """Adds one to a flag of every region. flags: their first byte in a region."""
    for other in tl.static_range(WORLD):
        tl.atomic_add(_at(regions[other], flags, tl.int64) + index, 1, sem="release", scope="sys")


@jit
def _add_in_switch(multicast, size, m, column, rows, columns, COLUMNS: tl.constexpr):
    """The NVLink switch adds all ranks' partial results, and writes the sum to all of them."""
    n = column + 8 * tl.arange(0, COLUMNS // 8)
    valid = (m < rows)[:, None] & (n < columns)[None, :]
    source = multicast + 2 * (m[:, None] * columns + n[None, :])
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred valid;
        .reg .b32 part<4>;
        setp.ne.s32 valid, $3, 0;
        @valid multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2
            {part0, part1, part2, part3}, [$1];
        @valid multimem.st.relaxed.sys.global.v4.bf16x2 [$2], {part0, part1, part2, part3};
        mov.b32 $0, 0;
        }
        """,
        "=r,l,l,r",
        [source, source + size, valid.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@partial(jit, do_not_specialize=["rank"])  # compiled once for all ranks
def _gemm_all_reduce_kernel(
    x,
    weight,
    x_scale,
    weight_scale,
    gate,
    counts,
    regions,
    multicast,
    rows,
    columns,
    depth,
    rank,
    timeout_ns,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
    COMPUTING: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ADDING_FROM: tl.constexpr,
    GATED: tl.constexpr,
    IN_SWITCH: tl.constexpr,
):
    """counts: tickets drawn for slices, then the calls that each program has made.

    A region: partial results, sums, a flag for each tile (ranks that have finished it, over all
    calls), and two more: how many programs of any rank have added their last, over all calls, and
    how many have waited in vain.
    """
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, ROWS)
    tiles = row_tiles * tl.cdiv(columns, COLUMNS)
    size = 2 * rows * columns  # bytes
    finished, in_vain = tiles, tiles + 1
    own = regions[0]
    for other in tl.static_range(1, WORLD):
        own = tl.where(rank == other, regions[other], own)

    if program < COMPUTING:
        scale = tl.load(x_scale) * tl.load(weight_scale)
        partial = _at(own, 0, tl.bfloat16)
        for tile in range(program, tiles, COMPUTING):
            row = tile % row_tiles * ROWS
            column = tile // row_tiles * COLUMNS
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for k in range(0, depth, DEPTH):
                a = x.load([row, k])
                b = weight.load([column, k])
                total = tl.dot(a, b.T, total)
            m = row + tl.arange(0, ROWS)
            n = column + tl.arange(0, COLUMNS)
            valid = (m < rows)[:, None] & (n < columns)[None, :]
            result = (total * scale).to(tl.bfloat16)
            tl.store(partial + m[:, None] * columns + n[None, :], result, mask=valid)
            owner = regions[0]
            for other in tl.static_range(1, WORLD):
                owner = tl.where(tile % WORLD == other, regions[other], owner)
            # All threads have stored, and one tells: its release covers what the barrier did.
            tl.debug_barrier()
            tl.atomic_add(_at(owner, 2 * size, tl.int64) + tile, 1, sem="release", scope="sys")

    if program >= ADDING_FROM:
        SLICES: tl.constexpr = ROWS // SLICE
        ADDING: tl.constexpr = PROGRAMS - ADDING_FROM
        flags = _at(own, 2 * size, tl.int64)
        call = tl.load(counts + 1 + program) + 1
        lost = tl.atomic_add(flags + in_vain, 0, sem="relaxed", scope="sys")
        until = tl.where(lost == 0, now_ns() + timeout_ns.to(tl.int64), 0)
        # Each program that adds draws one ticket more than there are slices, and stops.
        slices = (tiles - rank + WORLD - 1) // WORLD * SLICES
        drawn_before = (call - 1) * (slices + ADDING)
        ticket = (tl.atomic_add(counts, 1, sem="relaxed") - drawn_before).to(tl.int32)
        while ticket < slices:
            tile = ticket // SLICES * WORLD + rank
            came = _comes(flags + tile, call * WORLD, until)
            tl.debug_barrier()
            if came:
                m = tile % row_tiles * ROWS + ticket % SLICES * SLICE + tl.arange(0, SLICE)
                column = tile // row_tiles * COLUMNS
                if IN_SWITCH:
                    _add_in_switch(multicast, size, m, column, rows, columns, COLUMNS)
                else:
                    n = column + tl.arange(0, COLUMNS)
                    valid = (m < rows)[:, None] & (n < columns)[None, :]
                    element = m[:, None] * columns + n[None, :]
                    total = tl.zeros((SLICE, COLUMNS), dtype=tl.float32)
                    for other in tl.static_range(WORLD):
                        # Past the first-level cache, which other ranks' stores do not reach.
                        source = _at(regions[other], 0, tl.bfloat16) + element
                        total += tl.load(source, mask=valid, other=0.0, cache_modifier=".cg")
                    if GATED:
                        factor = tl.load(gate + n, mask=n < columns, other=0.0).to(tl.float32)
                        source = _at(own, size, tl.bfloat16) + element
                        kept = tl.load(source, mask=valid, other=0.0, cache_modifier=".cg")
                        total = kept + factor[None, :] * total
                    result = total.to(tl.bfloat16)
                    for other in tl.static_range(WORLD):
                        target = _at(regions[other], size, tl.bfloat16) + element
                        tl.store(target, result, mask=valid)
            else:
                _tell_all(regions, 2 * size, in_vain, WORLD)
            ticket = (tl.atomic_add(counts, 1, sem="relaxed") - drawn_before).to(tl.int32)
        tl.debug_barrier()
        _tell_all(regions, 2 * size, finished, WORLD)
        if program == PROGRAMS - 1:
            came = _comes(flags + finished, call * WORLD * ADDING, until)
            if not came:
                _tell_all(regions, 2 * size, in_vain, WORLD)
        tl.debug_barrier()
        tl.store(counts + 1 + program, call)


def gemm_all_reduce_triton(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    gate: Tensor | None,
    out: Tensor,
    counts: Tensor,
    addresses: list[int],
    multicast: int,
    rank: int,
    plan: list[int],
    timeout_ns: int,
) -> None:
    cut = Plan(*plan)
    (rows, depth), columns = x.shape, weight.shape[0]
    if x.dtype != E4M3 or weight.dtype != E4M3 or weight.shape[1] != depth:
        raise ValueError("x (M, K) and weight (N, K) must be e4m3")
    if out.shape != (rows, columns):
        raise ValueError(f"the exchange is for {tuple(out.shape)}, not for {(rows, columns)}")
    if out.data_ptr() != addresses[rank] + 2 * rows * columns:
        # A compiler that copies what an op writes would leave the sums where nobody looks.
        raise ValueError("out must be the exchange's own memory, not a copy of it")
    if gate is not None and (gate.shape != (columns,) or gate.dtype != out.dtype or multicast):
        raise ValueError(f"a gate must be ({columns},) bf16, and the switch's sums take none")
    _gemm_all_reduce_kernel[(cut.programs,)](
        TensorDescriptor.from_tensor(x, [cut.rows, cut.depth]),
        TensorDescriptor.from_tensor(weight, [cut.columns, cut.depth]),
        x_scale,
        weight_scale,
        x_scale if gate is None else gate,
        counts,
        tuple(addresses),
        multicast,
        rows,
        columns,
        depth,
        rank,
        timeout_ns,
        WORLD=len(addresses),
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        DEPTH=cut.depth,
        SLICE=cut.slice_rows,
        COMPUTING=cut.computing,
        PROGRAMS=cut.programs,
        ADDING_FROM=cut.adding_from,
        GATED=gate is not None,
        IN_SWITCH=multicast != 0,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


gemm_all_reduce = torch.library.custom_op(
    "characters::gemm_all_reduce",
    gemm_all_reduce_triton,
    mutates_args=("out", "counts"),
    device_types="cuda",
)
gemm_all_reduce.register_fake(lambda *_: None)
