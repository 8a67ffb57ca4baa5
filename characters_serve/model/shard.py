"""In: a geometry and a number of ranks. Out: the heads and MLP columns that each rank computes.

Every block is cut in the same way: attention by heads, the MLP by tiles of columns. Knows neither
torch nor weights, so that an impossible number of ranks is told while the configuration is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from characters_serve.config import ModelConfig

MLP_TILE: Final = 128
# All wait for the rank with the most to do.
MAX_LOAD: Final = 1.25


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of each block; both ranges count in the whole model."""

    rank: int
    size: int
    heads: range
    mlp_columns: range


def deal(model: ModelConfig, size: int) -> list[Shard]:
    """The shards of `size` ranks. ValueError, with the nearest sizes that can be, if none fit."""
    problem = _problem(model, size)
    if problem:
        possible = [n for n in range(1, model.num_heads + 1) if not _problem(model, n)]
        below = [n for n in possible if n < size][-1:]
        above = [n for n in possible if n > size][:1]
        nearest = " and ".join(str(n) for n in below + above)
        raise ValueError(f"{problem}; nearest possible: {nearest}")
    heads, tiles = _counts(model, size)
    width = mlp_tile(model)
    return [
        Shard(rank, size, of_heads, range(of_tiles.start * width, of_tiles.stop * width))
        for rank, (of_heads, of_tiles) in enumerate(zip(_runs(heads), _runs(tiles), strict=True))
    ]


def narrow(model: ModelConfig, shard: Shard) -> ModelConfig:
    """The geometry of a rank's blocks and caches: the model's, with this rank's heads and MLP."""
    ours = {"num_heads": len(shard.heads), "mlp_dim": len(shard.mlp_columns)}
    return model.model_copy(update=ours)


def mlp_tile(model: ModelConfig) -> int:
    """Columns of an MLP tile: 128, or the largest power of two below that divides the MLP."""
    return math.gcd(model.mlp_dim, MLP_TILE)


def _counts(model: ModelConfig, size: int) -> tuple[list[int], list[int]]:
    """Heads and tiles of each rank. Heads differ by one at most; tiles make up for that."""
    heads = [model.num_heads // size + (rank < model.num_heads % size) for rank in range(size)]
    load = _loads(model, heads, [0] * size)
    tiles = [0] * size
    for _ in range(model.mlp_dim // mlp_tile(model)):
        rank = load.index(min(load))
        tiles[rank] += 1
        load[rank] += 2 * mlp_tile(model)
    return heads, tiles


def _loads(model: ModelConfig, heads: list[int], tiles: list[int]) -> list[int]:
    """Columns of each rank's two projections: q, k, v and out of a head, in and out of a tile."""
    head, tile = 4 * model.head_dim, 2 * mlp_tile(model)
    return [head * h + tile * t for h, t in zip(heads, tiles, strict=True)]


def _problem(model: ModelConfig, size: int) -> str:
    if size > model.num_heads:
        return f"{size} ranks cannot share {model.num_heads} heads"
    heads, tiles = _counts(model, size)
    if not all(tiles):
        return f"{size} ranks cannot share an MLP of {model.mlp_dim} columns"
    loads = _loads(model, heads, tiles)
    excess = max(loads) * size / sum(loads)
    if excess > MAX_LOAD:
        return f"of {size} ranks one would have {excess:.2f} times the average work"
    return ""


def _runs(counts: list[int]) -> list[range]:
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
