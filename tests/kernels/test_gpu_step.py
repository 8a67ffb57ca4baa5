"""The whole step on a GPU: it never waits, never allocates, and says what the plain path says."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from characters_kernels.saturation import SaturationMonitor
from characters_serve.bench.rank_step import shard_of
from characters_serve.config import ModelConfig, Optimizations, load_config
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.weights import load_generator
from tests.kernels.gpu_rig import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU of Hopper's class"),
]

CONFIGS = Path(__file__).parents[2] / "configs"
BIG = load_config([CONFIGS / "characters-57b.yaml"])
# The shapes of one rank of four; two of sixty blocks, and resets on steps 12, 17 and 22.
MODEL = shard_of(BIG.model, 4).model_copy(update={"num_blocks": 2, "position_reset_steps": 5})
PLAIN = Optimizations(**dict.fromkeys(Optimizations.model_fields, False))
FAST = BIG.optimizations
STEPS = 24


@functools.cache
def network() -> CharacterDiT:
    dit = load_generator(MODEL, device=torch.device("cuda"), dtype=torch.bfloat16)
    # Random weights would leave nothing of what is attended to; these do.
    dit.final.out.weight.mul_(3)
    return dit


class Session:
    def __init__(
        self, optimizations: Optimizations, model: ModelConfig = MODEL, dit: Any = None
    ) -> None:
        self.model = model
        self.dit = copy.deepcopy(dit if dit is not None else network())
        self.denoiser = Denoiser(self.dit, model, optimizations)
        self.device = next(self.dit.parameters()).device

    def start(self, prompt: int = 40) -> None:
        random = torch.Generator().manual_seed(1)
        shape = (1, 3, self.model.height, self.model.width)
        image = torch.rand(shape, generator=random)
        words = None
        if self.model.prompt_slots:
            words = torch.randn(1, prompt, self.model.prompt_dim, generator=random)
            words = words.to(self.device)
        self.denoiser.start(image.to(self.device), 5, words)
        window = 0.1 * torch.randn(self.dit.log_mel.window_samples, generator=random)
        controls = torch.rand(
            self.model.frames_per_chunk, self.model.num_controls, generator=random
        )
        self._inputs = window.to(self.device), controls.to(self.device)

    def step(self) -> Tensor:
        return self.denoiser.step(*self._inputs, len(self.model.noise_levels))

    def run(self, steps: int) -> Tensor:
        return torch.stack([self.step().clone() for _ in range(steps)]).cpu()


@functools.cache
def fast() -> Session:
    session = Session(FAST)
    session.start()
    session.run(MODEL.window_chunks + 8)  # past the first reset: all is compiled
    return session


def test_a_steady_step_never_waits_for_the_device() -> None:
    session = fast()
    with no_waits():
        for _ in range(2 * MODEL.position_reset_steps):
            session.step()


def test_a_planted_item_is_caught() -> None:
    session = fast()
    begin = session.denoiser._cache.begin_step

    def waits() -> None:
        begin()
        session.denoiser._monitor.counter.item()

    session.denoiser._cache.begin_step = waits  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="synchroniz"), no_waits():
            session.step()
    finally:
        session.denoiser._cache.begin_step = begin  # type: ignore[method-assign]


def test_a_new_session_is_not_told_the_clamped_values_of_the_last() -> None:
    monitor = SaturationMonitor(torch.device("cuda"))
    torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call]
    monitor.counter += 3
    monitor.request()  # in flight
    monitor.reset()
    assert monitor.read() == 0
    monitor.request()
    torch.cuda.synchronize()
    assert monitor.read() == 0


def test_a_steady_step_is_one_replay_and_takes_no_memory() -> None:
    session = fast()
    session.run(2)
    torch.cuda.synchronize()
    eager = session.denoiser.eager_steps
    before = torch.cuda.memory_stats()
    for _ in range(2 * MODEL.position_reset_steps):
        session.step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for key in ("num_device_alloc", "reserved_bytes.all.current", "allocated_bytes.all.current"):
        assert after[key] == before[key], key
    assert session.denoiser.eager_steps == eager


def test_a_hundred_prompt_lengths_leave_memory_flat() -> None:
    session = fast()
    reserved = []
    for length in range(1, 101):
        session.start(length)
        session.step()
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[20] * 1.01


@functools.cache
def plain_latents() -> Tensor:
    session = Session(PLAIN)
    session.start()
    return session.run(STEPS)


@functools.cache
def float32_latents() -> Tensor:
    session = Session(PLAIN, dit=copy.deepcopy(network()).float())
    session.start()
    return session.run(STEPS)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_fused_paths_in_bf16_err_no_more_than_the_plain_path() -> None:
    session = Session(Optimizations(fused_norm_quant=True, fused_pre_attention=True))
    session.start()
    truth = float32_latents()
    assert error(session.run(STEPS), truth) <= 2 * error(plain_latents(), truth) + 1e-3


def test_the_captured_step_is_the_eager_step() -> None:
    eager = Session(FAST.model_copy(update={"cuda_graphs": False}))
    eager.start()
    captured = Session(FAST)
    captured.start()
    expected, found = eager.run(STEPS), captured.run(STEPS)
    assert captured.denoiser.eager_steps == MODEL.window_chunks - 1
    assert error(found, expected) < 1e-3


def test_fast_and_plain_agree_through_three_resets() -> None:
    """FP8's rounding is all that lies between them: the launch form in FP8 errs as much."""
    truth = float32_latents()
    launch = Session(PLAIN.model_copy(update={"fp8_gemm": True, "fp8_kv_cache": True}))
    launch.start()
    session = Session(FAST)
    session.start()
    found = session.run(STEPS)
    assert error(found, truth) <= 2 * error(launch.run(STEPS), truth) + 1e-3
    assert error(found, truth) < 0.2
    by_step = ((found - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).tolist()
    assert max(by_step[-5:]) < 2 * max(by_step[:5]) + 0.01, "the error must not grow"
    assert session.denoiser.saturated == 0


def test_the_embedded_character_runs_the_gpu_path_as_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_config([CONFIGS / "tiny.yaml"]).model
    # By default convolutions may compute in TF32.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    latents = {}
    for device, optimizations in (
        ("cpu", Optimizations()),
        ("cuda", Optimizations()),
        ("cuda:0", Optimizations(fused_pre_attention=True, fused_norm_quant=True)),
    ):
        dit = load_generator(model, device=torch.device(device), dtype=torch.float32)
        session = Session(optimizations, model, dit)
        session.start()
        # Noise differs between devices' generators, so the same is given to all.
        noise = torch.Generator().manual_seed(2)
        made = []
        for _ in range(8):
            given = torch.randn(1, model.video_tokens, model.token_channels, generator=noise)
            made.append(_step_with(session, given.to(session.device)).cpu())
        latents[device] = torch.stack(made)
    for device in ("cuda", "cuda:0"):
        assert error(latents[device], latents["cpu"]) < 1e-2


def _step_with(session: Session, noise: Tensor) -> Tensor:
    window, controls = session._inputs
    denoiser = session.denoiser
    mel = session.dit.log_mel(window[None])
    condition = session.dit.condition_on_mel(mel, controls[None])
    return denoiser.denoise(condition, len(session.model.noise_levels), noise)[0]
