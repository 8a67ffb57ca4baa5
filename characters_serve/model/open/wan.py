"""What the models of the Wan line have in common: blocks, embeddings, tokens of latents.

In: tokens, noise levels, text. Out: tokens. Knows nothing of caches or of any one family.

Of its heads and MLP columns a tensor-parallel rank holds some; unlike in the characters family, q
and k are normed over the whole width, so that the ranks add up square sums before they attend, and
three times a block what they found.

Letters: B batch, S tokens, D model dim, H heads, T text rows, Z latent channels. After Wan 2.1
(arXiv 2503.20314). Two things differ from the published layout, and `weights` files hold it so:
q, k and v are one matrix, and the rows of q and k are ordered so that a rotation turns dimension i
with i + head_dim / 2, as everywhere in this project, where Wan turns neighbours. Scores are the
same, because q and k are reordered alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig
from characters_serve.model.attention import attention
from characters_serve.model.linear import (
    AllReduce,
    ColumnParallelLinear,
    ParallelRMSNorm,
    RowParallelLinear,
    head_cut,
    mlp_cut,
)
from characters_serve.model.shard import Shard

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

NORM_EPS = 1e-6
PATCH = 2


class Memory(NamedTuple):
    """Keys and values that are cross-attended to: (B, T, H, head_dim) each."""

    k: Tensor
    v: Tensor


class BlockModulation(NamedTuple):
    """adaLN of one block. Each broadcasts against (B, S, D); scales have the 1 added."""

    shift: Tensor
    scale: Tensor
    gate: Tensor
    ffn_shift: Tensor
    ffn_scale: Tensor
    ffn_gate: Tensor


class Modulation(NamedTuple):
    """Everything that a pass takes from its noise level. level broadcasts against (B, V, C)."""

    level: Tensor
    blocks: list[BlockModulation]
    head: tuple[Tensor, Tensor]


def layer_norm(x: Tensor, eps: float = NORM_EPS) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


class SelfAttention(nn.Module):
    """q and k are normalised over the whole width, before they are cut into heads."""

    def __init__(self, model: ModelConfig, shard: Shard, all_reduce: AllReduce) -> None:
        super().__init__()
        self.heads = (len(shard.heads), model.head_dim)
        self.qkv = ColumnParallelLinear(model.dim, head_cut(model, shard, 0, parts=3), bias=True)
        self.o = _out_projection(model, shard, all_reduce)
        norm = head_cut(model, shard, 0)
        self.norm_q = ParallelRMSNorm(norm, NORM_EPS, all_reduce)
        self.norm_k = ParallelRMSNorm(norm, NORM_EPS, all_reduce)

    def forward(self, x_BSD: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self.o(attend(*self.split(self.qkv(x_BSD))))
        return out

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> normed q and k, v: (B, S, H, head_dim)."""
        q, k, v = projected.chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, self.heads) for part in (self.norm_q(q), self.norm_k(k), v))
        return q, k, v


class CrossAttention(nn.Module):
    def __init__(self, model: ModelConfig, shard: Shard, all_reduce: AllReduce) -> None:
        super().__init__()
        self.heads = (len(shard.heads), model.head_dim)
        self.q = ColumnParallelLinear(model.dim, head_cut(model, shard, 0), bias=True)
        self.kv = ColumnParallelLinear(model.dim, head_cut(model, shard, 0, parts=2), bias=True)
        self.o = _out_projection(model, shard, all_reduce)
        norm = head_cut(model, shard, 0)
        self.norm_q = ParallelRMSNorm(norm, NORM_EPS, all_reduce)
        self.norm_k = ParallelRMSNorm(norm, NORM_EPS, all_reduce)

    def memory(self, context_BTD: Tensor) -> Memory:
        k, v = self.kv(context_BTD).chunk(2, dim=-1)
        return Memory(self.norm_k(k).unflatten(-1, self.heads), v.unflatten(-1, self.heads))

    def forward(self, x_BSD: Tensor, memory: Memory) -> Tensor:
        out: Tensor = self.o(self.attend(self.q(x_BSD), memory))
        return out

    def attend(self, projected: Tensor, memory: Memory) -> Tensor:
        """projected: q, not normed."""
        q = self.norm_q(projected).unflatten(-1, self.heads)
        return attention(q, memory.k, memory.v)


