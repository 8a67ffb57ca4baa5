"""The transformer: seeds decide everything, sessions do not mix, flags change no number."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from characters_serve.config import Optimizations, load_config
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.kv_cache import make_cache
from characters_serve.model.weights import load_generator
from tests.unit.small_model import SMALL

CONFIGS = Path(__file__).parents[2] / "configs"
FAST = Optimizations()
PLAIN = Optimizations(write_time_rope=False, ring_cache=False, precomputed_modulation=False)


@functools.cache
def network() -> CharacterDiT:
    dit = load_generator(SMALL, device=torch.device("cpu"), dtype=torch.float32)
    dit.final.out.weight.mul_(5)
    return dit


def roll(
    denoiser: Denoiser, *, seed: int, steps: int = 9, voice: int = 0, image: int = 0
) -> Tensor:
    random = torch.Generator().manual_seed(image)
    rows = torch.randint(0, 256, (SMALL.height, SMALL.width, 3), generator=random)
    denoiser.start(rows.to(torch.uint8), seed)
    random = torch.Generator().manual_seed(voice)
    samples = network().log_mel.window_samples
    latents = []
    for _ in range(steps):
        window = 0.1 * torch.randn(samples, generator=random)
        shape = (SMALL.frames_per_chunk, SMALL.num_controls)
        controls = torch.rand(shape, generator=random)
        latents.append(denoiser.step(window, controls, 4))
    return torch.stack(latents)


def test_a_seed_and_its_inputs_decide_every_number() -> None:
    one = Denoiser(network(), SMALL, FAST)
    first = roll(one, seed=7)
    assert first.shape == (9, SMALL.video_tokens, SMALL.token_channels)
    assert first.dtype == torch.float32 and first.isfinite().all()
    torch.manual_seed(123)  # noise comes from the session's own generator
    assert torch.equal(roll(one, seed=7), first)
    assert torch.equal(roll(Denoiser(network(), SMALL, FAST), seed=7), first)
    for other in (
        roll(one, seed=8),
        roll(one, seed=7, voice=1),
        roll(one, seed=7, image=1),
    ):
        assert (other[0] - first[0]).abs().max() > 1e-3


def test_what_is_not_yet_said_changes_nothing() -> None:
    assert torch.equal(
        roll(Denoiser(network(), SMALL, FAST), seed=1, steps=4),
        roll(Denoiser(network(), SMALL, FAST), seed=1, steps=9)[:4],
    )


def test_chunks_remember_those_before() -> None:
    """The same chunk after another past comes out otherwise."""
    dit = network()
    noisy = torch.randn(1, SMALL.video_tokens, SMALL.token_channels)
    pasts = torch.randn(2, 1, 28, SMALL.audio.num_mels)
    controls = torch.zeros(1, SMALL.frames_per_chunk, SMALL.num_controls)
    modulation = dit.modulate(torch.tensor(0.5))
    made = []
    for past in pasts:
        cache = make_cache(SMALL, FAST)
        dit.write_prefix(torch.zeros(1, 3, SMALL.height, SMALL.width), cache)
        for mel in (past, torch.zeros_like(past)):
            cache.begin_step()
            clean = dit(noisy, modulation, dit.condition_on_mel(mel, controls), cache, 0)
        made.append(clean)
    assert (made[0] - made[1]).abs().max() > 1e-3


@pytest.mark.parametrize("optimizations", [PLAIN, FAST], ids=["plain", "fast"])
def test_a_batch_of_two_is_two_single_sessions(optimizations: Optimizations) -> None:
    dit, chunks = network(), 8
    random = torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, SMALL.height, SMALL.width, generator=random)
    noisy = torch.randn(chunks, 2, SMALL.video_tokens, SMALL.token_channels, generator=random)
    windows = 0.1 * torch.randn(chunks, 2, dit.log_mel.window_samples, generator=random)
    controls = torch.rand(chunks, 2, SMALL.frames_per_chunk, SMALL.num_controls, generator=random)
    levels = torch.tensor([0.25, 0.75])

    def made(rows: slice) -> Tensor:
        count = len(images[rows])
        cache = make_cache(SMALL, optimizations, batch=count)
        dit.write_prefix(images[rows], cache)
        modulation = dit.modulate(levels[rows])
        cleans = []
        for chunk in range(chunks):
            condition = dit.condition(windows[chunk, rows], controls[chunk, rows])
            cache.begin_step()
            cleans.append(dit(noisy[chunk, rows], modulation, condition, cache, 0))
        return torch.stack(cleans)

    both = made(slice(0, 2))
    singles = torch.cat([made(slice(0, 1)), made(slice(1, 2))], dim=1)
    torch.testing.assert_close(both, singles, rtol=1e-4, atol=1e-5)
    assert (both[:, 0] - both[:, 1]).abs().max() > 0.1


def test_kept_modulation_is_exactly_the_computed_one() -> None:
    computed = FAST.model_copy(update={"precomputed_modulation": False})
    assert torch.equal(
        roll(Denoiser(network(), SMALL, FAST), seed=2),
        roll(Denoiser(network(), SMALL, computed), seed=2),
    )


def test_kept_modulation_is_computed_once_for_each_noise_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels: list[float] = []
    modulate = CharacterDiT.modulate

    def counted(self: CharacterDiT, level: Tensor) -> object:
        levels.append(float(level))
        return modulate(self, level)

    monkeypatch.setattr(CharacterDiT, "modulate", counted)
    roll(Denoiser(network(), SMALL, FAST), seed=2, steps=3)
    assert levels == list(SMALL.noise_levels)
    levels.clear()
    roll(Denoiser(network(), SMALL, PLAIN), seed=2, steps=3)
    assert levels == list(SMALL.noise_levels) * 3


def test_modulation_starts_as_the_identity() -> None:
    dit = CharacterDiT(SMALL)
    for level in SMALL.noise_levels:
        modulation = dit.modulate(torch.tensor(level))
        for shift, scale, gate in modulation.blocks:
            assert not shift.any() and (scale == 1).all() and (gate == 1).all()
        shift, scale = modulation.final
        assert not shift.any() and (scale == 1).all()
    for block in dit.blocks:
        assert (block.modulate(dit.prefix_embedding).gate == 1).all()


def test_noise_levels_modulate_differently() -> None:
    dit = network()
    gates = torch.stack(
        [dit.modulate(torch.tensor(level)).blocks[0].gate for level in SMALL.noise_levels]
    )
    distances = torch.cdist(gates.flatten(1), gates.flatten(1))
    assert (distances + torch.eye(len(gates)) > 0.01).all()


@pytest.mark.parametrize("name", ["tiny", "characters-57b"])
def test_plain_and_fast_have_one_checkpoint(name: str) -> None:
    shapes = []
    for files in ([name], [name, "plain"]):
        model = load_config([CONFIGS / f"{file}.yaml" for file in files]).model
        with torch.device("meta"):
            state = CharacterDiT(model).state_dict()
        shapes.append({key: tuple(value.shape) for key, value in state.items()})
    assert shapes[0] == shapes[1]


def test_running_adds_nothing_to_the_checkpoint() -> None:
    dit = network()
    before = {key: value.clone() for key, value in dit.state_dict().items()}
    for optimizations in (PLAIN, FAST):
        roll(Denoiser(dit, SMALL, optimizations), seed=0, steps=7)
    after = dit.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
