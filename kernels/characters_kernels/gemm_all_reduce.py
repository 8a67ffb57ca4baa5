"""FP8 matmul of an out-projection and the sum of its partial results over all ranks, in one kernel.

    x        (M, K)  e4m3, row-major; K, this rank's part of the inputs, may differ between ranks
    weight   (N, K)  e4m3, row-major
    x_scale, weight_scale    one float32 element each, this rank's own
    out      (M, N)  bf16, written: sum over the ranks of x @ weight.T * (x_scale * weight_scale)

Every partial result is rounded to bf16, as between a matmul and a collective; they are added in
float32 in the order of the ranks and rounded once, by one rank, so that all ranks have the same
bits. `out` lies in memory that the ranks share, and is valid until the next call of its `Exchange`:
whatever reads it comes before that call, on the same stream. N and K must be multiples of 16.

How it runs. Programs below `computing` multiply, one tile after another, into their own rank's
memory. Tile t belongs to rank t % world: who has finished a tile tells its owner, and an owner that
has heard of all ranks reads their partial results over NVLink, adds, and writes the sum to every
rank. Programs from `computing` on do only that, while later tiles are multiplied; the others join
once they have no tile left, so a program that still multiplies never waits for another rank. All
programs must run at once, so there are at most as many as multiprocessors.

Nothing is ever set back: flags are int64 counters that only grow, each program counts its calls in
device memory, and so the launch can be replayed from a CUDA graph. No call can run ahead of its
peers by more than itself, since it ends only when every rank has added all that it owns. A rank
that is gone is waited for until somebody ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from characters_kernels.fp8 import E4M3
from characters_kernels.linear_fp8 import linear_fp8_reference
from characters_kernels.triton_jit import INSTALLED, jit, tl

if INSTALLED:
    from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT: Final = 16
"""Bytes of a thread's access; also what the tensor copy engine asks of addresses and strides."""


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
    """Of what each rank shares: its partial results, the sum, a flag for each tile and one more."""
    return 2 * 2 * rows * columns + 8 * (plan.tiles(rows, columns) + 1)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's end of the fused matmuls of one shape. Made once; calls follow each other.

    region: (region_bytes,) uint8, this rank's shared memory, zeros when the first rank calls.
    addresses: of the regions of all ranks, in their order, as this process sees them.
    multicast: the address of all regions at once: the switch adds, which has never been run. 0:
    peer to peer. keep: what the addresses are valid for as long as it lives.
    """

    region: Tensor
    addresses: Sequence[int]
    rank: int
    rows: int
    columns: int
    plan: Plan
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

    def __call__(self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        """out."""
        gemm_all_reduce(
            x,
            weight,
            x_scale,
            weight_scale,
            self.out,
            self.counts,
            list(self.addresses),
            self.multicast,
            self.rank,
            list(self.plan),
        )
        return self.out


def gemm_all_reduce_reference(
    inputs: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
) -> Tensor:
    """inputs: x, weight, x_scale and weight_scale of every rank, in their order."""
    partial = [linear_fp8_reference(*each, torch.bfloat16).float() for each in inputs]
    total = torch.zeros_like(partial[0])
    for each in partial:
        total += each
    return total.to(torch.bfloat16)


@jit
def _at(region, first, TYPE: tl.constexpr):
    """Byte `first` of a region, as a pointer to TYPE."""
    return tl.multiple_of((region + first).to(tl.pointer_type(TYPE)), 16)


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


@jit
def _gemm_all_reduce_kernel(
    x,
    weight,
    x_scale,
    weight_scale,
    counts,
    regions,
    multicast,
    rows,
    columns,
    depth,
    rank,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
    COMPUTING: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ADDING_FROM: tl.constexpr,
    IN_SWITCH: tl.constexpr,
):
    """counts: tickets drawn for slices, then the calls that each program has made.

    A region: partial results, sums, a flag for each tile (ranks that have finished it, over all
    calls), and one more (programs of any rank that have added their last, over all calls).
    """
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, ROWS)
    tiles = row_tiles * tl.cdiv(columns, COLUMNS)
    size = 2 * rows * columns  # bytes
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
        # Each program that adds draws one ticket more than there are slices, and stops.
        slices = (tiles - rank + WORLD - 1) // WORLD * SLICES
        drawn_before = (call - 1) * (slices + ADDING)
        ticket = (tl.atomic_add(counts, 1, sem="relaxed") - drawn_before).to(tl.int32)
        while ticket < slices:
            tile = ticket // SLICES * WORLD + rank
            while tl.atomic_add(flags + tile, 0, sem="acquire", scope="sys") < call * WORLD:
                pass
            tl.debug_barrier()
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
                result = total.to(tl.bfloat16)
                for other in tl.static_range(WORLD):
                    tl.store(_at(regions[other], size, tl.bfloat16) + element, result, mask=valid)
            ticket = (tl.atomic_add(counts, 1, sem="relaxed") - drawn_before).to(tl.int32)
        tl.debug_barrier()
        for other in tl.static_range(WORLD):
            finished = _at(regions[other], 2 * size, tl.int64) + tiles
            tl.atomic_add(finished, 1, sem="release", scope="sys")
        if program == PROGRAMS - 1:
            while tl.atomic_add(flags + tiles, 0, sem="acquire", scope="sys") < (
                call * WORLD * ADDING
            ):
                pass
        tl.debug_barrier()
        tl.store(counts + 1 + program, call)


def gemm_all_reduce_triton(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    counts: Tensor,
    addresses: list[int],
    multicast: int,
    rank: int,
    plan: list[int],
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
    _gemm_all_reduce_kernel[(cut.programs,)](
        TensorDescriptor.from_tensor(x, [cut.rows, cut.depth]),
        TensorDescriptor.from_tensor(weight, [cut.columns, cut.depth]),
        x_scale,
        weight_scale,
        counts,
        tuple(addresses),
        multicast,
        rows,
        columns,
        depth,
        rank,
        WORLD=len(addresses),
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        DEPTH=cut.depth,
        SLICE=cut.slice_rows,
        COMPUTING=cut.computing,
        PROGRAMS=cut.programs,
        ADDING_FROM=cut.adding_from,
        IN_SWITCH=multicast != 0,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )


@torch.library.custom_op(
    "characters::gemm_all_reduce", mutates_args=("out", "counts"), device_types="cuda"
)
def gemm_all_reduce(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    counts: Tensor,
    addresses: list[int],
    multicast: int,
    rank: int,
    plan: list[int],
) -> None:
    gemm_all_reduce_triton(
        x, weight, x_scale, weight_scale, out, counts, addresses, multicast, rank, plan
    )


@gemm_all_reduce.register_fake
def _(x, weight, x_scale, weight_scale, out, counts, addresses, multicast, rank, plan):
    return None