def _out_projection(model: ModelConfig, shard: Shard, all_reduce: AllReduce) -> RowParallelLinear:
    cut = head_cut(model, shard, 1)
    return RowParallelLinear(cut, model.dim, all_reduce, bias=True, adds_bias=shard.rank == 0)


class WanBlock(nn.Module):
    """Self-attention, text, MLP, one after the other."""

    def __init__(self, model: ModelConfig, shard: Shard, all_reduce: AllReduce) -> None:
        super().__init__()
        dim = model.dim
        self.self_attn = SelfAttention(model, shard, all_reduce)
        self.norm3 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.cross_attn = CrossAttention(model, shard, all_reduce)
        self.ffn = nn.Sequential(
            ColumnParallelLinear(dim, mlp_cut(model, shard, 0), bias=True),
            nn.GELU(approximate="tanh"),
            RowParallelLinear(
                mlp_cut(model, shard, 1), dim, all_reduce, bias=True, adds_bias=shard.rank == 0
            ),
        )
        self.modulation = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def projections(self) -> Iterator[tuple[nn.Module, str]]:
        """All matrices but the text's keys and values, which are made once a session."""
        yield from ((self.self_attn, name) for name in ("qkv", "o"))
        yield from ((self.cross_attn, name) for name in ("q", "o"))
        yield from ((self.ffn, name) for name in ("0", "2"))

    def modulate(self, projected: Tensor) -> BlockModulation:
        """projected: float32 (..., 6, D), from `NoiseLevel`."""
        dtype = self.modulation.dtype
        parts = [part.to(dtype) for part in (projected + self.modulation.float()).unbind(-2)]
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = parts
        return BlockModulation(shift, 1 + scale, gate, ffn_shift, 1 + ffn_scale, ffn_gate)

    def forward(
        self, x_BSD: Tensor, modulation: BlockModulation, text: Memory, attend: Attend
    ) -> Tensor:
        """attend: q, k, v (B, S, H, head_dim), not rotated -> (B, S, D)."""
        h = layer_norm(x_BSD) * modulation.scale + modulation.shift
        x = x_BSD + modulation.gate * self.self_attn(h, attend)
        x = x + self.cross_attn(self.norm3(x), text)
        h = layer_norm(x) * modulation.ffn_scale + modulation.ffn_shift
        out: Tensor = x + modulation.ffn_gate * self.ffn(h)
        return out


