"""LiveAvatar: Wan2.2-S2V-14B that draws chunk after chunk (arXiv 2512.04677).

In: a noisy chunk of latents, its noise level, features of its speech, and a cache that remembers
the conditions and the last chunks. Out: the clean chunk (x0). Knows nothing of sessions or pixels.

Conditions are tokens that run through all blocks once: the reference picture, and the latents just
before the stream (the still picture, repeated), packed more coarsely the older they are. Speech is
cross-attended to after some of the blocks; a token of it that stands for the whole latent shifts
and scales what asks (AdaIN). Every pass keeps a cache of its own (`per_pass`).

Letters: B batch, F latents of a chunk, V video tokens of a chunk, C channels of a token, D model
dim, L layers of the speech model, A channels of its features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig
from characters_serve.model.kv_cache import KVCache, attend_and_store
from characters_serve.model.linear import AllReduce, alone
from characters_serve.model.open.wan import (
    PATCH,
    CrossAttention,
    Head,
    Injection,
    Memory,
    Modulation,
    NoiseLevel,
    WanBlock,
    WanNetwork,
    layer_norm,
    text_embedding,
    tokens_of,
)
from characters_serve.model.rope import rotary_positions
from characters_serve.model.shard import Shard, deal

# Rows of `condition_kind`: what a token is.
_NOISY, _REFERENCE, _MOTION = range(3)
ADAIN_EPS = 1e-5


class InjectedSpeech(NamedTuple):
    """One injector's part of a chunk. shift, scale: (B, F, 1, D); memory: B x F in the batch."""

    shift: Tensor
    scale: Tensor
    memory: Memory


class StepCondition(NamedTuple):
    """What a chunk is conditioned on, the same in all its passes.

    bias: (1 or B, 1 or V, D), added to the tokens. text: for each block, kept for the session.
    """

    bias: Tensor
    text: list[Memory]
    speech: list[InjectedSpeech]


