"""LiveAvatar against recordings; see tests/data/parity/live_avatar/README.md."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from characters_serve.config import ModelConfig, Optimizations, load_config
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.kv_cache import make_cache
from characters_serve.model.open.live_avatar import LiveAvatar, SpeechEncoder
from characters_serve.model.open.recipes import lora_targets, recipes_for
from characters_serve.model.open.wan import latents_of, tokens_of
from characters_serve.model.rope import rotary_positions
from tests.unit import small_live_avatar
from tests.unit.small_live_avatar import SMALL, drawn

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "parity" / "live_avatar"
FLAGS = {
    "as shipped": {},
    "shifted": {"ring_cache": False},
    "plain": {"ring_cache": False, "write_time_rope": False, "precomputed_modulation": False},
    "computed modulation": {"precomputed_modulation": False},
}
LATENT = (SMALL.latent_channels, 16, 8)
CHUNKS = 6
REFRESHED_AT = 2


def recorded(name: str) -> dict[str, NDArray[Any]]:
    with np.load(RECORDED / f"{name}.npz") as arrays:
        return dict(arrays)


@functools.cache
def network() -> LiveAvatar:
    return small_live_avatar.network()


class Inputs:
    """Of a recorded stream. Seeds are told apart by their hundreds."""

    text = drawn((1, 5, 24), 100)
    reference = drawn((1, LATENT[0], 1, *LATENT[1:]), 101)
    later_reference = drawn((1, LATENT[0], 1, *LATENT[1:]), 102)
    motion = drawn((1, LATENT[0], 19, *LATENT[1:]), 103)
    pose = drawn((1, LATENT[0], 3, *LATENT[1:]), 104)

    @staticmethod
    def features(chunk: int) -> Tensor:
        return drawn((1, 5, 20, 12), 200 + chunk)

    @staticmethod
    def noise(chunk: int) -> Tensor:
        return tokens_of(drawn((1, LATENT[0], 3, *LATENT[1:]), 300 + chunk))


def denoiser_for(model: ModelConfig, optimizations: Optimizations) -> Denoiser:
    """Of the bare network: conditions are given as latents and features."""
    dit: Any = network()
    return Denoiser(dit, model, optimizations)


def stream(model: ModelConfig, optimizations: Optimizations, chunks: int = CHUNKS) -> Tensor:
    """Clean chunks (chunks, V, C); the reference is another one from chunk REFRESHED_AT on."""
    dit, given = network(), Inputs()
    denoiser = denoiser_for(model, optimizations)
    text = dit.read_text(given.text)
    found = []
    for chunk in range(chunks):
        if chunk in (0, REFRESHED_AT):
            reference = given.later_reference if chunk else given.reference
            dit.write_conditions(reference, given.motion, text, denoiser._cache)
        condition = dit.condition(given.features(chunk), text)
        found.append(denoiser.denoise(condition, 4, given.noise(chunk))[0])
    return torch.stack(found)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_a_stream_is_as_recorded(flags: dict[str, bool]) -> None:
    """The ring is overwritten twice over. The limit is the recordings' own for float32."""
    expected = torch.from_numpy(recorded("stream")["clean"])
    found = stream(SMALL, Optimizations(**flags))
    assert expected.std() > 1
    for chunk in range(CHUNKS):
        assert (found[chunk] - expected[chunk]).abs().max() < 1e-4, chunk


def test_bf16_stays_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.7 to 1.0 % of the recording's spread, and no more in the last chunk than in the first."""
    narrow = small_live_avatar.network().bfloat16()
    monkeypatch.setattr(f"{__name__}.network", lambda: narrow)
    found, expected = stream(SMALL, Optimizations()), torch.from_numpy(recorded("stream")["clean"])
    assert found.dtype == torch.float32
    errors = (found - expected).pow(2).mean((1, 2)).sqrt() / expected.std()
    assert errors.max() < 0.03


@functools.cache
def never_moved() -> Tensor:
    return stream(SMALL, Optimizations(**FLAGS["plain"]), 9)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("flags", [FLAGS["as shipped"], FLAGS["shifted"], FLAGS["plain"]])
