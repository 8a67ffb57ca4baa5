"""One denoising pass of the steady shape, made of the parts that the flags choose.

In: a noisy chunk, its modulation and condition. Out: the clean chunk, as `CharacterDiT.forward`
gives it. Between the two matmuls of each block lie two parts, each in torch ops or fused into a
kernel: norms (residual, gate, norm, modulate) and mixers (attention and GELU). Owns the buffers of
the fused parts, made once. Knows nothing of sessions and steps.

Letters: B sessions (1 where a part is fused), S tokens of a chunk, R rows of the fused parts'
buffers (S and padding: matmuls of 768 rows are faster than of 757), D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from characters_kernels.fp8 import E4M3
from characters_kernels.gelu_quant import gelu_quant
from characters_kernels.residual_norm import residual_norm
from characters_serve.config import ModelConfig, Optimizations
from characters_serve.model.dit import (
    NORM_EPS,
    Block,
    CharacterDiT,
    Modulation,
    NoiseLevelModulation,
    StepCondition,
    join,
    norm_modulate,
)
from characters_serve.model.fp8 import Fp8Linear, input_scale
from characters_serve.model.kv_cache import FusedRingCache, KVCache
from characters_serve.model.ring_writer import QueryKeyNorm

_ROW_MULTIPLE = 16


class Norms(Protocol):
    def first(self, x_BSD: Tensor, following: int, modulation: Modulation) -> Tensor:
        """What block `following` reads: (B, S or R, D)."""

    def between(
        self, x_BSD: Tensor, branch: Tensor, gate: Tensor, following: int, modulation: Modulation
    ) -> tuple[Tensor, Tensor]:
        """x with the block's branch added, and what block `following` reads of it."""


class Mixer(Protocol):
    def __call__(self, index: int, cache_index: int, projected: Tensor) -> Tensor:
        """A block's in-projection (B, S or R, columns) -> its out-projection's input."""


class TorchNorms:
    def __init__(self, tokens: int, compiled: bool) -> None:
        self._tokens = tokens
        self._norm = piece(norm_modulate, compiled)
        self._add = piece(add_branch, compiled)

    def first(self, x_BSD: Tensor, following: int, modulation: Modulation) -> Tensor:
        return self._norm(x_BSD, modulation.scale, modulation.shift)

    def between(
        self, x_BSD: Tensor, branch: Tensor, gate: Tensor, following: int, modulation: Modulation
    ) -> tuple[Tensor, Tensor]:
        x = self._add(x_BSD, branch[:, : self._tokens], gate)
        return x, self._norm(x, modulation.scale, modulation.shift)


class FusedNorms:
    def __init__(self, model: CharacterDiT, saturated: Tensor) -> None:
        first = model.blocks[0].in_projection
        self._scales = [input_scale(block.in_projection) for block in model.blocks]
        self._saturated = saturated
        tokens, like = model.config.tokens_per_chunk, model.prefix_embedding
        self._out = padded_buffer(tokens, model.config.dim, first, like)

    def first(self, x_BSD: Tensor, following: int, modulation: Modulation) -> Tensor:
        return self._run(x_BSD, None, None, following, modulation)

    def between(
        self, x_BSD: Tensor, branch: Tensor, gate: Tensor, following: int, modulation: Modulation
    ) -> tuple[Tensor, Tensor]:
        return x_BSD, self._run(x_BSD, branch[0], gate.flatten(), following, modulation)

    def _run(
        self,
        x_BSD: Tensor,
        branch: Tensor | None,
        gate: Tensor | None,
        following: int,
        modulation: Modulation,
    ) -> Tensor:
        residual_norm(
            x_BSD[0],
            branch,
            gate,
            modulation.scale.flatten(),
            modulation.shift.flatten(),
            NORM_EPS,
            self._scales[following],
            self._out,
            self._saturated,
        )
        return self._out[None]


