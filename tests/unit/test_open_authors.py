"""Whole streams of the authors' own code, on the weights that they ran with, whatever the flags.

See tests/data/parity/README.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from characters_serve.config import ModelConfig, Optimizations
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.open.causal_wan import CausalWan
from characters_serve.model.open.live_avatar import LiveAvatar
from characters_serve.model.open.recipes import recipes_for
from characters_serve.model.open.wan import latents_of, tokens_of
from tests.parity import FOLDER
from tests.unit.small_causal_wan import LEVELS, causal_wan
from tests.unit.small_live_avatar import SMALL

# Their code differs by 5e-6 between float32 and float64; LiveAvatar's stated limit is 1e-4.
WAN_ATOL, AVATAR_ATOL = 2e-5, 1e-4
FLAGS = {
    "plain": Optimizations(write_time_rope=False, ring_cache=False, precomputed_modulation=False),
    "as shipped": Optimizations(),
    "fused": Optimizations(fused_pre_attention=True, fused_norm_quant=True),
}


class Recorded(NamedTuple):
    """A stream of Self-Forcing, LongLive 1 or Causal-Forcing."""

    inputs: str
    latents_per_chunk: int
    window: int
    sink: int
    distance: str = "growing"
    levels: tuple[float, ...] = LEVELS
    first_levels: tuple[float, ...] = ()


STREAMS = {
    "window_7": Recorded("inputs_a", 3, 7, 1),
    "window_9": Recorded("inputs_b", 3, 9, 3),
    "image": Recorded("inputs_window", 1, 5, 2, levels=LEVELS[::2], first_levels=LEVELS),
    # Every key rotated anew at each read, by its slot.
    "at_read_7": Recorded("inputs_a", 3, 7, 1, "constant"),
    "at_read_9": Recorded("inputs_b", 3, 9, 3, "constant"),
}


@functools.cache
def recorded(family: str) -> dict[str, Tensor]:
    return load_file(FOLDER / "authors" / f"{family}.safetensors")


def filled(network: nn.Module, model: ModelConfig, prefix: str) -> Any:
    held = recorded(model.family)
    network.load_state_dict(
        {
            key: recipe.build(*(held[f"weights.{prefix}{name}"] for name in recipe.sources))
            for key, recipe in recipes_for(model).items()
        }
    )
    return network.eval().requires_grad_(False)


def wan_stream(stream: Recorded, flags: Optimizations) -> Tensor:
    """Latents (1, latents, Z, height, width), without the image."""
    model = causal_wan(
        width=64,
        height=48,
        latents_per_chunk=stream.latents_per_chunk,
        frames_per_chunk=4 * stream.latents_per_chunk,
        dim=128,
        num_blocks=3,
        num_heads=4,
        head_dim=32,
        mlp_dim=320,
        rope_split=(12, 10, 10),
        noise_levels=stream.levels,
        first_noise_levels=stream.first_levels,
        wan={"freq_dim": 64, "text_dim": 48, "text_len": 20},
        causal_wan={
            "window_latents": stream.window,
            "sink_latents": stream.sink,
            "sink_distance": stream.distance,
        },
    )
    held = recorded("causal_wan")
    noise, renoise = held[f"{stream.inputs}.noise"], held[f"{stream.inputs}.renoise"]
    image = f"{stream.inputs}.image_latent"
    encode = (lambda _: held[image].movedim(1, 2)) if image in held else None
    denoiser = Denoiser(filled(CausalWan(model, encode), model, "model."), model, flags)
    black = torch.zeros(1, 3, model.height, model.width)
    denoiser.start(black, 0, held[f"{stream.inputs}.text"])
    draws: Iterator[Tensor] = iter(())
    denoiser._draw = lambda: tokens_of(next(draws).movedim(1, 2).contiguous())  # type: ignore[method-assign]
    chunks = []
    for first, again in zip(torch.split(noise, stream.latents_per_chunk, 1), renoise, strict=True):
        draws = iter([first, *again])
        clean = denoiser.denoise(denoiser._session, len(stream.levels))
        chunks.append(latents_of(clean, model.grid_rows, model.grid_columns).movedim(2, 1))
    return torch.cat(chunks, 1)


def flags_for(stream: Recorded) -> list[str]:
    """The fused kernel writes a chunk in one run: with other sinks it is a configuration error."""
    one_run = stream.sink % stream.latents_per_chunk == 0
    return [name for name in FLAGS if name != "fused" or one_run]


@pytest.mark.parametrize(
    ("name", "flags"), [(n, f) for n, s in STREAMS.items() for f in flags_for(s)]
)
def test_causal_wan_is_its_authors(name: str, flags: str) -> None:
    stream = STREAMS[name]
    found = wan_stream(stream, FLAGS[flags])
    expected = recorded("causal_wan")[f"{name}.latents"][:, -found.shape[1] :]
    torch.testing.assert_close(found, expected, rtol=0, atol=WAN_ATOL)


def avatar_stream(refreshed: bool, flags: Optimizations) -> Tensor:
    """Chunks (chunks, Z, latents, height, width). refreshed: another reference from the third."""
    held = recorded("live_avatar")
    model = ModelConfig.model_validate(
        SMALL.model_dump()
        | {
            "width": 80,
            "height": 144,
            "dim": 96,
            "num_blocks": 4,
            "num_heads": 3,
            "head_dim": 32,
            "mlp_dim": 144,
            "rope_split": (12, 10, 10),
            "noise_levels": tuple(held["sigmas"][:4].tolist()),
            "position_reset_steps": 3,
            "wan": {"freq_dim": 64, "text_dim": 40, "text_len": 16},
            "live_avatar": {"audio_layers": 25, "audio_dim": 20, "audio_after_blocks": (0, 2)},
        }
    )
    dit = filled(LiveAvatar(model), model, "")
    denoiser = Denoiser(dit, model, flags)
    text = dit.read_text(held["context"][None])
    references = {0: held["ref_latents"]}
    if refreshed:
        references[2] = held["ref_latents_refreshed"]
    chunks = []
    frames = torch.split(held["audio"], model.frames_per_chunk, -1)
    noise = (part[None] for clip in held["noise"] for part in torch.split(clip, 3, 1))
    for chunk, (heard, drawn) in enumerate(zip(frames, noise, strict=True)):
        if chunk in references:
            motion = held["motion_latents"]
            dit.write_conditions(references[chunk], motion, text, denoiser._cache)
        clean = denoiser.denoise(dit.condition(heard, text), 4, tokens_of(drawn.contiguous()))
        chunks.append(latents_of(clean, model.grid_rows, model.grid_columns)[0])
    return torch.stack(chunks)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
@pytest.mark.parametrize("mode", ["fixed_ref", "refreshed_ref"])
def test_live_avatar_is_its_authors(mode: str, flags: Optimizations) -> None:
    """The ring is overwritten three times, positions move back twice."""
    found = avatar_stream(mode == "refreshed_ref", flags)
    expected = recorded("live_avatar")[f"latents.{mode}"]
    torch.testing.assert_close(found, expected, rtol=0, atol=AVATAR_ATOL)
