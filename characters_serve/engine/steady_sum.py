"""The out-projections' sum over the ranks, in the one shape that steady steps have.

In: a model whose group has joined, and the flags. Out: the same model, whose out-projections are
summed in memory that the ranks share: by the fused kernel, or by a matmul into that memory and
torch's two-shot all-reduce.

The memory is made once, for that shape. Made for every shape it would grow with every new prompt
length; so whatever has another shape (a session's first forward pass) takes the plain product, and
is counted. Knows nothing of sessions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from characters_kernels.gemm_all_reduce import Exchange, Plan, region_bytes, steady_plan
from characters_serve.config import Optimizations
from characters_serve.engine.ranks import Ranks, SharedMemory, peers
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.fp8 import Fp8Linear, MatmulThenSum, Product
from characters_serve.model.steady import out_projection_rows


class SteadySum:
    """steady: of inputs of `rows` rows. plain: of all others. plain_calls: how many those were."""

    def __init__(self, rows: int, steady: Product, plain: Product) -> None:
        self._rows, self._steady, self.plain = rows, steady, plain
        self.plain_calls = 0

    def __call__(self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        if x.shape[0] == self._rows:
            return self._steady(x, weight, x_scale, weight_scale)
        self.plain_calls += 1
        return self.plain(x, weight, x_scale, weight_scale)

    def check(self) -> None:
        """Raises PeerLost where the steady sums so far are wrong, because a rank was missed; waits
        for them. NCCL and torch's two-shot have no such word."""
        if isinstance(self._steady, Exchange):
            with peers():
                self._steady.check()


class TwoShotProduct:
    """A library's matmul into shared memory; then each rank sums its part of the rows, and hands
    it to all (torch's symmetric memory, peer to peer)."""

    def __init__(self, ranks: Ranks, rows: int, columns: int) -> None:
        self._memory = ranks.share(2 * rows * columns)
        self._group = ranks.group_name
        self.out = self._memory.region.view(torch.bfloat16).view(rows, columns)

    def __call__(self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        torch._scaled_mm(
            x,
            weight.t(),
            scale_a=x_scale,
            scale_b=weight_scale,
            out_dtype=self.out.dtype,
            use_fast_accum=True,
            out=self.out,
        )
        return self.all_reduce()

    def all_reduce(self) -> Tensor:
        """Sums what `out` holds, in place."""
        torch.ops.symm_mem.two_shot_all_reduce_(self.out, "sum", self._group)
        return self.out


def fused_product(ranks: Ranks, rows: int, columns: int, *, in_switch: bool) -> Exchange:
    """RuntimeError where the sum is wanted in the switch, and the GPUs' links cannot do that."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    plan = steady_plan(properties.multi_processor_count)
    memory = ranks.share(region_bytes(rows, columns, plan), multicast=in_switch)
    return exchange_over(memory, ranks, rows, columns, plan, in_switch=in_switch)


def exchange_over(
    memory: SharedMemory, ranks: Ranks, rows: int, columns: int, plan: Plan, *, in_switch: bool
) -> Exchange:
    """memory: `region_bytes` of each rank's."""
    return Exchange(
        memory.region,
        memory.addresses,
        ranks.rank,
        rows,
        columns,
        plan,
        ranks.timeout_s,
        multicast=memory.multicast if in_switch else 0,
        keep=memory,
    )


def share_sums(model: object, optimizations: Optimizations, ranks: Ranks) -> SteadySum | None:
    """After `ranks.join()`, by every rank. None where the flags leave the plain collective."""
    shared = optimizations.fused_gemm_all_reduce or optimizations.two_shot_all_reduce
    if not shared or ranks.size == 1:
        return None
    assert isinstance(model, CharacterDiT)
    rows, columns = out_projection_rows(model.config, optimizations), model.config.dim
    steady: Product = (
        fused_product(ranks, rows, columns, in_switch=optimizations.in_switch_reduction)
        if optimizations.fused_gemm_all_reduce
        else TwoShotProduct(ranks, rows, columns)
    )
    total = SteadySum(rows, steady, MatmulThenSum(ranks.all_reduce, torch.bfloat16))
    use(model, total)
    return total


def use(model: CharacterDiT, product: Product) -> None:
    for block in model.blocks:
        assert isinstance(block.out_projection, Fp8Linear)
        block.out_projection.product = product
