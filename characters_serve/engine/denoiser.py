"""One step of the character: from noise to a clean chunk of latent video, in a few passes.

In: the step's audio window and controls. Out: the chunk's latent. Owns the cache, the noise and
the session's prefix. Knows nothing of processes or pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from characters_kernels.saturation import SaturationMonitor
from characters_serve.config import ModelConfig, Optimizations
from characters_serve.engine.step_graph import StepGraph
from characters_serve.model.dit import CharacterDiT, NoiseLevelModulation, StepCondition
from characters_serve.model.fp8 import calibrating, convert_projections
from characters_serve.model.kv_cache import FusedRingCache, make_cache
from characters_serve.model.shard import narrow
from characters_serve.model.steady import SteadyPass


class Denoiser:
    """batch: how many sessions roll in step with each other; serving uses one.

    With `fp8_gemm` the model's projections are converted in place and stay so.
    """

    def __init__(
        self,
        model: CharacterDiT,
        config: ModelConfig,
        optimizations: Optimizations,
        *,
        batch: int = 1,
    ) -> None:
        if batch != 1 and optimizations.fused_norm_quant:
            raise ValueError("fused_norm_quant serves one session: its batch must be 1")
        weight = model.prefix_embedding
        self._model = model
        self._config = config
        self._batch = batch
        self._device, self._dtype = weight.device, weight.dtype
        self._monitor = SaturationMonitor(self._device)
        saturated = self._monitor.counter
        if optimizations.fp8_gemm:
            convert_projections(model, saturated)
        self._cache = make_cache(
            narrow(config, model.shard),
            optimizations,
            batch=batch,
            device=self._device,
            dtype=self._dtype,
            saturated=saturated,
        )
        self._pass = SteadyPass(model, optimizations, self._cache, saturated)
        self._kept: dict[float, NoiseLevelModulation] | None = (
            {} if optimizations.precomputed_modulation else None
        )
        self._generator = torch.Generator(device=self._device)
        self._graph = self._make_graph() if optimizations.cuda_graphs else None
        self.eager_steps = 0

    @property
    def saturated(self) -> int:
        """Values of the session that did not fit their FP8 scale, as far as the host has heard."""
        return self._monitor.read()

    @torch.no_grad()
    def start(self, image: Tensor, seed: int, prompt: Tensor | None = None) -> None:
        """Begins a session. image: uint8 (H, W, 3), or float (B, 3, H, W) in [0, 1]."""
        self.reset()
        if image.dtype == torch.uint8:
            image = image.permute(2, 0, 1)[None] / 255
        self._generator.manual_seed(seed)
        with calibrating(self._model):
            self._model.write_prefix(image.to(self._device), self._cache, prompt)
        if self._graph is not None and isinstance(self._cache, FusedRingCache):
            self._graph.capture(self._cache.prefix_length, self._cache.as_if_full())
            self._monitor.reset()

    @torch.no_grad()
    def step(self, audio_window: Tensor, controls: Tensor, passes: int) -> Tensor:
        """audio_window: (window_samples,); controls: (frames, num_controls) -> (V, C) float32."""
        mel = self._model.log_mel(audio_window.to(self._device)[None])
        return self.step_on_mel(mel, controls.to(self._device)[None], passes)[0]

    @torch.no_grad()
    def step_on_mel(self, mel: Tensor, controls: Tensor, passes: int) -> Tensor:
        """mel: (B, mel frames, mels); controls: (B, frames, num_controls) -> (B, V, C) float32."""
        config = self._config
        condition = self._model.condition_on_mel(mel, controls)
        shape = (self._batch, config.video_tokens, config.token_channels)
        noise = torch.randn(shape, generator=self._generator, device=self._device)
        self._cache.begin_step()
        if self._graph is not None and self._is_steady(passes):
            clean = self._graph(noise, condition)
        else:
            self.eager_steps += 1
            clean = self._denoise(noise, condition, passes)
        self._monitor.request()
        return clean

    def reset(self) -> None:
        """Drops every trace of the session."""
        self._cache.clear()
        self._monitor.reset()
        self.eager_steps = 0

    def _denoise(self, noise: Tensor, condition: StepCondition, passes: int) -> Tensor:
        clean = torch.zeros_like(noise)
        for index, level in self._levels(passes):
            noisy = torch.lerp(clean, noise, level).to(self._dtype)
            clean = self._pass(noisy, self._modulation(level), condition, index).float()
        return clean

    def _is_steady(self, passes: int) -> bool:
        """A full window and all passes: the one shape that is captured."""
        full = isinstance(self._cache, FusedRingCache) and self._cache.is_full
        return full and len(self._levels(passes)) == len(self._config.noise_levels)

    @torch.no_grad()
    def _make_graph(self) -> StepGraph:
        config, passes = self._config, len(self._config.noise_levels)
        noise = torch.zeros(
            self._batch, config.video_tokens, config.token_channels, device=self._device
        )
        rows = 1 + config.audio_tokens + config.control_tokens
        given = torch.zeros(self._batch, rows, config.dim, device=self._device, dtype=self._dtype)

        def run(noise: Tensor, condition: StepCondition) -> Tensor:
            return self._denoise(noise, condition, passes)

        return StepGraph(run, noise, StepCondition(given[:, 1:], given[:, :1]))

    def _levels(self, passes: int) -> list[tuple[int, float]]:
        """(cache index, noise level) of each pass. Fewer passes keep the first and the last, so
        that a chunk begins as noise and is remembered at the level the context was trained at.
        Under `per_pass` every pass owns a cache that must be written, so none can be left out."""
        levels = self._config.noise_levels
        if self._config.cache_policy == "per_pass":
            return list(enumerate(levels))
        count = min(passes, len(levels))
        if count < 2:
            return [(0, levels[0])]
        chosen = [round(i * (len(levels) - 1) / (count - 1)) for i in range(count)]
        return [(0, levels[i]) for i in chosen]

    def _modulation(self, level: float) -> NoiseLevelModulation:
        if self._kept is None:
            return self._compute_modulation(level)
        if level not in self._kept:
            self._kept[level] = self._compute_modulation(level)
        return self._kept[level]

    def _compute_modulation(self, level: float) -> NoiseLevelModulation:
        return self._model.modulate(torch.full((), level, device=self._device))
