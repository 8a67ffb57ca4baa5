"""The character: an autoregressive diffusion transformer over chunks of latent video.

In: a noisy chunk, its noise level, the voice and idle controls, and a cache that remembers the
reference and the last chunks. Out: the clean chunk (x0). One class serves the embedded character
and the 57B geometry; only the config differs. Knows nothing of sessions, pixels or processes.

Letters: B batch, V video tokens, S all tokens of a chunk (video, audio, control), C channels of a
video token, D model dim, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig
from characters_serve.model.audio import AudioEncoder, log_mel_for
from characters_serve.model.image_encoder import ImageEncoder
from characters_serve.model.kv_cache import KVCache, attend_and_store
from characters_serve.model.linear import (
    AllReduce,
    ColumnParallelLinear,
    RowParallelLinear,
    alone,
    in_projection_cut,
    out_projection_cut,
)
from characters_serve.model.rope import rotary_positions
from characters_serve.model.shard import Shard, deal, narrow

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

NORM_EPS = 1e-6
_TIME_FEATURES = 256


class Modulation(NamedTuple):
    """adaLN for one block: each broadcasts against (B, S, D). Scale and gate include their 1."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class StepCondition(NamedTuple):
    """What one chunk is conditioned on, the same in all its passes.

    tokens: (B, audio_tokens + control_tokens, D). bias: (B, 1, D), added to every video token.
    """

    tokens: Tensor
    bias: Tensor


class LowRankModulation(nn.Module):
    """adaLN: noise embedding -> shift, scale, gate through a low rank. Starts as the identity."""

    def __init__(self, dim: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, outputs * dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, noise_embedding: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.up(self.down(functional.silu(noise_embedding))).chunk(self.outputs, -1))


class Block(nn.Module):
    """Attention and MLP side by side: one projection in, one out, so one all-reduce a block."""

    def __init__(self, model: ModelConfig, shard: Shard, all_reduce: AllReduce) -> None:
        super().__init__()
        self.num_heads, self.head_dim = len(shard.heads), model.head_dim
        inner = self.num_heads * model.head_dim
        self.splits = [inner, inner, inner, len(shard.mlp_columns)]
        out_cut = out_projection_cut(model, shard)
        self.modulation = LowRankModulation(model.dim, model.adaln_rank, 3)
        self.in_projection = ColumnParallelLinear(model.dim, in_projection_cut(model, shard))
        self.out_projection = RowParallelLinear(out_cut, model.dim, all_reduce)
        self.q_norm = nn.RMSNorm(model.head_dim, eps=NORM_EPS)
        self.k_norm = nn.RMSNorm(model.head_dim, eps=NORM_EPS)
        nn.init.normal_(self.out_projection.weight, std=0.3 * out_cut.size**-0.5)

    def modulate(self, noise_embedding: Tensor) -> Modulation:
        shift, scale, gate = self.modulation(noise_embedding)
        return Modulation(shift, 1 + scale, 1 + gate)

    def forward(self, x_BSD: Tensor, modulation: Modulation, attend: Attend) -> Tensor:
        """attend: q, k, v (B, S, H, head_dim), not rotated -> (B, S, H x head_dim)."""
        h = norm_modulate(x_BSD, modulation.scale, modulation.shift)
        q, k, v, mlp = self.heads(self.in_projection(h))
        branch: Tensor = self.out_projection(join(attend(q, k, v), mlp))
        return x_BSD + modulation.gate * branch

    def heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, S, sum of splits) -> normed q and k, v (B, S, H, head_dim), and the MLP's half."""
        q, k, v, mlp = torch.split(projected, self.splits, dim=-1)
        q, k, v = (torch.unflatten(part, -1, (self.num_heads, self.head_dim)) for part in (q, k, v))
        return self.q_norm(q), self.k_norm(k), v, mlp


def norm_modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * scale + shift


def join(attended: Tensor, mlp: Tensor) -> Tensor:
    """Both halves of the out-projection's input."""
    return torch.cat([attended, functional.gelu(mlp, approximate="tanh")], -1)


