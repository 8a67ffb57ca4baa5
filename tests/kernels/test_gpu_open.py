"""The open families' steps on a GPU, at their full widths: never waiting, and as the plain path."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from characters_kernels import ring_store as store
from characters_kernels import square_sums as squares
from characters_kernels.fp8 import E4M3
from characters_serve.config import ModelConfig, Optimizations, load_config
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.open.causal_wan import CausalWan
from characters_serve.model.open.live_avatar import LiveAvatar
from characters_serve.model.weights import load_network
from tests.kernels.gpu_rig import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU of Hopper's class"),
]

CONFIGS = Path(__file__).parents[2] / "configs"
PLAIN = Optimizations(**dict.fromkeys(Optimizations.model_fields, False))
FAST = load_config([CONFIGS / "live-avatar-14b.yaml"]).optimizations
STEPS = 12
FAMILIES = pytest.mark.parametrize("family", ["live-avatar-14b", "self-forcing-1.3b"])


def model_of(family: str) -> ModelConfig:
    """Two blocks; LiveAvatar's positions move back on chunks 7 and 10."""
    model = load_config([CONFIGS / f"{family}.yaml"]).model
    changes: dict[str, Any] = {"num_blocks": 2, "position_reset_steps": 3}
    if model.live_avatar is not None:
        heard = model.live_avatar.model_copy(update={"audio_after_blocks": (0, 1)})
        changes["live_avatar"] = heard
    return model.model_copy(update=changes)


@functools.cache
def network(family: str) -> LiveAvatar | CausalWan:
    model, kind = model_of(family), CausalWan if family.startswith("self") else LiveAvatar
    device = torch.device("cuda")
    made = load_network(lambda: kind(model), model, "dit", device, torch.bfloat16, 0)
    assert isinstance(made, LiveAvatar | CausalWan)
    return made


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


class Film:
    """A session of the bare network: LiveAvatar's conditions are latents and features."""

    def __init__(self, network: Any, config: ModelConfig) -> None:
        self.network, self._config = network, config

    def write_prefix(self, image: Tensor, cache: Any, prompt: Tensor | None) -> Any:
        text = self.network.read_text(random(1, 512, 4096, seed=1))
        if isinstance(self.network, LiveAvatar):
            model = self._config
            size = (1, model.latent_channels, 1, model.height // 8, model.width // 8)
            still = random(*size, seed=2)
            motion = still.expand(-1, -1, 19, -1, -1)
            self.network.write_conditions(still, motion, text, cache)
        return text

    def condition(self, window: Tensor, controls: Tensor, text: Any) -> Any:
        if isinstance(self.network, LiveAvatar):
            return self.network.condition(self._features, text)
        return text

    @functools.cached_property
    def _features(self) -> Tensor:
        return random(1, 25, 1024, self._config.frames_per_chunk, seed=3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def __call__(self, *inputs: Any) -> Tensor:
        clean: Tensor = self.network(*inputs)
        return clean


class Session:
    def __init__(self, family: str, optimizations: Optimizations, dit: Any = None) -> None:
        self.model = model_of(family)
        film: Any = Film(copy.deepcopy(network(family)) if dit is None else dit, self.model)
        self.denoiser = Denoiser(film, self.model, optimizations)
        self.denoiser.start(torch.zeros(1, 3, self.model.height, self.model.width), 5)
        self._window = torch.zeros(1, device="cuda")
        controls = self.model.frames_per_chunk, self.model.num_controls
        self._controls = torch.zeros(controls, device="cuda")

    def step(self) -> Tensor:
        passes = len(self.model.noise_levels)
        return self.denoiser.step(self._window, self._controls, passes)

    def run(self, steps: int = STEPS) -> Tensor:
        return torch.stack([self.step().clone() for _ in range(steps)]).cpu()


@functools.cache
def exact(family: str) -> Tensor:
    return Session(family, PLAIN, copy.deepcopy(network(family)).float()).run()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
def test_a_norm_over_the_width_on_its_way_into_the_ring(dtype: torch.dtype) -> None:
    tokens, heads, head_dim, slots = 757, 40, 128, 2000
    inner = heads * head_dim
    projected = random(tokens + 11, 3 * inner).bfloat16()
    weights = (1 + 0.2 * random(2, inner, seed=1)).bfloat16()
    angles, scales = random(tokens, head_dim // 2, seed=2), torch.full((3, heads), 0.02).cuda()
    found: list[Tensor] = []
    expected: list[Tensor] = []
    calls: Any = (
        (found, squares.square_sums, store.ring_store),
        (expected, squares.square_sums_reference, store.ring_store_reference),
    )
    for results, sum_up, put in calls:
        sums = torch.zeros(tokens, 2, device="cuda")
        sum_up(projected, inner, sums)
        into = [
            torch.zeros(n, heads, head_dim, device="cuda").to(dtype) for n in (tokens, slots, slots)
        ]
        counted = torch.zeros(1, dtype=torch.int32, device="cuda")
        put(
            projected, *weights, angles.cos(), angles.sin(), torch.tensor(1000).cuda(), *scales,
            1e-6, *into, counted, sums, inner,
        )  # fmt: skip
        results += [sums, *into]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.126, atol=2**-6)
        assert error(one.float(), other.float()) < 1e-2


@FAMILIES
def test_fused_paths_in_bf16_err_no_more_than_the_plain_path(family: str) -> None:
    fused = Optimizations(fused_norm_quant=True, fused_pre_attention=True)
    found, plain = (Session(family, flags).run() for flags in (fused, PLAIN))
    assert error(found, exact(family)) <= 2 * error(plain, exact(family)) + 1e-3


@FAMILIES
def test_all_flags_together_err_by_the_rounding_of_fp8(family: str) -> None:
    launch = PLAIN.model_copy(update={"fp8_gemm": True, "fp8_kv_cache": True})
    yardstick = error(Session(family, launch).run(), exact(family))
    session = Session(family, FAST)
    assert error(session.run(), exact(family)) <= 2 * yardstick + 1e-3
    torch.cuda.synchronize()
    assert session.denoiser.saturated == 0


@FAMILIES
def test_the_captured_step_is_the_eager_step_and_never_waits(family: str) -> None:
    eager = Session(family, FAST.model_copy(update={"cuda_graphs": False})).run()
    session = Session(family, FAST)
    assert error(session.run(), eager) < 1e-3
    before = session.denoiser.eager_steps
    with no_waits():
        for _ in range(7):
            session.step()
    assert session.denoiser.eager_steps == before < STEPS