class Head(nn.Module):
    def __init__(self, dim: int, token_channels: int) -> None:
        super().__init__()
        self.head = nn.Linear(dim, token_channels)
        self.modulation = nn.Parameter(torch.randn(2, dim) / dim**0.5)

    def modulate(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """embedded: float32 (..., D), from `NoiseLevel`."""
        shift, scale = (embedded[..., None, :] + self.modulation.float()).unbind(-2)
        return shift.to(self.modulation.dtype), (1 + scale).to(self.modulation.dtype)

    def forward(self, x_BSD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.head(layer_norm(x_BSD) * scale + shift)
        return out


class NoiseLevel(nn.Module):
    """A noise level in [0, 1] -> its embedding (..., D) and what the blocks take (..., 6, D).

    Computed in float32 whatever the weights are, the angles in float64, as in the original.
    """

    def __init__(self, freq_dim: int, dim: int) -> None:
        super().__init__()
        self.num_frequencies = freq_dim // 2
        self.time_embedding = nn.Sequential(
            nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, level: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(self.num_frequencies, device=level.device, dtype=torch.float64)
        steps = steps / self.num_frequencies
        angles = 1000 * level.double()[..., None] * torch.exp(-math.log(10_000.0) * steps)
        x = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
        first, _, second = self.time_embedding
        embedded = _linear_in_float32(second, functional.silu(_linear_in_float32(first, x)))
        projected = _linear_in_float32(self.time_projection[1], functional.silu(embedded))
        return embedded, torch.unflatten(projected, -1, (6, -1))


def _linear_in_float32(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return functional.linear(x, layer.weight.float(), layer.bias.float())


class Injection(NamedTuple):
    """What is attended to after a block: AdaIN of what asks, and the keys and values.

    shift, scale: (B, latents, 1, D); memory: B x latents in the batch.
    """

    attn: CrossAttention
    shift: Tensor
    scale: Tensor
    memory: Memory
    eps: float


def text_embedding(text_dim: int, dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim))


def pad_text(text_BTC: Tensor, text_len: int) -> Tensor:
    """Short prompts end in rows of zeros, which are attended to like any other: as trained."""
    missing = text_len - text_BTC.shape[1]
    if missing < 0:
        raise ValueError(f"a prompt of {text_BTC.shape[1]} rows exceeds the model's {text_len}")
    return functional.pad(text_BTC, (0, 0, 0, missing))


class WanNetwork(nn.Module):
    """What every family does with its noise level and its text; it makes the parts itself."""

    config: ModelConfig
    shard: Shard
    noise_level: NoiseLevel
    text_embedding: nn.Sequential
    patch_embedding: nn.Linear
    blocks: Sequence[WanBlock]
    head: Head

    @property
    def network(self) -> WanNetwork:
        """What the passes run through."""
        return self

    def projections(self) -> Iterator[tuple[nn.Module, str]]:
        for block in self.blocks:
            yield from block.projections()

    def modulate(self, level: Tensor) -> Modulation:
        """level: (), or (F,) for a level of its own for each latent of the chunk."""
        if level.ndim:
            level = level.repeat_interleave(self.config.grid_rows * self.config.grid_columns)
        level = level.reshape(1, -1)
        embedded, projected = self.noise_level(level)
        return Modulation(
            level[..., None],
            [block.modulate(projected) for block in self.blocks],
            self.head.modulate(embedded),
        )

    def embed(self, noisy_BVC: Tensor, condition: Any) -> Tensor:
        """A chunk's tokens (B, V, D), as the first block takes them."""
        x: Tensor = self.patch_embedding(noisy_BVC.to(self.patch_embedding.weight.dtype))
        return x

    def text(self, condition: Any) -> list[Memory]:
        """Of a step's condition, for each block."""
        raise NotImplementedError

    def injection(self, index: int, condition: Any) -> Injection | None:
        """What comes after block `index`, if anything."""
        return None

    def clean(self, noisy_BVC: Tensor, x_BVD: Tensor, modulation: Modulation) -> Tensor:
        """x0 (B, V, C), from what the last block leaves."""
        velocity: Tensor = self.head(x_BVD, *modulation.head)
        return noisy_BVC - modulation.level * velocity.float()

    def read_text(self, text_BTC: Tensor) -> list[Memory]:
        """text: (B, rows, text_dim) of the text encoder -> every block's keys and values of it."""
        assert self.config.wan is not None
        text = text_BTC.to(self.patch_embedding.weight.dtype)
        context = self.text_embedding(pad_text(text, self.config.wan.text_len))
        return [block.cross_attn.memory(context) for block in self.blocks]


def tokens_of(latents: Tensor) -> Tensor:
    """(B, Z, T, height, width) -> (B, T x rows x columns, Z x PATCH x PATCH)."""
    b, z, t, h, w = latents.shape
    x = latents.view(b, z, t, h // PATCH, PATCH, w // PATCH, PATCH)
    return x.permute(0, 2, 3, 5, 1, 4, 6).reshape(b, -1, z * PATCH * PATCH)


def latents_of(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The reverse of `tokens_of`, for a grid of rows x columns tokens."""
    b, _, channels = tokens.shape
    x = tokens.view(b, -1, rows, columns, channels // PATCH**2, PATCH, PATCH)
    x = x.permute(0, 4, 1, 2, 5, 3, 6)
    return x.reshape(b, channels // PATCH**2, -1, rows * PATCH, columns * PATCH)
