"""One step of the character: from noise to a clean chunk of latent video, in a few passes.

In: the step's audio window and controls. Out: the chunk's latent. Owns the cache, the noise and
the session's prefix. Knows nothing of processes or pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from characters_kernels.saturation import SaturationMonitor
from characters_serve.config import ModelConfig, Optimizations
from characters_serve.engine.step_graph import StepGraph
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.fp8 import calibrating, convert_projections, forget_scales
from characters_serve.model.kv_cache import FusedCache, KVCache, make_cache
from characters_serve.model.open.steady import WanSteadyPass
from characters_serve.model.open.wan import WanNetwork
from characters_serve.model.shard import narrow
from characters_serve.model.steady import SteadyPass

Pass = Callable[[Tensor, Any, Any, int], Tensor]
"""(noisy chunk, modulation, condition, cache index) -> the clean chunk."""


class Generator(Protocol):
    """What a family of models is to the engine. Letters: B batch, V video tokens, C channels.

    A session's text, a step's condition and a level's modulation are the family's own; the engine
    keeps them and hands them back.
    """

    @property
    def network(self) -> CharacterDiT | WanNetwork:
        """The part that the passes run through; of a tensor-parallel rank, its shard."""

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

    def modules(self) -> Iterator[nn.Module]: ...


class Denoiser:
    """batch: how many sessions roll in step with each other; serving uses one. prompt: of sessions
    that start without one.

    With `fp8_gemm` the model's projections are converted in place and stay so.
    eager_steps: those of the session that the captured graph declined.
    """

    def __init__(
        self,
        model: Generator,
        config: ModelConfig,
        optimizations: Optimizations,
        *,
        batch: int = 1,
        prompt: Tensor | None = None,
    ) -> None:
        if batch != 1 and optimizations.fused_norm_quant:
            raise ValueError("fused_norm_quant serves one session: its batch must be 1")
        weight = next(iter(model.parameters()))
        self._model = model
        self._config = config
        self._batch = batch
        self._device, self._dtype = weight.device, weight.dtype
        self._monitor = SaturationMonitor(self._device)
        saturated = self._monitor.counter
        self._network = network = model.network
        if optimizations.fp8_gemm:
            convert_projections(network, saturated)
        self._cache = make_cache(
            narrow(config, network.shard),
            optimizations,
            batch=batch,
            device=self._device,
            dtype=self._dtype,
            saturated=saturated,
        )
        self._plain_chunks = 0 if isinstance(network, CharacterDiT) else _plain_chunks(config)
        self._pass = self._make_pass(optimizations, saturated)
        self._kept: dict[float, Any] | None = {} if optimizations.precomputed_modulation else None
        self._prompt = prompt
        self._session: Any = None
        self._chunks = 0
        self._generator = torch.Generator(device=self._device)
        self._captures = optimizations.cuda_graphs
        self._graph: StepGraph | None = None
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
        prompt = self._prompt if prompt is None else prompt
        forget_scales(self._network.modules())
        with calibrating(self._network.modules()):
            self._session = self._model.write_prefix(image.to(self._device), self._cache, prompt)
        if self._captures and isinstance(self._cache, FusedCache):
            if self._graph is None:
                self._graph = self._make_graph()
            self._graph.capture(self._cache.prefix_length, self._cache.as_if_full())
            self._monitor.reset()

    @torch.no_grad()
    def step(self, audio_window: Tensor, controls: Tensor, passes: int) -> Tensor:
        """audio_window: (samples,); controls: (frames, num_controls) -> (V, C) float32."""
        window, moves = audio_window.to(self._device)[None], controls.to(self._device)[None]
        return self.denoise(self._model.condition(window, moves, self._session), passes)[0]

    @torch.no_grad()
    def denoise(self, condition: Any, passes: int, noise: Tensor | None = None) -> Tensor:
        """condition: of the model; noise: (B, V, C), drawn if None -> (B, V, C) float32."""
        levels = self._levels(passes)
        noises = [self._draw() if noise is None else noise]
        if self._config.redraw_noise:
            noises += [self._draw() for _ in levels[1:]]
        self._cache.begin_step()
        self._chunks += 1
        if self._graph is not None and self._is_steady(levels):
            clean = self._graph(noises, condition)
        else:
            self.eager_steps += self._graph is not None
            clean = self._run_eagerly(noises, condition, levels)
        self._monitor.request()
        return clean

    def reset(self) -> None:
        """Drops every trace of the session."""
        self._cache.clear()
        self._chunks = 0
        self._session = None
        self._monitor.reset()
        self.eager_steps = 0

    def release(self) -> None:
        """Ends its use. Before the ranks of a group part: the captured step holds their sums."""
        if self._graph is not None:
            self._graph.release()

    def _run_eagerly(
        self, noises: list[Tensor], condition: Any, levels: list[tuple[int, float]]
    ) -> Tensor:
        if self._chunks > self._plain_chunks:
            return self._run_passes(self._pass, noises, condition, levels)
        with calibrating(self._network.modules()):
            return self._run_passes(self._whole_pass, noises, condition, levels)

    def _run_passes(
        self, run: Pass, noises: list[Tensor], condition: Any, levels: list[tuple[int, float]]
    ) -> Tensor:
        """noises: the chunk's own, and, where each pass has noise of its own, those."""
        noisy = noises[0] * levels[0][1]
        following = [level for _, level in levels[1:]]
        for number, ((index, level), next_level) in enumerate(
            zip(levels, [*following, None], strict=True), start=1
        ):
            clean = run(noisy, self._modulation(level), condition, index).float()
            if next_level is not None:
                noise = noises[number] if self._config.redraw_noise else noises[0]
                noisy = self._model.renoise(clean, noisy, noise, level, next_level)
        if self._config.cache_policy == "clean_pass":
            run(clean, self._modulation(0.0), condition, 0)
        return clean

    def _make_pass(self, optimizations: Optimizations, saturated: Tensor) -> Pass:
        network = self._network
        if isinstance(network, CharacterDiT):
            return SteadyPass(network, optimizations, self._cache, saturated)
        fused = optimizations.fused_norm_quant or optimizations.fused_pre_attention
        if fused or optimizations.compile:
            return WanSteadyPass(network, optimizations, self._cache, saturated)
        return self._whole_pass

    def _whole_pass(
        self, noisy: Tensor, modulation: Any, condition: Any, cache_index: int
    ) -> Tensor:
        return self._model(noisy, modulation, condition, self._cache, cache_index)

    def _draw(self) -> Tensor:
        shape = (self._batch, self._config.video_tokens, self._config.token_channels)
        return torch.randn(shape, generator=self._generator, device=self._device)

    def _is_steady(self, levels: list[tuple[int, float]]) -> bool:
        """A full window and all passes: the one shape that is captured."""
        full = isinstance(self._cache, FusedCache) and self._cache.is_full
        return full and len(levels) == len(self._config.noise_levels)

    def _make_graph(self) -> StepGraph:
        config = self._config
        levels = self._steady_levels(len(config.noise_levels))
        noise = torch.zeros(
            self._batch, config.video_tokens, config.token_channels, device=self._device
        )
        count = len(levels) if config.redraw_noise else 1
        window = torch.zeros(self._batch, config.audio_window_samples, device=self._device)
        controls = torch.zeros(
            self._batch, config.frames_per_chunk, config.num_controls, device=self._device
        )
        condition = self._model.condition(window, controls, self._session)

        def run(noises: list[Tensor], condition: Any) -> Tensor:
            return self._run_passes(self._pass, noises, condition, levels)

        return StepGraph(run, [noise] * count, condition)

    def _levels(self, passes: int) -> list[tuple[int, float]]:
        """(cache index, noise level) of each pass of the next chunk."""
        if self._config.first_noise_levels and self._chunks == 0:
            return [(0, level) for level in self._config.first_noise_levels]
        return self._steady_levels(passes)

    def _steady_levels(self, passes: int) -> list[tuple[int, float]]:
        """Fewer passes keep the first and the last, so that a chunk begins as noise and is
        remembered at the level the context was trained at. Under `per_pass` every pass owns a
        cache that must be written, so none can be left out."""
        levels = self._config.noise_levels
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
        return self._model.modulate(torch.full((), level, device=self._device))


def _plain_chunks(config: ModelConfig) -> int:
    """Of an open family's session, the first ones, which go through its own forward pass: from
    them come the scales of FP8, and a sink that moves is kept unrotated."""
    sink = config.causal_wan.sink_latents if config.causal_wan else 0
    return max(1, math.ceil(sink / config.latents_per_chunk))
