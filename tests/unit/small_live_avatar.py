"""The smallest LiveAvatar that has every part, and weights for it that any machine can draw."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from characters_serve.config import AudioConfig, LiveAvatarConfig, ModelConfig, WanConfig
from characters_serve.model.open.live_avatar import LiveAvatar
from characters_serve.model.open.recipes import recipes_for

SMALL = ModelConfig(
    family="live_avatar",
    name="small-live-avatar",
    weights="synthetic",
    decoder="wan21",
    decoder_dim=4,
    width=64,
    height=128,
    fps=25,
    frames_per_chunk=12,
    latents_per_chunk=3,
    latent_stride=8,
    patch=2,
    latent_channels=16,
    audio=AudioConfig(
        sample_rate=16_000, hop=640, win=640, n_fft=640, past_frames=10, future_frames=2
    ),
    audio_tokens=0,
    control_tokens=0,
    reference_stride=16,
    dim=48,
    num_blocks=3,
    num_heads=2,
    head_dim=24,
    mlp_dim=96,
    rope_split=(8, 8, 8),
    rope_theta=(1e4, 1e4, 1e4),
    noise_levels=(1.0, 0.85769231, 0.60215054, 0.00892857),
    cache_policy="per_pass",
    window_chunks=2,
    wan=WanConfig(freq_dim=32, text_dim=24, text_len=8),
    live_avatar=LiveAvatarConfig(audio_layers=5, audio_dim=20, audio_after_blocks=(0, 2)),
)


def drawn(shape: tuple[int, ...], seed: int, half_width: float = 1.7) -> Tensor:
    """float32, even between +- half_width (1.7: a standard deviation of one), from PCG64."""
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape))) >> np.uint64(11)
    values = (raw.astype(np.float64) * 2.0**-52 - 1) * half_width
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def published(model: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint of the published layout. No part is left out by being zero or one, and matrices
    keep the size of what they multiply."""
    shapes = {k: v for recipe in recipes_for(model).values() for k, v in recipe.sources.items()}
    state = {}
    for index, name in enumerate(sorted(shapes)):
        shape = shapes[name]
        if len(shape) > 1 and name.endswith(".weight"):
            value = drawn(shape, 1000 * seed + index, 1.7 / int(np.prod(shape[1:])) ** 0.5)
        else:
            value = drawn(shape, 1000 * seed + index, 0.3)
        state[name] = value + 1 if ".norm" in name and name.endswith(".weight") else value
    return state


def network(model: ModelConfig = SMALL) -> LiveAvatar:
    state = published(model)
    dit = LiveAvatar(model)
    dit.load_state_dict(
        {
            key: recipe.build(*(state[name] for name in recipe.sources))
            for key, recipe in recipes_for(model).items()
        }
    )
    return dit.eval().requires_grad_(False)