class FinalLayer(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.modulation = LowRankModulation(model.dim, model.adaln_rank, 2)
        self.out = nn.Linear(model.dim, model.token_channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def modulate(self, noise_embedding: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = self.modulation(noise_embedding)
        return shift, 1 + scale

    def forward(self, x_BVD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = self.out(norm_modulate(x_BVD, scale, shift))
        return result


class NoiseLevelModulation(NamedTuple):
    """All modulation of one pass. It depends on the noise level alone, so it can be kept."""

    blocks: list[Modulation]
    final: tuple[Tensor, Tensor]


class CharacterDiT(nn.Module):
    """The whole model, or one tensor-parallel rank's shard of its blocks and all of the rest.

    all_reduce adds up the ranks' partial sums, once in each block.
    """

    def __init__(
        self, model: ModelConfig, shard: Shard | None = None, all_reduce: AllReduce = alone
    ) -> None:
        super().__init__()
        shard = shard or deal(model, 1)[0]
        self.config = model
        self.shard = shard
        self.rank_config = narrow(model, shard)
        dim = model.dim
        self.log_mel = log_mel_for(model)
        self.audio_encoder = AudioEncoder(model)
        control_features = model.frames_per_chunk * model.num_controls
        self.control_encoder = nn.Sequential(
            nn.Linear(control_features, dim),
            nn.SiLU(),
            nn.Linear(dim, (model.control_tokens + 1) * dim),
        )
        self.image_encoder = ImageEncoder(model)
        if model.prompt_slots:
            self.prompt_in = nn.Linear(model.prompt_dim, dim)
        self.latent_in = nn.Linear(model.token_channels, dim)
        self.place = nn.Parameter(torch.randn(model.video_tokens, dim) * 0.02)
        self.noise_in = nn.Sequential(
            nn.Linear(_TIME_FEATURES, dim), nn.SiLU(), nn.Linear(dim, dim)
        )
        self.prefix_embedding = nn.Parameter(torch.randn(dim) * 0.1)
        # ModuleList is no generic type; as a sequence its elements are blocks to the type checker.
        self.blocks: Sequence[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(model, shard, all_reduce) for _ in range(model.num_blocks)
        )
        self.final = FinalLayer(model)

    def projections(self) -> Iterator[tuple[nn.Module, str]]:
        for block in self.blocks:
            yield block, "in_projection"
            yield block, "out_projection"

    @property
    def network(self) -> CharacterDiT:
        """What the passes run through: of this family, all of it."""
        return self

    def noise_embedding(self, level: Tensor) -> Tensor:
        """level: (...,) in [0, 1] -> (..., D), from sines and cosines of it."""
        half = _TIME_FEATURES // 2
        frequencies = torch.exp(
            -math.log(200.0) * torch.arange(half, device=level.device, dtype=torch.float32) / half
        )
        angles = level[..., None].float() * frequencies * 20.0
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        embedded: Tensor = self.noise_in(features.to(self.prefix_embedding.dtype))
        return embedded

    def modulate(self, level: Tensor) -> NoiseLevelModulation:
        """level: (B,) or () -> every block's modulation, shaped to broadcast over tokens."""
        embedding = self.noise_embedding(level)[..., None, :]
        return NoiseLevelModulation(
            [block.modulate(embedding) for block in self.blocks], self.final.modulate(embedding)
        )

    def condition(
        self, audio_window: Tensor, controls: Tensor, session: None = None
    ) -> StepCondition:
        """audio_window: (B, window_samples) in [-1, 1]; controls: (B, frames, num_controls).
        The session is in the cache alone."""
        return self.condition_on_mel(self.log_mel(audio_window), controls)

    def condition_on_mel(self, mel: Tensor, controls: Tensor) -> StepCondition:
        """mel: (B, mel frames, mels), as LogMel gives it."""
        dtype = self.prefix_embedding.dtype
        audio = self.audio_encoder(mel.to(dtype))
        control = self.control_encoder(controls.flatten(-2).to(dtype))
        control = control.unflatten(-1, (-1, self.config.dim))
        tokens = torch.cat([audio[..., 1:, :], control[..., 1:, :]], dim=-2)
        return StepCondition(tokens, audio[..., :1, :] + control[..., :1, :])

    def embed_prefix(self, image: Tensor, prompt: Tensor | None = None) -> Tensor:
        """image: (B, 3, height, width) in [0, 1]; prompt: (B, n, prompt_dim) -> (B, slots, D)."""
        tokens: Tensor = self.image_encoder(image.to(self.prefix_embedding.dtype))
        if prompt is not None:
            tokens = torch.cat([tokens, self.prompt_in(prompt.to(tokens.dtype))], dim=1)
        return tokens

    def write_prefix(self, image: Tensor, cache: KVCache, prompt: Tensor | None = None) -> None:
        """The session's first forward pass: fills the cache's prefix in every block."""
        x = self.embed_prefix(image, prompt)
        positions = rotary_positions(self.config, x.device).prefix()[: x.shape[1]]
        num_caches = self.config.num_caches
        for index, block in enumerate(self.blocks):
            attend = partial(attend_and_store, cache, index, num_caches, positions)
            x = block(x, block.modulate(self.prefix_embedding), attend)

    def forward(
        self,
        noisy_BVC: Tensor,
        modulation: NoiseLevelModulation,
        condition: StepCondition,
        cache: KVCache,
        cache_index: int,
    ) -> Tensor:
        """One denoising pass of the current chunk; returns x0 (B, V, C). What is served runs the
        same in `model/steady.py`, whose parts the flags choose; tests hold it to this."""
        x = self.embed_chunk(noisy_BVC, condition)
        for index, block in enumerate(self.blocks):
            x = block(
                x,
                modulation.blocks[index],
                lambda q, k, v, i=index: cache.attend(i, cache_index, q, k, v),
            )
        clean: Tensor = self.final(x[..., : self.config.video_tokens, :], *modulation.final)
        return clean

    @staticmethod
    def renoise(
        clean: Tensor, noisy: Tensor, noise: Tensor, level: float, next_level: float
    ) -> Tensor:
        """The chunk's own noise again, less of it."""
        return torch.lerp(clean, noise, next_level)

    def embed_chunk(self, noisy_BVC: Tensor, condition: StepCondition) -> Tensor:
        """Video tokens with their place and the chunk's condition, then audio and control."""
        video = self.latent_in(noisy_BVC.to(self.place.dtype)) + self.place + condition.bias
        return torch.cat([video, condition.tokens], dim=-2)


def useful_flops_per_step(model: ModelConfig) -> float:
    """Multiply-adds x 2 of the blocks' matrices and attention in one step of all passes."""
    inner = model.num_heads * model.head_dim
    matrices = model.dim * (3 * inner + model.mlp_dim) + (inner + model.mlp_dim) * model.dim
    matmuls = 2 * matrices * model.tokens_per_chunk
    attended = 4 * model.tokens_per_chunk * model.cache_slots * inner
    return float(len(model.noise_levels) * model.num_blocks * (matmuls + attended))
