"""One pass of an open family over a chunk of the steady shape, made of the parts the flags choose.

In: a noisy chunk, its modulation and condition. Out: the clean chunk, as the network's `forward`
gives it. Around the matmuls of each block lie norms (residual, gate, norm, modulate) and mixers
(self-attention, text or speech, GELU), each in torch ops or as kernels. Owns the kernels' buffers,
made once. Knows nothing of sessions and steps.

Where a kernel fits differently than in `model/steady.py`: attention and MLP have matrices of their
own, so `gelu_quant` runs with one half empty; q and k are normed over the whole width, so
`square_sums` goes before `ring_store`, and a tensor-parallel group adds those up; AdaIN modulates
each latent, so `residual_norm` runs over each by itself. The queries to text and speech are normed
and attend in torch ops: they are neither rotated nor cached.

Letters: B sessions (1 where a part is fused), S tokens of a chunk, R rows of the fused parts'
buffers (S and padding), D model dim.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_kernels.gelu_quant import gelu_quant
from characters_kernels.residual_norm import residual_norm
from characters_kernels.square_sums import square_sums
from characters_serve.config import Optimizations
from characters_serve.model.fp8 import Fp8Linear, input_scale
from characters_serve.model.kv_cache import FusedCache, KVCache
from characters_serve.model.open.wan import (
    NORM_EPS,
    CrossAttention,
    Memory,
    Modulation,
    WanNetwork,
    layer_norm,
)
from characters_serve.model.ring_writer import QueryKeyNorm
from characters_serve.model.steady import add_branch, padded_buffer, piece


class Norms(Protocol):
    def __call__(
        self,
        x_BSD: Tensor,
        branch: Tensor | None,
        gate: Tensor | None,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        reader: nn.Module,
    ) -> tuple[Tensor, Tensor]:
        """x + gate * branch, unless that is None, and what `reader` multiplies of its norm.

        gate, scale, shift: (.., D); of scale and shift also (B, latents, 1, D), for each latent.
        """


class Mixer(Protocol):
    def attend(self, index: int, cache_index: int, projected: Tensor) -> Tensor:
        """Block `index`: its q, k, v (B, S or R, columns) -> the input of `self_attn.o`."""

    def read(self, attn: CrossAttention, projected: Tensor, memory: Memory) -> Tensor:
        """Queries to text, or to speech, which has a row for each latent -> the input of `o`."""

    def activate(self, hidden: Tensor, reader: nn.Module) -> Tensor:
        """The MLP's first half -> the input of its second."""


class TorchNorms:
    def __init__(self, tokens: int, compiled: bool) -> None:
        self._tokens = tokens
        self._norm = piece(_norm_modulate, compiled)
        self._add = piece(add_branch, compiled)

    def __call__(
        self,
        x_BSD: Tensor,
        branch: Tensor | None,
        gate: Tensor | None,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        reader: nn.Module,
    ) -> tuple[Tensor, Tensor]:
        if branch is not None and gate is not None:
            x_BSD = self._add(x_BSD, branch[:, : self._tokens], gate)
        return x_BSD, self._norm(x_BSD, scale, shift, eps)


class FusedNorms:
    def __init__(self, network: WanNetwork, saturated: Tensor) -> None:
        config = network.config
        self._tokens, self._dim = config.tokens_per_chunk, config.dim
        self._scales = _input_scales(network)
        self._saturated = saturated
        first = network.blocks[0].self_attn.qkv
        like = network.patch_embedding.weight
        self._out = padded_buffer(self._tokens, self._dim, first, like)

    def __call__(
        self,
        x_BSD: Tensor,
        branch: Tensor | None,
        gate: Tensor | None,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        reader: nn.Module,
    ) -> tuple[Tensor, Tensor]:
        scales, shifts = scale.reshape(-1, self._dim), shift.reshape(-1, self._dim)
        count = self._tokens // len(scales)
        for number, (its_scale, its_shift) in enumerate(zip(scales, shifts, strict=True)):
            rows = slice(number * count, (number + 1) * count)
            residual_norm(
                x_BSD[0, rows],
                None if branch is None else branch[0, rows],
                None if gate is None else gate.flatten(),
                its_scale,
                its_shift,
                eps,
                self._scales[reader],
                self._out[rows],
                self._saturated,
            )
        return x_BSD, self._out[None]


class TorchMixer:
    def __init__(self, network: WanNetwork, cache: KVCache, compiled: bool) -> None:
        self._blocks, self._cache = network.blocks, cache
        self._tokens = network.config.tokens_per_chunk
        self._gelu = piece(_gelu, compiled)

    def attend(self, index: int, cache_index: int, projected: Tensor) -> Tensor:
        q, k, v = self._blocks[index].self_attn.split(projected[:, : self._tokens])
        return self._cache.attend(index, cache_index, q, k, v)

    def read(self, attn: CrossAttention, projected: Tensor, memory: Memory) -> Tensor:
        return _read(attn, projected[:, : self._tokens], memory)

    def activate(self, hidden: Tensor, reader: nn.Module) -> Tensor:
        return self._gelu(hidden)


