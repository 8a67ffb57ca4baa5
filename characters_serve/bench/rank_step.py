"""Times the diffusion step of one tensor-parallel rank: its shapes, synthetic weights, no network.

In: a configuration and a number of ranks. Out: for any set of flags, what a step takes, sustained,
and where the time goes. Needs torch and pydantic only, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from characters_kernels.attention import backend, fp8_attention
from characters_kernels.fp8 import E4M3, E4M3_MAX
from characters_kernels.linear_fp8 import linear_fp8
from characters_serve.bench.members import SETTLE_SHARE
from characters_serve.config import Config, ModelConfig, Optimizations
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.device import choose_device
from characters_serve.model.attention import attention
from characters_serve.model.dit import CharacterDiT, useful_flops_per_step
from characters_serve.model.kv_cache import FusedRingCache, KVCache, make_cache
from characters_serve.model.ring_writer import QueryKeyNorm
from characters_serve.model.shard import deal, narrow
from characters_serve.model.weights import load_generator

_TURNS: Final = 4
"""Weights and caches of so many blocks take turns in the bare measurements."""
_COMPILED_STEPS: Final = 3
"""Steps with a full window after which nothing is compiled or captured any more. Eager steps need
one, and take a second each where every cached key is rotated again."""

CATEGORIES: Final = ("matmul", "attention", "cache", "norm_quant", "other")
_KERNELS: Final = {
    "matmul": ("nvjet", "gemm", "cutlass3x", "_linear_kernel", "cublas", "splitk"),
    "attention": ("flash", "_attention_kernel", "fmha", "sdpa"),
    "cache": ("_ring_store", "_delta_rotate"),
    "norm_quant": ("_residual_norm", "_gelu_quant", "layer_norm", "gelu"),
}


def shard_of(model: ModelConfig, ranks: int) -> ModelConfig:
    """The geometry of rank 0, which no other rank has more to do than."""
    return narrow(model, deal(model, ranks)[0])


class RankStep:
    """One rank's model on the device, timed under one set of flags after another.

    FP8 weights replace the others in place, so sets with `fp8_gemm` come after those without.
    """

    def __init__(self, config: Config, ranks: int) -> None:
        self.device, self.dtype = choose_device(config.engine)
        self._whole = config.model
        self.config = shard_of(config.model, ranks)
        self.model = load_generator(
            config.model,
            device=self.device,
            dtype=self.dtype,
            shard=deal(config.model, ranks)[0],
        )
        generator = torch.Generator(self.device).manual_seed(0)
        model, device = self.config, self.device
        self._image = torch.rand(
            1, 3, model.height, model.width, device=device, generator=generator
        )
        prompt = torch.randn(
            1, model.prompt_slots, max(model.prompt_dim, 1), device=device, generator=generator
        )
        self._prompt = prompt if model.prompt_slots else None
        samples = self.model.log_mel.window_samples
        self._audio = 0.1 * torch.randn(samples, device=device, generator=generator)
        self._controls = torch.rand(
            model.frames_per_chunk, model.num_controls, device=device, generator=generator
        )

    def started(
        self, optimizations: Optimizations, *, reset_steps: int | None = None
    ) -> StartedStep:
        """A session under way, its window full."""
        gc.collect()
        config = self._whole
        if reset_steps is not None:
            config = config.model_copy(update={"position_reset_steps": reset_steps})
        denoiser = Denoiser(self.model, config, optimizations)
        denoiser.start(self._image, 0, self._prompt)
        passes = len(config.noise_levels)
        run = StartedStep(
            lambda: denoiser.step(self._audio, self._controls, passes), denoiser, config
        )
        settling = _COMPILED_STEPS if optimizations.compile or optimizations.cuda_graphs else 1
        for _ in range(config.window_chunks + settling):
            run.step()
        return run

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class StartedStep:
    def __init__(self, step: Callable[[], Tensor], denoiser: Denoiser, config: ModelConfig) -> None:
        self._step, self.denoiser, self._config = step, denoiser, config
        self._steps = 0

    def step(self) -> tuple[float, bool]:
        """Milliseconds from the call until the latent is there, and whether positions reset."""
        self._steps += 1
        past_first_reset = self._steps - self._config.window_chunks
        reset = past_first_reset > 0 and past_first_reset % self._config.position_reset_steps == 0
        started_s = time.perf_counter()
        latent = self._step()
        if latent.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started_s) * 1000, reset

    def sustained_ms(self, seconds: float) -> list[float]:
        """Steps without a reset, for so long that the card holds its steady clock."""
        times_ms: list[float] = []
        started_s = time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_s) < seconds or not times_ms:
            step_ms, reset = self.step()
            if not reset and (elapsed_s > seconds * SETTLE_SHARE or seconds == 0):
                times_ms.append(step_ms)
        return times_ms

    def reset_extra_ms(self, resets: int) -> float:
        """Median step with a reset less the median of the steps around it."""
        with_reset: list[float] = []
        others: list[float] = []
        while len(with_reset) < resets:
            step_ms, reset = self.step()
            (with_reset if reset else others).append(step_ms)
        return median(with_reset) - median(others)


def summary(times_ms: list[float], model: ModelConfig) -> dict[str, float]:
    step_ms = median(times_ms)
    p99_ms = sorted(times_ms)[min(len(times_ms) - 1, math.ceil(0.99 * len(times_ms)) - 1)]
    return {
        "step_ms_median": round(step_ms, 2),
        "step_ms_p99": round(p99_ms, 2),
        "steps": len(times_ms),
        "tflops": round(useful_flops_per_step(model) / step_ms / 1e9, 1),
    }


def by_category(run: StartedStep, steps: int = 1) -> dict[str, float] | None:
    """Milliseconds of a step that its kernels of each category take, by their names.

    None without a GPU. "other" holds what has no kernel of its own: torch's elementwise kernels,
    which on the plain path do the cache's and the norms' work too.
    """
    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            run.step()
    spent_ms = dict.fromkeys(CATEGORIES, 0.0)
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            spent_ms[category_of(event.name)] += event.device_time / 1000 / steps
    return {name: round(value, 2) for name, value in spent_ms.items()}


def category_of(kernel: str) -> str:
    name = kernel.lower()
    # Flash attention is a CUTLASS kernel too, so attention is asked first.
    for category in ("attention", "cache", "norm_quant", "matmul"):
        if any(part in name for part in _KERNELS[category]):
            return category
    return "other"


def trace(run: StartedStep, path: Path) -> None:
    """Writes one step's trace, which ui.perfetto.dev opens."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run.step()
    profile.export_chrome_trace(str(path))


