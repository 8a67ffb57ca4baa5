"""One step of the character: from noise to a clean chunk of latent video, in a few passes.

In: the step's audio window and controls. Out: the chunk's latent. Owns the cache, the noise and
the session's prefix. Knows nothing of processes or pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from characters_serve.config import ModelConfig, Optimizations
from characters_serve.model.kv_cache import KVCache, make_cache


class Generator(Protocol):
    """What a family of models is to the engine. Letters: B batch, V video tokens, C channels.

    A session's text, a step's condition and a level's modulation are the family's own; the engine
    keeps them and hands them back.
    """

    def write_prefix(self, image: Tensor, cache: KVCache, prompt: Tensor | None) -> Any:
        """Begins a session: fills the cache's prefix from the image, float (B, 3, H, W) in [0, 1],
        and returns what else the session's steps need."""

    def condition(self, audio_window: Tensor, controls: Tensor, session: Any) -> Any:
        """audio_window: (B, samples) in [-1, 1]; controls: (B, frames, num_controls)."""

    def modulate(self, level: Tensor) -> Any:
        """What a pass takes from its noise level, ()."""

    def __call__(
        self, noisy_BVC: Tensor, modulation: Any, condition: Any, cache: KVCache, cache_index: int
    ) -> Tensor:
        """One pass: float32 (B, V, C) -> the clean chunk as it sees it, of the same shape."""

    def renoise(
        self, clean: Tensor, noisy: Tensor, noise: Tensor, level: float, next_level: float
    ) -> Tensor:
        """The next pass's input, from a pass at `level` that saw `noisy` and found `clean`."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Denoiser:
    """batch: how many sessions roll in step with each other; serving uses one. prompt: of sessions
    that start without one."""

    def __init__(
        self,
        model: Generator,
        config: ModelConfig,
        optimizations: Optimizations,
        *,
        batch: int = 1,
        prompt: Tensor | None = None,
    ) -> None:
        weight = next(iter(model.parameters()))
        self._model = model
        self._config = config
        self._batch = batch
        self._device = weight.device
        self._cache = make_cache(
            config, optimizations, batch=batch, device=self._device, dtype=weight.dtype
        )
        self._kept: dict[float, Any] | None = {} if optimizations.precomputed_modulation else None
        self._prompt = prompt
        self._session: Any = None
        self._chunks = 0
        self._generator = torch.Generator(device=self._device)

    @torch.no_grad()
    def start(self, image: Tensor, seed: int, prompt: Tensor | None = None) -> None:
        """Begins a session. image: uint8 (H, W, 3), or float (B, 3, H, W) in [0, 1]."""
        self.reset()
        if image.dtype == torch.uint8:
            image = image.permute(2, 0, 1)[None] / 255
        self._generator.manual_seed(seed)
        prompt = self._prompt if prompt is None else prompt
        self._session = self._model.write_prefix(image.to(self._device), self._cache, prompt)

    @torch.no_grad()
    def step(self, audio_window: Tensor, controls: Tensor, passes: int) -> Tensor:
        """audio_window: (window_samples,); controls: (frames, num_controls) -> (V, C) float32."""
        window, moves = audio_window.to(self._device)[None], controls.to(self._device)[None]
        return self.denoise(self._model.condition(window, moves, self._session), passes)[0]

    @torch.no_grad()
    def denoise(self, condition: Any, passes: int, noise: Tensor | None = None) -> Tensor:
        """condition: of the model; noise: (B, V, C), drawn if None -> (B, V, C) float32."""
        if noise is None:
            noise = self._draw()
        levels = self._levels(passes)
        self._cache.begin_step()
        self._chunks += 1
        noisy = noise * levels[0][1]
        following = [level for _, level in levels[1:]]
        for (index, level), next_level in zip(levels, [*following, None], strict=True):
            modulation = self._modulation(level)
            clean = self._model(noisy, modulation, condition, self._cache, index).float()
            if next_level is not None:
                if self._config.redraw_noise:
                    noise = self._draw()
                noisy = self._model.renoise(clean, noisy, noise, level, next_level)
        if self._config.cache_policy == "clean_pass":
            self._model(clean, self._modulation(0.0), condition, self._cache, 0)
        return clean

    def reset(self) -> None:
        """Drops every trace of the session."""
        self._cache.clear()
        self._chunks = 0
        self._session = None

    def _draw(self) -> Tensor:
        shape = (self._batch, self._config.video_tokens, self._config.token_channels)
        return torch.randn(shape, generator=self._generator, device=self._device)

    def _levels(self, passes: int) -> list[tuple[int, float]]:
        """(cache index, noise level) of each pass. Fewer passes keep the first and the last, so
        that a chunk begins as noise and is remembered at the level the context was trained at.
        Under `per_pass` every pass owns a cache that must be written, so none can be left out."""
        levels = self._config.noise_levels
        if self._config.first_noise_levels and self._chunks == 0:
            return [(0, level) for level in self._config.first_noise_levels]
        if self._config.cache_policy == "per_pass":
            return list(enumerate(levels))
        count = min(passes, len(levels))
        if count < 2:
            return [(0, levels[0])]
        chosen = [round(i * (len(levels) - 1) / (count - 1)) for i in range(count)]
        return [(0, levels[i]) for i in chosen]

    def _modulation(self, level: float) -> Any:
        if self._kept is None:
            return self._compute_modulation(level)
        if level not in self._kept:
            self._kept[level] = self._compute_modulation(level)
        return self._kept[level]

    def _compute_modulation(self, level: float) -> Any:
        return self._model.modulate(torch.tensor(level, device=self._device))
