"""Causal Wan: the network is its authors', the streams are as recorded, whatever the flags."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from characters_serve.config import ConfigError, ModelConfig, Optimizations, load_config
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.kv_cache import make_cache
from characters_serve.model.open.causal_wan import CausalWan
from characters_serve.model.open.frame_cache import LatentPositions, PlainFrameCache
from characters_serve.model.open.recipes import recipes_for
from characters_serve.model.open.wan import tokens_of
from characters_serve.model.rope import rotate
from tests.parity import FOLDER, Recording
from tests.unit.small_causal_wan import (
    CHANNELS,
    COLUMNS,
    LEVELS,
    ROWS,
    STREAMS,
    Noise,
    causal_wan,
    first_latent,
    model_of,
    network,
    stream,
    text_of,
)
from tests.unit.small_live_avatar import drawn

CONFIGS = Path(__file__).parents[2] / "configs"
# What the authors' code differs by between float32 and float64 is 5e-6.
ATOL = 2e-5
FLAGS = {
    "plain": Optimizations(write_time_rope=False, ring_cache=False, precomputed_modulation=False),
    "rotated when written": Optimizations(ring_cache=False, precomputed_modulation=False),
    "ring": Optimizations(precomputed_modulation=False),
    "as shipped": Optimizations(),
}


@functools.cache
def recording() -> Recording:
    return Recording("causal_wan")


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)


def pass_over(model: ModelConfig, levels: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """The recorded network's input, and the clean chunk that our network finds in it."""
    noisy = tokens_of(drawn((1, CHANNELS, 3, 2 * ROWS, 2 * COLUMNS), 70))
    dit, cache = network(model), make_cache(model, Optimizations())
    cache.begin_step()
    return noisy, dit(noisy, dit.modulate(levels), dit.read_text(text), cache, 0)


def test_the_network_is_the_authors() -> None:
    """Three latents, each with a noise level of its own, in a cache that was empty."""
    levels = torch.tensor([0.9, 0.5, 0.2])
    noisy, clean = pass_over(causal_wan(), levels, text_of())
    level = levels.repeat_interleave(ROWS * COLUMNS)[None, :, None]
    close(clean, noisy - level * recording()["velocity"])


def test_text_is_filled_up_with_zeros_that_are_seen() -> None:
    levels = torch.tensor([0.9, 0.5, 0.2])
    text = text_of()
    _, short = pass_over(causal_wan(), levels, text)
    _, filled = pass_over(causal_wan(), levels, torch.cat([text, torch.zeros(1, 3, 24)], dim=1))
    assert torch.equal(short, filled)
    fewer = causal_wan(wan={"freq_dim": 32, "text_dim": 24, "text_len": 5})
    _, unfilled = pass_over(fewer, levels, text)
    assert (short - unfilled).abs().max() > 1e-2
    with pytest.raises(ValueError, match="9 rows exceeds the model's 8"):
        network(causal_wan()).read_text(torch.zeros(1, 9, 24))


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_as_recorded(name: str, flags: Optimizations) -> None:
    latents, _ = stream(name, flags)
    close(latents, recording()[name.replace(" ", "_")])


def test_the_sinks_distance_matters_once_something_was_dropped() -> None:
    """Otherwise the streams above would not show where the sink stands."""
    growing, constant = recording()["odd_window"], recording()["constant_sink"]
    close(growing[:2], constant[:2])
    assert (growing[3:] - constant[3:]).abs().amax(dim=(1, 2)).min() > 0.02


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_as_many_latents_are_dropped_as_needed(flags: Optimizations) -> None:
    _, remembered = stream("odd window", flags)
    assert [sorted(latents) for latents in remembered] == [
        [0, 1, 2],
        [0, 1, 2, 3, 4, 5],
        [0, 3, 4, 5, 6, 7, 8],
        [0, 6, 7, 8, 9, 10, 11],
        [0, 9, 10, 11, 12, 13, 14],
    ]
    _, remembered = stream("from an image", flags)
    assert [sorted(latents) for latents in remembered[3:6]] == [
        [0, 1, 2, 3, 4],
        [0, 1, 3, 4, 5],
        [0, 1, 4, 5, 6],
    ]


def test_a_stream_starts_anew() -> None:
    model = model_of("constant sink")
    denoiser = Denoiser(network(model), model, Optimizations())
    streams = []
    for num_chunks in (4, 3):
        denoiser._draw = Noise(model)  # type: ignore[method-assign]
        denoiser.start(torch.zeros(1, 3, model.height, model.width), 0, text_of())
        streams.append([denoiser.denoise(denoiser._session, 4) for _ in range(num_chunks)])
    for one, other in zip(*streams, strict=False):
        assert torch.equal(one, other)


def test_text_and_first_latent_lead_the_stream() -> None:
    recorded = recording()["from_an_image"]
    model = model_of("from an image")

    def first_chunk(image: Tensor, text: Tensor) -> Tensor:
        denoiser = Denoiser(network(model, lambda _: image), model, Optimizations())
        denoiser._draw = Noise(model)  # type: ignore[method-assign]
        denoiser.start(torch.zeros(1, 3, model.height, model.width), 0, text)
        return denoiser.denoise(denoiser._session, 2)[0]

    close(first_chunk(first_latent(), text_of()), recorded[0])
    assert (first_chunk(first_latent().flip(1), text_of()) - recorded[0]).abs().max() > 1e-2
    assert (first_chunk(first_latent(), text_of().flip(2)) - recorded[0]).abs().max() > 1e-2