def floor_ms(rank: RankStep, calls: int) -> dict[str, float]:
    """Bare FP8 matmuls and attention of a step with library kernels, `calls` blocks in a row.

    Weights and caches of several blocks take turns, since one block's would stay in the cache of
    the GPU. On CPUs there is no such floor.
    """
    model, device = rank.config, rank.device
    inner = model.num_heads * model.head_dim
    columns, depth = 3 * inner + model.mlp_dim, inner + model.mlp_dim
    tokens = model.tokens_per_chunk
    one = torch.ones(1, device=device)
    x, joined = random_e4m3(device, tokens, model.dim), random_e4m3(device, tokens, depth)
    weights = [
        (random_e4m3(device, columns, model.dim), random_e4m3(device, model.dim, depth))
        for _ in range(_TURNS)
    ]

    def matmuls() -> None:
        for call in range(calls):
            in_weight, out_weight = weights[call % _TURNS]
            linear_fp8(x, in_weight, one, one, rank.dtype)
            linear_fp8(joined, out_weight, one, one, rank.dtype)

    per_step = model.all_reduces_per_step / calls
    matmul_ms = graph_ms(matmuls) * per_step
    fp8 = Optimizations(fp8_kv_cache=True)
    attention_ms = graph_ms(_attention_alone(rank, fp8, calls)) * per_step
    return {
        "matmul_ms": round(matmul_ms, 2),
        "attention_ms": round(attention_ms, 2),
        "sum_ms": round(matmul_ms + attention_ms, 2),
    }


