"""Every optimisation of the step against the plain path, on CPU through the kernels' references."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from characters_kernels.fp8 import E4M3
from characters_serve.config import Config, ConfigError, ModelConfig, Optimizations
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.fp8 import Fp8Linear, calibrating, convert_projections
from characters_serve.model.weights import load_generator
from tests.unit import small_model
from tests.unit.small_model import session, sharpen

SMALL = ModelConfig(
    **{
        **small_model.SMALL.model_dump(),
        "prompt_slots": 3,
        "prompt_dim": 16,
        "cache_policy": "per_pass",
        "position_reset_steps": 6,
    }
)
PLAIN = Optimizations(write_time_rope=False, ring_cache=False, precomputed_modulation=False)
# Resets fall on chunks 11, 17 and 23.
STEPS = 24


@functools.cache
def network() -> CharacterDiT:
    dit = load_generator(SMALL, device=torch.device("cpu"), dtype=torch.float32)
    return sharpen(dit, 3)


def denoiser(**flags: bool) -> Denoiser:
    return Denoiser(copy.deepcopy(network()), SMALL, Optimizations(**flags))


@functools.cache
def plain_session() -> Tensor:
    return session(Denoiser(network(), SMALL, PLAIN), STEPS)


def error(found: Tensor) -> float:
    """Root mean square difference from the plain path, relative to it, over all steps."""
    plain = plain_session()
    return float((found - plain).norm() / plain.norm())


def test_the_plain_pass_is_the_networks_own() -> None:
    whole = Denoiser(network(), SMALL, PLAIN)
    whole._pass = whole._whole_pass
    assert torch.equal(session(whole, STEPS), plain_session())


@pytest.mark.parametrize(
    "flags",
    [
        {"fused_pre_attention": True},
        {"fused_norm_quant": True},
        {"fused_pre_attention": True, "fused_norm_quant": True},
    ],
    ids=lambda flags: "+".join(flags),
)
def test_fused_paths_in_float_are_the_plain_path(flags: dict[str, bool]) -> None:
    assert error(session(denoiser(**flags), STEPS)) < 1e-4


@pytest.mark.parametrize("kind", ["plain", "shifted", "ring", "fused"])
def test_an_fp8_cache_errs_alike_in_every_kind_of_cache(kind: str) -> None:
    """One rounding of each key and value, and where keys are rotated at read a second one."""
    flags = {
        "plain": {"write_time_rope": False, "ring_cache": False},
        "shifted": {"ring_cache": False},
        "ring": {},
        "fused": {"fused_pre_attention": True},
    }[kind]
    found = denoiser(fp8_kv_cache=True, **flags)
    assert 1e-4 < error(session(found, STEPS)) < 0.05
    assert found.saturated == 0


def test_fp8_matmuls_err_by_their_rounding_and_fused_kernels_add_none() -> None:
    unfused = session(denoiser(fp8_gemm=True), STEPS)
    assert 1e-4 < error(unfused) < 0.08
    fused = denoiser(fp8_gemm=True, fused_norm_quant=True, fused_pre_attention=True)
    assert error(session(fused, STEPS)) <= 2 * error(unfused)
    assert fused.saturated == 0


def test_all_flags_together_stay_near_the_plain_path_through_three_resets() -> None:
    flags = ("fp8_gemm", "fp8_kv_cache", "fused_pre_attention", "fused_norm_quant")
    fast = session(denoiser(**dict.fromkeys(flags, True)), STEPS)
    assert error(fast) < 0.1
    per_step = (fast - plain_session()).flatten(1).norm(dim=1) / plain_session().flatten(1).norm(
        dim=1
    )
    assert per_step[-6:].mean() < 2 * per_step[:6].mean() + 0.01, "the error must not grow"


def test_scales_belong_to_the_session() -> None:
    """A session's numbers do not depend on the one before it."""
    flags = dict.fromkeys(("fp8_gemm", "fp8_kv_cache", "fused_pre_attention"), True)
    one = denoiser(**flags)
    first = session(one, 3)
    session(one, 2, prompt=0)
    assert torch.equal(session(one, 3), first)