def test_every_pass_has_new_noise_and_the_first_chunk_its_own_levels() -> None:
    model = model_of("single latents")
    denoiser = Denoiser(network(model), model, Optimizations())
    noise = Noise(model)
    denoiser._draw = noise  # type: ignore[method-assign]
    denoiser.start(torch.zeros(1, 3, model.height, model.width), 0, text_of())
    counts = []
    for _ in range(3):
        denoiser.denoise(denoiser._session, 2)
        counts.append(noise.drawn)
    assert counts == [4, 6, 8]


def test_what_stays_is_what_the_clean_pass_wrote() -> None:
    model = model_of("chunks")
    dit = network(model)
    denoiser = Denoiser(dit, model, Optimizations())
    denoiser.start(torch.zeros(1, 3, model.height, model.width), 0, text_of())
    clean = denoiser.denoise(denoiser._session, len(LEVELS))
    kept = denoiser._cache
    assert isinstance(kept, PlainFrameCache)
    cache = make_cache(model, Optimizations())
    assert isinstance(cache, PlainFrameCache)
    cache.begin_step()
    dit(clean, dit.modulate(torch.tensor(0.0)), denoiser._session, cache, 0)
    assert torch.equal(kept._k, cache._k) and torch.equal(kept._v, cache._v)


@pytest.mark.parametrize("distance", ["growing", "constant"])
def test_an_endless_stream_is_rotated_alike_by_all_caches(distance: str) -> None:
    """Past latent 1,024, where the published tables end."""
    model = causal_wan(
        num_blocks=1,
        latents_per_chunk=4,
        frames_per_chunk=16,
        causal_wan={"window_latents": 11, "sink_latents": 2, "sink_distance": distance},
    )
    caches = [make_cache(model, FLAGS[name]) for name in ("plain", "rotated when written", "ring")]
    random = torch.Generator().manual_seed(0)
    shape = (3, 1, model.video_tokens, model.num_heads, model.head_dim)
    for number in range(280):
        q, k, v = torch.randn(shape, generator=random)
        for cache in caches:
            cache.begin_step()
        plain, shifted, ring = (cache.attend(0, 0, q, k, v) for cache in caches)
        if number % 40 == 39:
            close(shifted, plain)
            close(ring, plain)


def test_scores_depend_on_distances_however_late_it_is() -> None:
    model = causal_wan()
    positions = LatentPositions(model, "cpu")
    q, k = (drawn((1, ROWS * COLUMNS, 2, 24), seed) for seed in (1, 2))

    def scores(at: int) -> Tensor:
        queries, keys = (
            rotate(q, positions.of(range(at + 7, at + 8))),
            rotate(k, positions.of(range(at, at + 1))),
        )
        return torch.einsum("bqhd,bkhd->bhqk", queries, keys)

    close(scores(1_000_000), scores(0))
    moved = torch.einsum(
        "bqhd,bkhd->bhqk", rotate(q, positions.of(range(8, 9))), rotate(k, positions.of(range(1)))
    )
    assert (moved - scores(0)).abs().max() > 0.1
    assert positions.of(range(3, 4)).max() < 2 * math.pi


def test_a_larger_chunk_than_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="3 latents does not fit"):
        causal_wan(causal_wan={"window_latents": 5, "sink_latents": 3})
    with pytest.raises(ConfigError, match="clean_pass"):
        load_config([CONFIGS / "self-forcing-1.3b.yaml"], ["model.cache_policy=last_pass"])


def test_published_names_and_shapes_of_the_1_3b() -> None:
    """The file lists the first block's; the other 29 have the same."""
    model = load_config([CONFIGS / "self-forcing-1.3b.yaml"]).model
    listed = json.loads((FOLDER / "checkpoint_keys.json").read_text())["causal_wan_1.3b"]
    published = {}
    for name, shape in listed.items():
        block = name.startswith("blocks.0.")
        for index in range(model.num_blocks if block else 1):
            published[name.replace("blocks.0.", f"blocks.{index}.")] = tuple(shape)
    sources = {k: v for recipe in recipes_for(model).values() for k, v in recipe.sources.items()}
    assert sources == published
    assert len(sources) == 825 and sum(map(math.prod, sources.values())) == 1_418_996_800


@pytest.mark.parametrize(
    ("name", "changes", "parameters"),
    [
        ("self-forcing-1.3b", [], 1.42e9),
        ("causal-forcing-1.3b", [], 1.42e9),
        ("longlive-5b", [], 5.0e9),
        (
            "self-forcing-1.3b",
            ["dim=5120", "num_blocks=40", "num_heads=40", "mlp_dim=13824"],
            14.3e9,
        ),
    ],
)
def test_full_sizes_are_made_of_what_is_published(
    name: str, changes: list[str], parameters: float
) -> None:
    model = load_config([CONFIGS / f"{name}.yaml"], [f"model.{x}" for x in changes]).model
    with torch.device("meta"):
        dit = CausalWan(model)
        made = {
            key: recipe.build(*map(torch.empty, recipe.sources.values())).shape
            for key, recipe in recipes_for(model).items()
        }
    assert made == {key: value.shape for key, value in dit.state_dict().items()}
    count = sum(parameter.numel() for parameter in dit.parameters())
    assert count == pytest.approx(parameters, rel=0.01)