def test_moving_all_positions_back_changes_nothing(flags: dict[str, bool], steps: int) -> None:
    """The motion latents too are moved: they keep falling behind."""
    often = SMALL.model_copy(update={"position_reset_steps": steps})
    assert (stream(often, Optimizations(**flags), 9) - never_moved()).abs().max() < 1e-4


def test_one_pass_with_a_pose_and_a_level_for_each_latent_is_as_recorded() -> None:
    dit, given = network(), Inputs()
    text = dit.read_text(given.text)
    cache = make_cache(SMALL, Optimizations())
    dit.write_conditions(given.reference, given.motion[:, :, :5], text, cache)
    cache.begin_step()
    modulation = dit.modulate(torch.tensor([0.9, 0.5, 0.1]))
    condition = dit.condition(given.features(0), text, given.pose)
    clean = dit(given.noise(0), modulation, condition, cache, 0)[0]
    expected = torch.from_numpy(recorded("stream")["posed"])
    assert (clean - expected).abs().max() < 1e-4


def test_every_condition_shows() -> None:
    """What the recording pins down must matter to it."""
    dit, given = network(), Inputs()

    def first_chunk(**change: Tensor) -> Tensor:
        inputs = {
            "text": given.text,
            "reference": given.reference,
            "motion": given.motion,
            "features": given.features(0),
            "pose": torch.zeros_like(given.pose),
        } | change
        denoiser = denoiser_for(SMALL, Optimizations())
        text = dit.read_text(inputs["text"])
        dit.write_conditions(inputs["reference"], inputs["motion"], text, denoiser._cache)
        condition = dit.condition(inputs["features"], text, inputs["pose"])
        return denoiser.denoise(condition, 4, given.noise(0))

    usual = first_chunk()
    for change in (
        {"text": given.text.flip(2)},
        {"text": given.text[:, :4]},
        {"reference": given.later_reference},
        {"motion": given.motion.flip(2)},
        {"features": given.features(0).flip(3)},
        {"pose": given.pose},
    ):
        assert (first_chunk(**change) - usual).abs().max() > 1e-2, change.keys()
    # Rows that are missing, and latents that are, count as zeros.
    longer = torch.cat([given.text, torch.zeros(1, 3, 24)], 1)
    assert torch.equal(first_chunk(text=longer), usual)
    newest = torch.cat([torch.zeros_like(given.motion[:, :, :14]), given.motion[:, :, 14:]], 2)
    assert torch.equal(first_chunk(motion=given.motion[:, :, 14:]), first_chunk(motion=newest))


def test_too_long_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="9 rows exceeds the model's 8"):
        network().read_text(torch.zeros(1, 9, 24))


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_a_new_session_knows_nothing_of_the_last(flags: dict[str, bool]) -> None:
    denoiser = denoiser_for(SMALL, Optimizations(**flags))
    dit, given = network(), Inputs()

    def session(reference: Tensor) -> Tensor:
        denoiser.reset()
        text = dit.read_text(given.text)
        dit.write_conditions(reference, given.motion, text, denoiser._cache)
        condition = dit.condition(given.features(0), text)
        return torch.stack([denoiser.denoise(condition, 4, given.noise(i)) for i in range(3)])

    fresh = session(given.reference)
    session(given.later_reference)
    assert torch.equal(session(given.reference), fresh)
    denoiser.reset()
    cache: Any = denoiser._cache
    assert not any(t.any() for t in vars(cache).values() if isinstance(t, Tensor) and t.ndim > 3)