def random_e4m3(device: torch.device, *shape: int) -> Tensor:
    values = torch.randn(shape, device=device, dtype=torch.bfloat16)
    return (values * 16).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _attention_alone(
    rank: RankStep, optimizations: Optimizations, calls: int
) -> Callable[[], None]:
    """`calls` times attention over full caches, on the shapes and in the format of a step."""
    model, device = rank.config, rank.device
    heads = (model.num_heads, model.head_dim)
    q = random_e4m3(device, model.tokens_per_chunk, *heads)
    caches = [
        tuple(random_e4m3(device, model.cache_slots, *heads) for _ in range(2))
        for _ in range(_TURNS)
    ]
    if optimizations.fp8_kv_cache:
        attend = fp8_attention(backend(device))
        scales = torch.ones(3, model.num_heads, device=device) / 8

        def in_fp8() -> None:
            for call in range(calls):
                attend(q, *caches[call % _TURNS], *scales)

        return in_fp8

    plain_q = q[None].to(rank.dtype) / 8
    plain = [tuple(x[None].to(rank.dtype) / 8 for x in pair) for pair in caches]

    def in_float() -> None:
        for call in range(calls):
            attention(plain_q, *plain[call % _TURNS])

    return in_float


def upkeep_ms(rank: RankStep, optimizations: Optimizations, calls: int) -> float:
    """Milliseconds of a step that all `attend` calls take beyond attention itself.

    Calls every cached block and pass as a step does, `calls` at most, with a full window; then the
    attention alone on the same shapes. Includes norm and rotation where they are one kernel with
    the store, and the shift of the window where it is copied.
    """
    model = rank.config
    cache = make_cache(model, optimizations, device=rank.device, dtype=rank.dtype)
    block = rank.model.blocks[0]
    inner = model.num_heads * model.head_dim
    columns = 3 * inner + model.mlp_dim
    projected = torch.randn(
        1, model.tokens_per_chunk, columns, device=rank.device, dtype=rank.dtype
    )
    q, k, v, _ = block.heads(projected)
    prefix = k[:, : model.prefix_slots]
    chosen = [
        (index, cached) for cached in range(model.num_caches) for index in range(model.num_blocks)
    ][:calls]
    for index in range(model.num_blocks):
        cache.calibrate(index, q, k, v)
        for cached in range(model.num_caches):
            cache.store_prefix(index, cached, prefix, prefix)
    for _ in range(model.window_chunks + 1):
        cache.begin_step()

    def attended() -> None:
        for index, cached in chosen:
            _attend(cache, index, cached, projected, q, k, v, block.q_norm.weight)

    # What can be captured is timed as the captured step runs it.
    timer = graph_ms if isinstance(cache, FusedRingCache) else timed_ms
    attention_only = _attention_alone(rank, optimizations, len(chosen))
    spent_ms = timer(attended) - timer(attention_only)
    shift_ms = timed_ms(cache.begin_step)
    per_step = model.num_blocks * len(model.noise_levels) / len(chosen)
    return spent_ms * per_step + shift_ms


def _attend(
    cache: KVCache,
    index: int,
    cached: int,
    projected: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
) -> None:
    if isinstance(cache, FusedRingCache):
        norm = QueryKeyNorm(weight, weight, 1e-6)
        cache.attend_projected(index, cached, projected[0], norm)
    else:
        cache.attend(index, cached, q, k, v)


def timed_ms(call: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds of a call, launched eagerly, until the device is done."""
    times_ms = []
    for _ in range(repeats + 1):
        started_s = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - started_s) * 1000)
    return median(times_ms[1:])


def graph_ms(call: Callable[[], object], seconds: float = 1.0) -> float:
    """Median milliseconds of a captured call, replayed for a while; eager where there is no GPU."""
    if not torch.cuda.is_available():
        return timed_ms(call)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times_ms: list[float] = []
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < seconds or len(times_ms) < 5:
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return median(times_ms[len(times_ms) // 4 :])


def describe(rank: RankStep, ranks: int) -> dict[str, Any]:
    """What was measured, for the head of a result."""
    model: CharacterDiT = rank.model
    return {
        "model": rank.config.name,
        "weights": rank.config.weights,
        "shard_of": ranks,
        "heads": rank.config.num_heads,
        "mlp_dim": rank.config.mlp_dim,
        "blocks": rank.config.num_blocks,
        "cache_slots": rank.config.cache_slots,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(rank.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