class SpeechEncoder(nn.Module):
    """Features of a chunk's frames -> tokens for each of its latents.

    A chunk is encoded from its own frames alone, its first one repeated before it: as trained.
    """

    def __init__(self, layers: int, audio_dim: int, dim: int, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.mix = nn.Parameter(torch.full((layers,), 0.01))
        self.conv1_local = nn.Conv1d(audio_dim, num_tokens * dim // 4, 3)
        self.conv1_global = nn.Conv1d(audio_dim, dim // 4, 3)
        self.conv2 = nn.Conv1d(dim // 4, dim // 2, 3, stride=2)
        self.conv3 = nn.Conv1d(dim // 2, dim, 3, stride=2)
        self.final_linear = nn.Linear(dim, dim)
        self.last_token = nn.Parameter(torch.zeros(dim))

    def forward(self, features_BLAT: Tensor) -> tuple[Tensor, Tensor]:
        """-> tokens (B, F, num_tokens + 1, D), the whole latent's token (B, F, D)."""
        weights = functional.silu(self.mix.float())
        mixed = torch.einsum("l,blat->bat", weights / weights.sum(), features_BLAT.float())
        # Of the repeats that the model was trained with, one reaches the chunk's own latents.
        x = functional.pad(mixed.to(self.mix.dtype), (1, 0), mode="replicate")
        local = torch.unflatten(self.conv1_local(_causal(x)), 1, (self.num_tokens, -1))
        batch = len(local)
        local = self._strided(local.flatten(0, 1))
        tokens = torch.unflatten(local, 0, (batch, self.num_tokens)).transpose(1, 2)
        last = self.last_token.expand(batch, tokens.shape[1], 1, -1)
        whole = self.final_linear(self._strided(self.conv1_global(_causal(x))))
        return torch.cat([tokens, last], dim=2), whole

    def _strided(self, x_BCT: Tensor) -> Tensor:
        """-> (B, F, D), without the latent of the repeated frame."""
        x = self.conv2(_causal(_normalised(x_BCT)))
        x = self.conv3(_causal(_normalised(x)))
        return _normalised(x).transpose(1, 2)[:, 1:]


def _causal(x_BCT: Tensor) -> Tensor:
    return functional.pad(x_BCT, (2, 0), mode="replicate")


def _normalised(x_BCT: Tensor) -> Tensor:
    return functional.silu(layer_norm(x_BCT.transpose(1, 2))).transpose(1, 2)


class Injector(nn.Module):
    def __init__(self, model: ModelConfig, shard: Shard, all_reduce: AllReduce) -> None:
        super().__init__()
        self.attn = CrossAttention(model, shard, all_reduce)
        self.adain = nn.Linear(model.dim, 2 * model.dim)

    def condition(self, tokens_BFTD: Tensor, whole_BFD: Tensor) -> InjectedSpeech:
        shift, scale = self.adain(functional.silu(whole_BFD))[:, :, None].chunk(2, dim=-1)
        return InjectedSpeech(shift, 1 + scale, self.attn.memory(tokens_BFTD.flatten(0, 1)))

    def forward(self, x_BVD: Tensor, speech: InjectedSpeech) -> Tensor:
        """Each latent's tokens attend to that latent's speech."""
        x = torch.unflatten(x_BVD, 1, (speech.shift.shape[1], -1))
        h = layer_norm(x, ADAIN_EPS) * speech.scale + speech.shift
        heard: Tensor = self.attn(h.flatten(0, 1), speech.memory)
        return x_BVD + heard.view_as(x_BVD)


class LiveAvatar(WanNetwork):
    def __init__(
        self, model: ModelConfig, shard: Shard | None = None, all_reduce: AllReduce = alone
    ) -> None:
        super().__init__()
        assert model.wan is not None and model.live_avatar is not None
        shard = shard or deal(model, 1)[0]
        self.config, self.shard = model, shard
        dim, own = model.dim, model.live_avatar
        self.noise_level = NoiseLevel(model.wan.freq_dim, dim)
        self.text_embedding = text_embedding(model.wan.text_dim, dim)
        self.patch_embedding = nn.Linear(model.token_channels, dim)
        self.pose_embedding = nn.Linear(model.token_channels, dim)
        self.condition_kind = nn.Parameter(torch.randn(3, dim) * 0.02)
        self.motion_packers: Sequence[nn.Conv3d] = nn.ModuleList(  # type: ignore[assignment]
            nn.Conv3d(model.latent_channels, dim, kernel, stride=kernel)
            for kernel in ((pack, PATCH * pack, PATCH * pack) for pack in (1, 2, 4))
        )
        # ModuleList is no generic type; as a sequence its elements are typed.
        self.blocks: Sequence[WanBlock] = nn.ModuleList(  # type: ignore[assignment]
            WanBlock(model, shard, all_reduce) for _ in range(model.num_blocks)
        )
        self.speech_encoder = SpeechEncoder(own.audio_layers, own.audio_dim, dim, own.audio_tokens)
        self.injectors: Sequence[Injector] = nn.ModuleList(  # type: ignore[assignment]
            Injector(model, shard, all_reduce) for _ in own.audio_after_blocks
        )
        self.head = Head(dim, model.token_channels)
        self.injector_after = {block: i for i, block in enumerate(own.audio_after_blocks)}

    def projections(self) -> Iterator[tuple[nn.Module, str]]:
        yield from super().projections()
        for injector in self.injectors:
            yield from ((injector.attn, name) for name in ("q", "o"))

    @property
    def _dtype(self) -> torch.dtype:
        return self.condition_kind.dtype

    def pack_motion(self, motion: Tensor) -> Tensor:
        """(B, Z, any number of latents, height, width), newest last -> (B, motion tokens, D)."""
        assert self.config.live_avatar is not None
        counts = self.config.live_avatar.motion_latents
        missing = max(0, sum(counts) - motion.shape[2])
        newest = functional.pad(motion, (0, 0, 0, 0, missing, 0))[:, :, -sum(counts) :]
        oldest_first = torch.split(newest.to(self._dtype), list(reversed(counts)), dim=2)
        packed = zip(self.motion_packers, reversed(oldest_first), strict=True)
        return torch.cat([pack(part).flatten(2).transpose(1, 2) for pack, part in packed], dim=1)

    def write_conditions(
        self, reference: Tensor, motion: Tensor, text: list[Memory], cache: KVCache
    ) -> None:
        """Fills the cache's prefix; may be called again in mid-stream, when a condition changes.

        reference: (B, Z, 1, height, width). motion: the latents before the stream, newest last.
        """
        kinds = self.condition_kind
        reference_tokens = self.patch_embedding(tokens_of(reference.to(self._dtype)))
        x = torch.cat(
            [reference_tokens + kinds[_REFERENCE], self.pack_motion(motion) + kinds[_MOTION]], 1
        )
        # Among themselves the conditions stand as they do around a stream's first chunk, less the
        # position that it starts at: there the reference is `reference_distance` away from 0.
        angles = rotary_positions(self.config, x.device).prefix(1)
        clean = self.modulate(torch.zeros((), device=x.device))
        for index, block in enumerate(self.blocks):
            attend = partial(attend_and_store, cache, index, self.config.num_caches, angles)
            x = block(x, clean.blocks[index], text[index], attend)

    def condition(
        self, features_BLAT: Tensor, text: list[Memory], pose: Tensor | None = None
    ) -> StepCondition:
        """features: of the chunk's frames. pose: latents (B, Z, F, height, width) of a video that
        leads the body; without one they are zeros, and what the model makes of zeros remains."""
        assert self.pose_embedding.bias is not None
        posed = self.pose_embedding.bias.expand(1, 1, -1)
        if pose is not None:
            posed = self.pose_embedding(tokens_of(pose.to(self._dtype)))
        tokens, whole = self.speech_encoder(features_BLAT)
        speech = [injector.condition(tokens, whole) for injector in self.injectors]
        return StepCondition(posed + self.condition_kind[_NOISY], text, speech)

    def embed(self, noisy_BVC: Tensor, condition: StepCondition) -> Tensor:
        return super().embed(noisy_BVC, condition) + condition.bias

    def text(self, condition: StepCondition) -> list[Memory]:
        return condition.text

    def injection(self, index: int, condition: StepCondition) -> Injection | None:
        if index not in self.injector_after:
            return None
        number = self.injector_after[index]
        return Injection(self.injectors[number].attn, *condition.speech[number], ADAIN_EPS)

    def forward(
        self,
        noisy_BVC: Tensor,
        modulation: Modulation,
        condition: StepCondition,
        cache: KVCache,
        cache_index: int,
    ) -> Tensor:
        """One denoising pass of the current chunk; float32 in and out, returns x0 (B, V, C)."""
        x = self.embed(noisy_BVC, condition)
        for index, block in enumerate(self.blocks):
            x = block(
                x,
                modulation.blocks[index],
                condition.text[index],
                lambda q, k, v, i=index: cache.attend(i, cache_index, q, k, v),
            )
            if index in self.injector_after:
                injector = self.injector_after[index]
                x = self.injectors[injector](x, condition.speech[injector])
        return self.clean(noisy_BVC, x, modulation)

    @staticmethod
    def renoise(
        clean: Tensor, noisy: Tensor, noise: Tensor, level: float, next_level: float
    ) -> Tensor:
        """An Euler step, noisy + (next_level - level) v, in terms of clean = noisy - level v."""
        return torch.lerp(clean, noisy, next_level / level)


# (B, 3, H, W) in [0, 1], number of frames -> latents (B, Z, T, height, width) of that still video.
EncodeStill = Callable[[Tensor, int], Tensor]


class LiveAvatarGenerator(nn.Module):
    """The network with what it needs around it: a speech model, and an encoder of the reference.

    A session's conditions are its picture standing still, as the authors' multi-GPU pipeline
    begins: the first latent is the reference, all of them are the motion before the stream. That
    pipeline then takes the stream's own first latent for the reference, from the second clip on;
    here it stays the picture, as in their single-GPU one.
    """

    def __init__(self, dit: LiveAvatar, hear: nn.Module, encode_still: EncodeStill) -> None:
        super().__init__()
        assert dit.config.live_avatar is not None
        self.dit = dit
        self.hear = hear
        self._encode_still = encode_still
        self._still_frames = 1 + 4 * (sum(dit.config.live_avatar.motion_latents) - 1)

    def write_prefix(self, image: Tensor, cache: KVCache, prompt: Tensor | None) -> list[Memory]:
        """prompt: (B, rows, text_dim) -> the text's keys and values for the session's steps."""
        if prompt is None:
            raise ValueError("LiveAvatar needs the text encoder's rows of a prompt")
        still = self._encode_still(image, self._still_frames)
        text = self.dit.read_text(prompt)
        self.dit.write_conditions(still[:, :, :1], still, text, cache)
        return text

    def condition(
        self, audio_window: Tensor, controls: Tensor, session: list[Memory]
    ) -> StepCondition:
        """audio_window: (B, samples) at 16 kHz. Idle controls are not among its inputs."""
        return self.dit.condition(self.hear(audio_window), session)

    @property
    def network(self) -> LiveAvatar:
        return self.dit

    def modulate(self, level: Tensor) -> Modulation:
        return self.dit.modulate(level)

    def forward(
        self,
        noisy_BVC: Tensor,
        modulation: Modulation,
        condition: StepCondition,
        cache: KVCache,
        cache_index: int,
    ) -> Tensor:
        clean: Tensor = self.dit(noisy_BVC, modulation, condition, cache, cache_index)
        return clean

    renoise = staticmethod(LiveAvatar.renoise)