class FusedMixer:
    def __init__(self, network: WanNetwork, cache: FusedCache, saturated: Tensor) -> None:
        config = network.config
        self._blocks, self._cache = network.blocks, cache
        self._tokens, self._width = config.tokens_per_chunk, config.dim
        self._scales = _input_scales(network)
        self._saturated = saturated
        first, like = network.blocks[0], network.patch_embedding.weight
        self._inner = len(network.shard.heads) * config.head_dim
        self._sums = torch.zeros(self._tokens, 2, device=like.device)
        self._attended = padded_buffer(self._tokens, self._inner, first.self_attn.o, like)
        hidden = len(network.shard.mlp_columns)
        self._activated = padded_buffer(self._tokens, hidden, first.ffn[2], like)

    def attend(self, index: int, cache_index: int, projected: Tensor) -> Tensor:
        attn, rows = self._blocks[index].self_attn, projected[0]
        square_sums(rows, self._inner, self._sums)
        norm = QueryKeyNorm(
            attn.norm_q.weight,
            attn.norm_k.weight,
            NORM_EPS,
            attn.norm_q.all_reduce(self._sums),
            self._width,
        )
        attended = self._cache.attend_projected(index, cache_index, rows, norm)
        return self._packed(attended, attn.o)

    def read(self, attn: CrossAttention, projected: Tensor, memory: Memory) -> Tensor:
        return self._packed(_read(attn, projected[:, : self._tokens], memory)[0], attn.o)

    def activate(self, hidden: Tensor, reader: nn.Module) -> Tensor:
        rows = hidden[0]
        nothing = rows[: self._tokens, :0]
        gelu_quant(nothing, rows, self._scales[reader], self._activated, self._saturated)
        return self._activated[None]

    def _packed(self, attended: Tensor, reader: nn.Module) -> Tensor:
        if not isinstance(reader, Fp8Linear):
            return attended[None]
        nothing, scale = attended[:, :0], self._scales[reader]
        gelu_quant(attended, nothing, scale, self._attended, self._saturated)
        return self._attended[None]


class WanSteadyPass:
    def __init__(
        self,
        network: WanNetwork,
        optimizations: Optimizations,
        cache: KVCache,
        saturated: Tensor,
    ) -> None:
        tokens, compiled = network.config.tokens_per_chunk, optimizations.compile
        self._network, self._tokens = network, tokens
        self._norms: Norms = (
            FusedNorms(network, saturated)
            if optimizations.fused_norm_quant
            else TorchNorms(tokens, compiled)
        )
        self._mixer: Mixer = (
            FusedMixer(network, cache, saturated)
            if isinstance(cache, FusedCache)
            else TorchMixer(network, cache, compiled)
        )
        self._add = piece(add_branch, compiled)
        weight = network.patch_embedding.weight
        self._one = torch.ones(network.config.dim, device=weight.device, dtype=weight.dtype)

    def __call__(
        self, noisy_BVC: Tensor, modulation: Modulation, condition: Any, cache_index: int
    ) -> Tensor:
        """x0 (B, V, C)."""
        network, norms, mixer = self._network, self._norms, self._mixer
        text = network.text(condition)
        x = network.embed(noisy_BVC, condition)
        branch: Tensor | None = None
        gate: Tensor | None = None
        for index, block in enumerate(network.blocks):
            own, attn, cross = modulation.blocks[index], block.self_attn, block.cross_attn
            x, h = norms(x, branch, gate, own.scale, own.shift, NORM_EPS, attn.qkv)
            branch = attn.o(mixer.attend(index, cache_index, attn.qkv(h)))
            affine = block.norm3.weight, block.norm3.bias
            x, h = norms(x, branch, own.gate, *affine, NORM_EPS, cross.q)
            branch = cross.o(mixer.read(cross, cross.q(h), text[index]))
            up, _, down = block.ffn
            x, h = norms(x, branch, self._one, own.ffn_scale, own.ffn_shift, NORM_EPS, up)
            branch, gate = down(mixer.activate(up(h), down)), own.ffn_gate
            injection = network.injection(index, condition)
            if injection is not None:
                attn_to, shift, scale, memory, eps = injection
                x, h = norms(x, branch, gate, scale, shift, eps, attn_to.q)
                branch, gate = attn_to.o(mixer.read(attn_to, attn_to.q(h), memory)), self._one
        assert branch is not None
        return network.clean(noisy_BVC, self._add(x, branch[:, : self._tokens], gate), modulation)


def _read(attn: CrossAttention, projected: Tensor, memory: Memory) -> Tensor:
    """projected: (B, S, columns); its tokens are dealt out to the memory's rows, in order."""
    asking = projected.reshape(len(memory.k), -1, projected.shape[-1])
    return attn.attend(asking, memory).reshape(projected.shape)


def _norm_modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    if scale.ndim < 4:
        return layer_norm(x, eps) * scale + shift
    of_latents = torch.unflatten(x, 1, (scale.shape[1], -1))
    return (layer_norm(of_latents, eps) * scale + shift).flatten(1, 2)


def _gelu(hidden: Tensor) -> Tensor:
    return functional.gelu(hidden, approximate="tanh")


def _input_scales(network: WanNetwork) -> dict[nn.Module, Tensor]:
    linears = (getattr(module, name) for module, name in network.projections())
    return {linear: input_scale(linear) for linear in linears}
