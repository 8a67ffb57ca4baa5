"""The two matrices of a block, cut between tensor-parallel ranks (Megatron: arXiv 1909.08053).

The in-projection is cut by outputs and needs no communication. The out-projection is cut by inputs:
each rank's product is a partial sum, and one all-reduce a block adds them up. A rank holds its own
part only, under the key of the whole weight; `cut` says which part that is. Knows no processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

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
    """(..., inputs) -> (..., cut.width): this rank's outputs. No bias."""

    def __init__(self, inputs: int, cut: Cut) -> None:
        super().__init__(inputs, cut.width, bias=False)
        self.cut = cut


class RowParallelLinear(nn.Linear):
    """(..., cut.width), this rank's inputs -> (..., outputs), summed over the ranks. No bias."""

    def __init__(self, cut: Cut, outputs: int, all_reduce: AllReduce) -> None:
        super().__init__(cut.width, outputs, bias=False)
        self.cut = cut
        self.all_reduce = all_reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.all_reduce(super().forward(x))


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


def _head_columns(model: ModelConfig, shard: Shard) -> range:
    return range(shard.heads.start * model.head_dim, shard.heads.stop * model.head_dim)


def _moved(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)


def _unit(model: ModelConfig) -> int:
    return math.gcd(model.head_dim, mlp_tile(model))
