"""The smallest causal Wan model that has every part, and the streams that are recorded of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from characters_serve.config import ModelConfig, Optimizations
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.open.causal_wan import CausalWan, EncodeImage
from characters_serve.model.open.frame_cache import PlainFrameCache
from characters_serve.model.open.recipes import recipes_for
from tests.unit.small_live_avatar import drawn, published

LEVELS = (1.0, 0.9375, 0.8333333, 0.625)
ROWS, COLUMNS, CHANNELS = 2, 3, 16

# (latents a chunk, window, sink, sink's distance, levels, the first chunk's, from an image, chunks)
STREAMS: dict[str, tuple[int, int, int, str, tuple[float, ...], tuple[float, ...], bool, int]] = {
    "chunks": (3, 9, 3, "growing", LEVELS, (), False, 5),
    "odd window": (3, 7, 1, "growing", LEVELS, (), False, 5),
    "constant sink": (3, 7, 1, "constant", LEVELS, (), False, 5),
    "single latents": (1, 5, 2, "growing", (1.0, 0.8333333), LEVELS, False, 9),
    "from an image": (1, 5, 2, "constant", (1.0, 0.8333333), LEVELS, True, 9),
}


def model_of(name: str) -> ModelConfig:
    latents, window, sink, distance, levels, first, _, _ = STREAMS[name]
    return causal_wan(
        latents_per_chunk=latents,
        frames_per_chunk=4 * latents,
        noise_levels=levels,
        first_noise_levels=first,
        causal_wan={
            "window_latents": window,
            "sink_latents": sink,
            "sink_distance": distance,
        },
    )


def causal_wan(**changes: Any) -> ModelConfig:
    small: dict[str, Any] = {
        "family": "causal_wan",
        "name": "small-causal-wan",
        "weights": "synthetic",
        "width": 16 * COLUMNS,
        "height": 16 * ROWS,
        "fps": 16,
        "frames_per_chunk": 12,
        "latents_per_chunk": 3,
        "latent_stride": 8,
        "patch": 2,
        "latent_channels": CHANNELS,
        "audio_tokens": 0,
        "control_tokens": 0,
        "reference_stride": 16,
        "dim": 48,
        "num_blocks": 2,
        "num_heads": 2,
        "head_dim": 24,
        "mlp_dim": 96,
        "rope_split": (8, 8, 8),
        "rope_theta": (1e4, 1e4, 1e4),
        "noise_levels": LEVELS,
        "redraw_noise": True,
        "cache_policy": "clean_pass",
        "wan": {"freq_dim": 32, "text_dim": 24, "text_len": 8},
        "causal_wan": {"window_latents": 9, "sink_latents": 3},
    }
    return ModelConfig.model_validate(small | changes)


def network(model: ModelConfig, encode_image: EncodeImage | None = None) -> CausalWan:
    state, recipes = published(model), recipes_for(model)
    dit = CausalWan(model, encode_image)
    dit.load_state_dict(
        {
            key: recipe.build(*map(state.__getitem__, recipe.sources))
            for key, recipe in recipes.items()
        }
    )
    return dit.eval().requires_grad_(False)


def text_of(seed: int = 50) -> Tensor:
    return drawn((1, 5, 24), seed)


def first_latent() -> Tensor:
    return drawn((1, CHANNELS, 1, 2 * ROWS, 2 * COLUMNS), 60)


class Noise:
    """Draws that any machine repeats, in the order in which they are asked for."""

    def __init__(self, model: ModelConfig) -> None:
        self._shape = (1, model.video_tokens, model.token_channels)
        self.drawn = 0

    def __call__(self) -> Tensor:
        self.drawn += 1
        return drawn(self._shape, 1000 + self.drawn)


def stream(
    name: str, optimizations: Optimizations, num_chunks: int | None = None
) -> tuple[Tensor, list[list[int]]]:
    """-> latents (chunks, V, C), and which latents were remembered after each chunk."""
    *_, image, recorded_chunks = STREAMS[name]
    model = model_of(name)
    dit = network(model, (lambda _: first_latent()) if image else None)
    denoiser = Denoiser(dit, model, optimizations)
    denoiser._draw = Noise(model)  # type: ignore[method-assign]
    denoiser.start(torch.zeros(1, 3, model.height, model.width), 0, text_of())
    assert isinstance(denoiser._cache, PlainFrameCache)
    chunks, remembered = [], []
    for _ in range(num_chunks or recorded_chunks):
        chunks.append(denoiser.denoise(denoiser._session, len(model.noise_levels))[0])
        remembered.append(list(denoiser._cache.latents))
    return torch.stack(chunks), remembered
