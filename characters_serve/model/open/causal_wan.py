"""Causal Wan: text (or a picture) to an endless video, a chunk of latents after the other.

The models of Self-Forcing (arXiv 2506.08009), Causal-Forcing and LongLive (arXiv 2509.22622), on
the 1.3B, 14B and TI2V-5B sizes of Wan; one latent a chunk, or several. In: a noisy chunk, its noise
level, the text, and a cache that remembers the stream. Out: the clean chunk (x0). Knows nothing of
sessions or pixels.

A chunk's passes are followed by one on the clean latents at noise level 0, whose keys and values
stay (`clean_pass`). Every pass starts from noise drawn anew (`redraw_noise`).

Letters: B batch, V video tokens of a chunk, C channels of a token, D model dim, Z latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from characters_serve.config import ModelConfig
from characters_serve.model.kv_cache import KVCache
from characters_serve.model.linear import AllReduce, alone
from characters_serve.model.open.frame_cache import PlainFrameCache
from characters_serve.model.open.wan import (
    Head,
    Memory,
    Modulation,
    NoiseLevel,
    WanBlock,
    WanNetwork,
    text_embedding,
    tokens_of,
)
from characters_serve.model.shard import Shard, deal

# (B, 3, H, W) in [0, 1] -> latents (B, Z, 1, height, width).
EncodeImage = Callable[[Tensor], Tensor]


class CausalWan(WanNetwork):
    """encode_image: for checkpoints that may start from a picture; None starts from text alone."""

    def __init__(
        self,
        model: ModelConfig,
        encode_image: EncodeImage | None = None,
        shard: Shard | None = None,
        all_reduce: AllReduce = alone,
    ) -> None:
        super().__init__()
        assert model.wan is not None and model.causal_wan is not None
        shard = shard or deal(model, 1)[0]
        self.config, self.shard = model, shard
        self.encode_image = encode_image
        self.noise_level = NoiseLevel(model.wan.freq_dim, model.dim)
        self.text_embedding = text_embedding(model.wan.text_dim, model.dim)
        self.patch_embedding = nn.Linear(model.token_channels, model.dim)
        # ModuleList is no generic type; as a sequence its elements are typed.
        self.blocks: Sequence[WanBlock] = nn.ModuleList(  # type: ignore[assignment]
            WanBlock(model, shard, all_reduce) for _ in range(model.num_blocks)
        )
        self.head = Head(model.dim, model.token_channels)

    def write_prefix(self, image: Tensor, cache: KVCache, prompt: Tensor | None) -> list[Memory]:
        """Begins a stream: the text's keys and values, and the picture as its first latent."""
        assert self.config.wan is not None
        if prompt is None:
            prompt = image.new_zeros(image.shape[0], 0, self.config.wan.text_dim)
        text = self.read_text(prompt)
        if self.encode_image is not None:
            assert isinstance(cache, PlainFrameCache)
            first = tokens_of(self.encode_image(image).float())
            cache.begin_step(num_latents=1)
            self(first, self.modulate(torch.zeros((), device=first.device)), text, cache, 0)
        return text

    @staticmethod
    def condition(audio_window: Tensor, controls: Tensor, session: list[Memory]) -> list[Memory]:
        """The text is all: these models neither hear nor are led."""
        return session

    def text(self, condition: list[Memory]) -> list[Memory]:
        return condition

    def forward(
        self,
        noisy_BVC: Tensor,
        modulation: Modulation,
        condition: list[Memory],
        cache: KVCache,
        cache_index: int,
    ) -> Tensor:
        """One pass over the current chunk; float32 in and out, returns x0 (B, V, C)."""
        x = self.embed(noisy_BVC, condition)
        for index, block in enumerate(self.blocks):
            x = block(
                x,
                modulation.blocks[index],
                condition[index],
                lambda q, k, v, i=index: cache.attend(i, cache_index, q, k, v),
            )
        return self.clean(noisy_BVC, x, modulation)

    @staticmethod
    def renoise(
        clean: Tensor, noisy: Tensor, noise: Tensor, level: float, next_level: float
    ) -> Tensor:
        return torch.lerp(clean, noise, next_level)
