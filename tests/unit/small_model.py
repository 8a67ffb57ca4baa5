"""The smallest model that has every part, for tests that step it many times."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from characters_serve.config import ModelConfig
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.dit import CharacterDiT

SMALL = ModelConfig(
    name="small",
    weights="synthetic",
    width=128,
    height=64,
    dim=64,
    num_blocks=2,
    num_heads=2,
    head_dim=32,
    mlp_dim=96,
    adaln_rank=16,
    rope_split=(12, 10, 10),
    noise_levels=(1.0, 0.75, 0.5, 0.25),
)


def sharpen(dit: CharacterDiT, attention: float = 4.0) -> CharacterDiT:
    """A wrong head, key or position must show in what is drawn."""
    for block in dit.blocks:
        block.q_norm.weight.mul_(attention)
    dit.final.out.weight.mul_(5)
    return dit


def session(
    denoiser: Denoiser,
    steps: int,
    *,
    seed: int = 3,
    prompt: int = 2,
    passes: Callable[[int], int] = lambda _step: 4,
) -> Tensor:
    """Latents (steps, V, C) of a session whose image, prompt, voice and controls come from the
    seed."""
    random = torch.Generator().manual_seed(seed)
    dit = denoiser._model
    assert isinstance(dit, CharacterDiT)
    model = dit.config
    image = torch.rand(1, 3, model.height, model.width, generator=random)
    words = torch.randn(1, prompt, model.prompt_dim, generator=random) if prompt else None
    denoiser.start(image, seed, words)
    latents = []
    for step in range(steps):
        mel = torch.randn(1, dit.log_mel.num_frames, model.audio.num_mels, generator=random)
        shape = (1, model.frames_per_chunk, model.num_controls)
        condition = dit.condition_on_mel(mel, torch.rand(shape, generator=random))
        latents.append(denoiser.denoise(condition, passes(step))[0].clone())
    return torch.stack(latents)
