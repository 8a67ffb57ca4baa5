"""The published numbers follow from the 57B geometry, and the same class is the embedded model.

Built on the meta device: shapes are real, nothing is computed or stored.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from characters_serve.config import ModelConfig, Optimizations, load_config
from characters_serve.model.dit import CharacterDiT, useful_flops_per_step
from characters_serve.model.kv_cache import make_cache

CONFIGS = Path(__file__).parents[2] / "configs"


def model_of(name: str) -> ModelConfig:
    return load_config([CONFIGS / f"{name}.yaml"]).model


def on_meta(model: ModelConfig) -> CharacterDiT:
    with torch.device("meta"):
        return CharacterDiT(model).eval().requires_grad_(False)


def num_parameters(dit: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in dit.parameters())


def run_step(model: ModelConfig, dit: CharacterDiT) -> tuple[int, float]:
    """All passes of a step on a full cache: (out-projections run, FLOPs as torch counts them)."""
    cache = make_cache(model, Optimizations(), device="meta", dtype=torch.bfloat16)
    dit = dit.bfloat16()
    with torch.device("meta"):
        image = torch.zeros(1, 3, model.height, model.width)
        slots = model.prompt_slots
        dit.write_prefix(image, cache, torch.zeros(1, slots, model.prompt_dim) if slots else None)
        mel = torch.zeros(1, dit.log_mel.num_frames, model.audio.num_mels)
        controls = torch.zeros(1, model.frames_per_chunk, model.num_controls)
        condition = dit.condition_on_mel(mel, controls)
        noisy = torch.zeros(1, model.video_tokens, model.token_channels, dtype=torch.bfloat16)
        modulation = dit.modulate(torch.tensor(1.0))
    for _ in range(model.window_chunks):
        cache.begin_step()
    shapes = []
    for block in dit.blocks:
        block.out_projection.register_forward_hook(lambda _m, _i, out: shapes.append(out.shape))
    with FlopCounterMode(display=False) as counter:
        for index in range(len(model.noise_levels)):
            clean = dit(noisy, modulation, condition, cache, min(index, model.num_caches - 1))
    assert clean.shape == noisy.shape
    assert set(shapes) == {(1, model.tokens_per_chunk, model.dim)}
    return len(shapes), float(counter.get_total_flops())


def test_57b_has_the_published_numbers() -> None:
    model = model_of("characters-57b")
    assert num_parameters(on_meta(model)) == pytest.approx(57.0e9, rel=0.01)
    assert model.tokens_per_chunk == 757 and model.video_tokens == 748
    assert model.reference_tokens == 187 and model.prefix_slots == 489
    assert model.cache_slots == 5788
    assert model.all_reduces_per_step == 240
    flops_per_s = useful_flops_per_step(model) / model.chunk_period_s
    assert flops_per_s == pytest.approx(2.25e15, rel=0.01)


def test_tiny_is_the_same_class_with_small_numbers() -> None:
    model = model_of("tiny")
    dit = on_meta(model)
    assert num_parameters(dit) == pytest.approx(7.19e6, rel=0.01)
    assert sum(num_parameters(block) for block in dit.blocks) == pytest.approx(4.0e6, rel=0.05)
    assert model.video_tokens == 96 and model.tokens_per_chunk == 101
    assert model.reference_tokens == model.prefix_slots == 96
    assert model.cache_slots == 96 + 5 * 101
    assert model.all_reduces_per_step == 16 and model.num_caches == 1
    flops_per_s = useful_flops_per_step(model) / model.chunk_period_s
    assert flops_per_s == pytest.approx(13.05e9, rel=0.01)


@pytest.mark.parametrize("name", ["tiny", "characters-57b"])
def test_a_step_does_what_the_numbers_say(name: str) -> None:
    # Blocks are alike: six stand for all, in a tenth of the time.
    model = model_of(name).model_copy(update={"num_blocks": 6})
    cache = make_cache(model, Optimizations(), device="meta")
    assert cache._k.shape == cache._v.shape  # type: ignore[attr-defined]
    assert cache._k.shape == (  # type: ignore[attr-defined]
        model.num_blocks,
        model.num_caches,
        1,
        model.cache_slots,
        model.num_heads,
        model.head_dim,
    )
    projections, flops = run_step(model, on_meta(model))
    # One all-reduce follows each out-projection.
    assert projections == model.all_reduces_per_step
    # What stands outside the blocks counts too, and is small.
    assert flops == pytest.approx(useful_flops_per_step(model), rel=0.01)


@pytest.mark.parametrize("name", ["tiny", "characters-57b"])
def test_meta_keeps_everything_on_meta(name: str) -> None:
    dit = on_meta(model_of(name))
    tensors = [*dit.parameters(), *dit.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