def test_positions_are_the_authors() -> None:
    """Their tables of (time, row, column), for 9 x 5 tokens a latent."""
    tables = recorded("authors")
    model = ModelConfig(**SMALL.model_dump() | {"height": 144, "width": 80})
    pairs = [part // 2 for part in model.rope_split]
    first_time = model.latents_per_chunk
    frequencies = [1e4 ** (-torch.arange(n, dtype=torch.float64) / n) for n in pairs]

    def angles(table: NDArray[Any], later: int) -> Tensor:
        axes = torch.split(torch.from_numpy(table).double(), 1, dim=1)
        axes = (axes[0] + later, *axes[1:])
        return torch.cat([a * f for a, f in zip(axes, frequencies, strict=True)], -1)

    positions = rotary_positions(model)
    torch.testing.assert_close(positions.chunk(1.0), angles(tables["noisy"], first_time))
    torch.testing.assert_close(positions.prefix(1), angles(tables["conditions"], first_time))
    # Five chunks on, after two moves by two: the reference came along, the motion fell behind.
    later = positions.prefix(2, 4)
    own = model.reference_tokens
    torch.testing.assert_close(later[:own], angles(tables["conditions"], 2 * first_time)[:own])
    torch.testing.assert_close(later[own:], angles(tables["conditions"], -3 * first_time)[own:])


def test_speech_tokens_are_the_authors() -> None:
    """Their causal audio encoder, three chunks of twelve frames; their limit is 1e-5."""
    arrays = {name: torch.from_numpy(value) for name, value in recorded("authors").items()}
    encoder = SpeechEncoder(25, 16, 64, 4)
    prefix = "speech."
    state = {
        name.removeprefix(prefix): value
        for name, value in arrays.items()
        if name.startswith(prefix)
    }
    encoder.load_state_dict(state)
    for chunk in range(3):
        features = arrays["features"][None, ..., 12 * chunk : 12 * chunk + 12]
        tokens, whole = encoder(features)
        assert (tokens[0] - arrays["tokens"][chunk]).abs().max() < 1e-5
        assert (whole[0] - arrays["global"][chunk, :, 0]).abs().max() < 1e-5


def test_tokens_and_latents_are_each_others_reverse() -> None:
    latents = drawn((2, 4, 3, 6, 10), 1)
    tokens = tokens_of(latents)
    assert tokens.shape == (2, 45, 16)
    assert torch.equal(latents_of(tokens, 3, 5), latents)
    assert torch.equal(tokens[1, 5 * 3 + 5 + 2].view(4, 2, 2), latents[1, :, 1, 2:4, 4:6])


class TestFullSize:
    """Wan2.2-S2V-14B on the meta device: nothing is allocated."""

    model = load_config([ROOT / "configs" / "live-avatar-14b.yaml"]).model

    def test_its_geometry_is_the_published_one(self) -> None:
        model = self.model
        assert (model.grid_rows, model.grid_columns) == (24, 44)
        assert model.video_tokens == 3 * 1056 and model.window_chunks * model.video_tokens == 12_672
        assert model.prefix_slots == 2640
        assert model.voice_samples_per_chunk == 23_040 and model.chunk_period_s == 0.48

    def test_its_levels_are_the_schedulers(self) -> None:
        """Four flow-matching Euler steps; the shift of 3 is applied twice, and the last falls on
        the smallest of a thousand."""

        def shifted(level: float) -> float:
            return 3 * level / (1 + 2 * level)

        levels = np.linspace(1, shifted(0.001), 4)
        assert self.model.noise_levels == pytest.approx([shifted(x) for x in levels], abs=1e-8)
        assert self.model.noise_levels == pytest.approx(recorded("authors")["sigmas"][:4])

    def test_every_tensor_has_a_recipe_of_its_shape(self) -> None:
        with torch.device("meta"):
            network = LiveAvatar(self.model)
        recipes = recipes_for(self.model)
        state = network.state_dict()
        assert recipes.keys() == state.keys()
        for key, recipe in recipes.items():
            sources = [torch.empty(shape, device="meta") for shape in recipe.sources.values()]
            assert recipe.build(*sources).shape == state[key].shape, key
        names = [name for recipe in recipes.values() for name in recipe.sources]
        assert len(names) == len(set(names)) == 1260
        assert len(lora_targets(recipes)) == 448
        assert sum(p.numel() for p in network.parameters()) == 16_295_755_609
