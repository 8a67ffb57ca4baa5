"""A block's matrices, cut between tensor-parallel ranks (Megatron: arXiv 1909.08053).

In-projections are cut by outputs and need no communication. Out-projections are cut by inputs: each
rank's product is a partial sum, and an all-reduce adds them up. A rank holds its own part only,
under the key of the whole weight; `cuts` says which part that is. Knows no processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig
from characters_serve.model.shard import Shard, mlp_tile

AllReduce = Callable[[Tensor], Tensor]
"""The sum of a tensor over all ranks, with the same bits on each. May be made in place."""


def alone(x: Tensor) -> Tensor:
    """The all-reduce of a single rank."""
    return x


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank holds of a whole weight (outputs, inputs): runs of one dimension, joined.

    size: of the whole weight in that dimension. unit: divides both ends of every run, of every
    rank, whatever their number.
    """

    dim: int
    size: int
    unit: int
    runs: tuple[range, ...]

    @property
    def width(self) -> int:
        return sum(len(run) for run in self.runs)


class ColumnParallelLinear(nn.Linear):
    """(..., inputs) -> (..., cut.width): this rank's outputs."""

    def __init__(self, inputs: int, cut: Cut, bias: bool = False) -> None:
        super().__init__(inputs, cut.width, bias)
        self.cuts = {"weight": cut, "bias": cut} if bias else {"weight": cut}


class RowParallelLinear(nn.Linear):
    """(..., cut.width), this rank's inputs -> (..., outputs), summed over the ranks.

    Of a bias, which every rank holds whole, one rank's enters the sum: adds_bias says whose.
    """

    def __init__(
        self,
        cut: Cut,
        outputs: int,
        all_reduce: AllReduce,
        bias: bool = False,
        adds_bias: bool = True,
    ) -> None:
        super().__init__(cut.width, outputs, bias)
        self.cuts = {"weight": cut}
        self.all_reduce = all_reduce
        self.adds_bias = adds_bias

    @property
    def added_bias(self) -> Tensor | None:
        return self.bias if self.adds_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.all_reduce(functional.linear(x, self.weight, self.added_bias))


class ParallelRMSNorm(nn.Module):
    """RMS norm over the whole width, of which this rank holds some columns: (..., cut.width).

    The ranks add up their square sums, in float32.
    """

    def __init__(self, cut: Cut, eps: float, all_reduce: AllReduce) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cut.width))
        self.cuts = {"weight": cut}
        self.eps = eps
        self.width = cut.size
        self.all_reduce = all_reduce

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.numel() == self.width:
            return functional.rms_norm(x, (self.width,), self.weight, self.eps)
        wide = x.float()
        mean_square = self.all_reduce(wide.square().sum(-1, keepdim=True)) / self.width
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight


def cuts_of(network: nn.Module) -> dict[str, Cut]:
    """What a rank's network holds of each parameter that is cut, by the parameter's key."""
    return {
        f"{path}.{name}": cut
        for path, module in network.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | ParallelRMSNorm)
        for name, cut in module.cuts.items()
    }


def in_projection_cut(model: ModelConfig, shard: Shard) -> Cut:
    """Outputs are | q | k | v | MLP |; a rank has its heads of each of the first three."""
    inner = model.num_heads * model.head_dim
    heads = _head_columns(model, shard)
    qkv = tuple(_moved(heads, part * inner) for part in range(3))
    mlp = _moved(shard.mlp_columns, 3 * inner)
    return Cut(0, 3 * inner + model.mlp_dim, _unit(model), (*qkv, mlp))


def out_projection_cut(model: ModelConfig, shard: Shard) -> Cut:
    """Inputs are | attention | MLP |."""
    inner = model.num_heads * model.head_dim
    runs = (_head_columns(model, shard), _moved(shard.mlp_columns, inner))
    return Cut(1, inner + model.mlp_dim, _unit(model), runs)


def head_cut(model: ModelConfig, shard: Shard, dim: int, parts: int = 1) -> Cut:
    """This rank's heads of `parts` equal parts side by side, each of all heads."""
    inner = model.num_heads * model.head_dim
    heads = _head_columns(model, shard)
    runs = tuple(_moved(heads, part * inner) for part in range(parts))
    return Cut(dim, parts * inner, model.head_dim, runs)


def mlp_cut(model: ModelConfig, shard: Shard, dim: int) -> Cut:
    return Cut(dim, model.mlp_dim, mlp_tile(model), (shard.mlp_columns,))


def _head_columns(model: ModelConfig, shard: Shard) -> range:
    return range(shard.heads.start * model.head_dim, shard.heads.stop * model.head_dim)


def _moved(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)


def _unit(model: ModelConfig) -> int:
    return math.gcd(model.head_dim, mlp_tile(model))