def test_values_beyond_the_calibrated_range_are_counted() -> None:
    made_by = denoiser(fp8_gemm=True, fp8_kv_cache=True, fused_pre_attention=True)
    session(made_by, 1)
    assert made_by.saturated == 0
    dit = made_by._model
    assert isinstance(dit, CharacterDiT)
    for module in dit.modules():
        if isinstance(module, Fp8Linear):
            module.input_scale.mul_(0.05)
    condition = network().condition_on_mel(
        torch.randn(1, 28, SMALL.audio.num_mels),
        torch.rand(1, SMALL.frames_per_chunk, SMALL.num_controls),
    )
    made_by.denoise(condition, 4)
    assert made_by.saturated > 0
    made_by.reset()
    session(made_by, 1)
    assert made_by.saturated == 0


def test_the_model_is_converted_once_and_its_weights_are_e4m3() -> None:
    dit = copy.deepcopy(network())
    for _ in range(2):
        Denoiser(dit, SMALL, Optimizations(fp8_gemm=True))
    for block, original in zip(dit.blocks, network().blocks, strict=True):
        assert isinstance(block.in_projection, Fp8Linear)
        assert block.in_projection.weight.dtype == E4M3
        near = block.in_projection.weight.float() * block.in_projection.weight_scale
        torch.testing.assert_close(near, original.in_projection.weight, rtol=0.07, atol=1e-3)


def test_fp8_on_a_gpu_without_it_is_a_mistake_in_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode():
        on_gpu = torch.zeros(1, dtype=torch.int32, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"optimizations\.fp8_gemm needs .* not cuda:0"):
        convert_projections(copy.deepcopy(network()), on_gpu)


def test_a_converted_out_projection_is_still_summed_over_the_ranks() -> None:
    summed: list[Tensor] = []

    def all_reduce(partial_sum: Tensor) -> Tensor:
        summed.append(partial_sum)
        return 2 * partial_sum

    cpu = torch.device("cpu")
    dit = load_generator(SMALL, device=cpu, dtype=torch.float32, all_reduce=all_reduce)
    joined = torch.randn(1, 5, dit.blocks[0].out_projection.in_features)
    plain = dit.blocks[0].out_projection(joined)
    convert_projections(dit, torch.zeros(1, dtype=torch.int32))
    with calibrating(dit.modules()):
        found = dit.blocks[0].out_projection(joined)
    assert len(summed) == 2
    assert float((found - plain).norm() / plain.norm()) < 0.08


@pytest.mark.parametrize(
    ("optimizations", "engine", "says"),
    [
        ({"fused_pre_attention": True, "ring_cache": False}, {}, "needs ring_cache"),
        ({"cuda_graphs": True}, {"device": "cuda"}, "needs fused_pre_attention"),
        ({"cuda_graphs": True, "fused_pre_attention": True}, {}, "needs engine.device cuda"),
        ({"fused_gemm_all_reduce": True}, {"device": "cuda"}, "needs fp8_gemm"),
        ({"two_shot_all_reduce": True}, {"device": "cuda"}, "needs fp8_gemm"),
        ({"fused_gemm_all_reduce": True, "fp8_gemm": True}, {}, "needs engine.device cuda"),
        (
            {"fused_gemm_all_reduce": True, "fp8_gemm": True},
            {"device": "cuda", "dtype": "float32"},
            "sums in bf16",
        ),
        (
            {"fused_gemm_all_reduce": True, "two_shot_all_reduce": True, "fp8_gemm": True},
            {"device": "cuda"},
            "choose one",
        ),
        ({"in_switch_reduction": True}, {}, "needs fused_gemm_all_reduce"),
    ],
)
def test_impossible_combinations_say_why(
    optimizations: dict[str, bool], engine: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Config.model_validate({"optimizations": optimizations, "engine": engine})


def test_fused_paths_refuse_a_batch() -> None:
    with pytest.raises(ValueError, match="serves one session"):
        Denoiser(network(), SMALL, Optimizations(fused_pre_attention=True), batch=2)
    with pytest.raises(ValueError, match="serves one session"):
        Denoiser(network(), SMALL, Optimizations(fused_norm_quant=True), batch=2)