class TorchMixer:
    def __init__(self, model: CharacterDiT, cache: KVCache, compiled: bool) -> None:
        self._blocks, self._cache = model.blocks, cache
        self._tokens = model.config.tokens_per_chunk
        self._join = piece(join, compiled)

    def __call__(self, index: int, cache_index: int, projected: Tensor) -> Tensor:
        q, k, v, mlp = self._blocks[index].heads(projected[:, : self._tokens])
        return self._join(self._cache.attend(index, cache_index, q, k, v), mlp)


class FusedMixer:
    def __init__(self, model: CharacterDiT, cache: FusedRingCache, saturated: Tensor) -> None:
        first = model.blocks[0]
        self._blocks, self._cache = model.blocks, cache
        self._qkv_columns = sum(first.splits[:3])
        self._scales = [input_scale(block.out_projection) for block in model.blocks]
        self._saturated = saturated
        tokens, like = model.config.tokens_per_chunk, model.prefix_embedding
        columns = first.splits[0] + first.splits[3]
        self._out = padded_buffer(tokens, columns, first.out_projection, like)

    def __call__(self, index: int, cache_index: int, projected: Tensor) -> Tensor:
        block, rows = self._blocks[index], projected[0]
        norm = QueryKeyNorm(block.q_norm.weight, block.k_norm.weight, NORM_EPS)
        attended = self._cache.attend_projected(index, cache_index, rows, norm)
        mlp = rows[:, self._qkv_columns :]
        gelu_quant(attended, mlp, self._scales[index], self._out, self._saturated)
        return self._out[None]


class SteadyPass:
    def __init__(
        self,
        model: CharacterDiT,
        optimizations: Optimizations,
        cache: KVCache,
        saturated: Tensor,
    ) -> None:
        tokens, compiled = model.config.tokens_per_chunk, optimizations.compile
        self._blocks: list[Block] = list(model.blocks)
        self._video_tokens = model.config.video_tokens
        self._norms: Norms = (
            FusedNorms(model, saturated)
            if optimizations.fused_norm_quant
            else TorchNorms(tokens, compiled)
        )
        self._mixer: Mixer = (
            FusedMixer(model, cache, saturated)
            if isinstance(cache, FusedRingCache)
            else TorchMixer(model, cache, compiled)
        )
        self._tokens = tokens
        self._embed = piece(model.embed_chunk, compiled)
        self._add = piece(add_branch, compiled)
        self._final = piece(model.final.forward, compiled)

    def __call__(
        self,
        noisy_BVC: Tensor,
        modulation: NoiseLevelModulation,
        condition: StepCondition,
        cache_index: int,
    ) -> Tensor:
        """x0 (B, V, C)."""
        x = self._embed(noisy_BVC, condition)
        h = self._norms.first(x, 0, modulation.blocks[0])
        for index, block in enumerate(self._blocks):
            joined = self._mixer(index, cache_index, block.in_projection(h))
            branch, gate = block.out_projection(joined), modulation.blocks[index].gate
            following = index + 1
            if following < len(self._blocks):
                x, h = self._norms.between(x, branch, gate, following, modulation.blocks[following])
        x = self._add(x, branch[:, : self._tokens], gate)
        return self._final(x[:, : self._video_tokens], *modulation.final)


def add_branch(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    return x + gate * branch


def piece(call: Callable[..., Tensor], compiled: bool) -> Callable[..., Tensor]:
    """Pieces between the matmuls and the cache, not the whole pass: each is compiled once for all
    blocks, and no compiler sees, or moves, a read or a write of the shared buffers."""
    return torch.compile(call, fullgraph=True, dynamic=False) if compiled else call


def padded_buffer(tokens: int, columns: int, reader: torch.nn.Module, like: Tensor) -> Tensor:
    """(R, columns) zeros in the format that `reader` multiplies in; padding rows stay zero."""
    dtype = E4M3 if isinstance(reader, Fp8Linear) else like.dtype
    return torch.zeros((_padded(tokens), columns), device=like.device, dtype=dtype)


def _padded(tokens: int) -> int:
    return -(-tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE


def out_projection_rows(model: ModelConfig, optimizations: Optimizations) -> int:
    """Rows that an out-projection is given in a steady pass: R from a fused mixer, or S."""
    tokens = model.tokens_per_chunk
    return _padded(tokens) if optimizations.fused_pre_attention else tokens
