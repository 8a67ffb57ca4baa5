"""Training computes whole clips as the served, cached steps do, and latents of motion alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from characters_serve.config import AudioConfig, ModelConfig, Optimizations
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.kv_cache import make_cache
from characters_serve.model.weights import save_network
from scripts.train_tiny import train_dit
from scripts.train_tiny.data import Clips
from scripts.train_tiny.networks import CONTROLS, ChunkEncoder, blend, unread
from scripts.train_tiny.train_dit import (
    Pool,
    RolloutContext,
    TrainingPass,
    load_with_new_audio_encoder,
)

CHUNKS = 8


@torch.no_grad()
def transformer(model: ModelConfig) -> CharacterDiT:
    """Whose layers all do something: what begins with zeros is drawn, too."""
    dit = CharacterDiT(model)
    for parameter in dit.parameters():
        if not parameter.any():
            parameter.normal_(std=0.05)
    return dit


@torch.no_grad()
def test_training_pass_equals_cached_steps() -> None:
    torch.manual_seed(0)
    model = ModelConfig(dim=64, num_blocks=2, num_heads=1, mlp_dim=128)
    dit = transformer(model).eval()
    images = torch.rand(2, 3, model.height, model.width)
    mel = torch.randn(2, CHUNKS, 28, model.audio.num_mels)
    controls = torch.randn(2, CHUNKS, model.frames_per_chunk, model.num_controls)
    context = torch.randn(2, CHUNKS, model.video_tokens, model.token_channels)
    denoised = torch.randn_like(context)
    levels = torch.tensor([0.25, 0.75]).repeat_interleave(2)[:, None].expand(-1, CHUNKS)

    whole = TrainingPass(dit, compiled=False)(
        images, torch.cat([context, denoised]), levels, mel, controls, torch.zeros(2)
    )

    cache = make_cache(model, Optimizations(), batch=2)
    dit.write_prefix(images, cache)
    for chunk in range(CHUNKS):
        condition = dit.condition_on_mel(mel[:, chunk], controls[:, chunk])
        cache.begin_step()
        for stream, level in ((denoised, 0.75), (context, 0.25)):
            stepped = dit(stream[:, chunk], dit.modulate(torch.tensor(level)), condition, cache, 0)
            part = whole[2:] if stream is denoised else whole[:2]
            torch.testing.assert_close(part[:, chunk], stepped, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_latent_says_nothing_of_who_sits_still_and_moving_ones_have_unit_mean_square() -> None:
    model = ModelConfig(width=64, height=64)
    torch.manual_seed(0)
    encoder = ChunkEncoder(model)
    for layer in encoder.layers:
        if isinstance(layer, torch.nn.Conv2d) and layer.bias is not None:
            torch.nn.init.normal_(layer.bias)
    people = torch.rand(3, 3, 64, 64)
    length = 2 * model.frames_per_chunk
    still = people[:, None].expand(-1, length, -1, -1, -1)
    assert not encoder(still, people).any()
    moving = still.clone()
    moving[:, :, :, 16:48, 16:48] += 0.2 * torch.rand(3, length, 1, 32, 32)
    latent = encoder(moving, people)
    tokens = model.grid_rows * model.grid_columns
    assert latent.shape == (3, 2, tokens, model.token_channels)
    assert float(latent.square().mean()) == pytest.approx(1.0, abs=1e-3)
    for _ in range(300):  # its running scale settles
        encoder.scale(latent * 3)
    assert float(encoder.eval().scale(latent * 3).square().mean()) == pytest.approx(1.0, abs=0.02)


def test_a_run_goes_on_with_a_new_audio_encoder_and_everything_else_as_it_was(
    tmp_path: Path,
) -> None:
    small = ModelConfig(dim=64, num_blocks=1, num_heads=1, mlp_dim=128)
    trained = CharacterDiT(small.model_copy(update={"audio": AudioConfig(num_mels=40)}))
    save_network(trained, tmp_path, "dit")
    loaded = load_with_new_audio_encoder(small, tmp_path, torch.device("cpu")).state_dict()
    for key, value in trained.state_dict().items():
        if not key.startswith("audio_encoder."):
            assert torch.equal(loaded[key], value.half().float()), key
    with pytest.raises(RuntimeError, match="latent_in"):
        wider = small.model_copy(update={"latent_channels": 32})
        load_with_new_audio_encoder(wider, tmp_path, torch.device("cpu"))


def test_every_clip_of_the_pool_gives_way_in_turn_and_what_is_rolled_is_of_the_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_dit, "RENEWED", 2)
    torch.manual_seed(0)
    model = ModelConfig(width=64, height=64, dim=64, num_blocks=1, num_heads=1, mlp_dim=128)
    made = iter(range(1, 100))

    def encode(count: int) -> Pool:
        number = next(made)
        frames = 2 * model.frames_per_chunk
        mels = model.frames_per_chunk * model.mels_per_frame
        mels += model.audio.past_frames + model.audio.future_frames
        clips = Clips(
            torch.full((count, 1), float(number)),
            torch.rand(count, frames, CONTROLS),
            torch.randn(count, 2, mels, model.audio.num_mels),
            torch.rand(count, CONTROLS),
        )
        references = torch.full((count, 3, 64, 64), number, dtype=torch.uint8)
        latents = torch.full((count, 2, model.video_tokens, model.token_channels), float(number))
        return Pool(clips, references, latents)

    pool = encode(7)
    context = RolloutContext(transformer(model), pool, encode, group=4, seed=0)
    renewed, rolled = [], []
    for _ in range(5):
        before = context.latents.clone()
        context.refresh()
        renewed.append(pool.clips.attributes[:, 0].int().tolist())
        rolled.append((context.latents != before).any(dim=(1, 2, 3)).tolist())

    assert renewed == [
        [2, 2, 1, 1, 1, 1, 1],
        [2, 2, 1, 1, 3, 3, 1],
        [2, 2, 4, 4, 3, 3, 1],
        [2, 2, 4, 4, 3, 3, 5],
        [6, 6, 4, 4, 3, 3, 5],
    ]
    first, second = [True] * 4 + [False] * 3, [False] * 4 + [True] * 3
    assert rolled == [first, second, first, second, first]
    assert pool.latents[:, 0, 0, 0].int().tolist() == renewed[-1]
    assert pool.references[:, 0, 0, 0].int().tolist() == renewed[-1]


def test_a_blend_lies_between_both_networks() -> None:
    torch.manual_seed(0)
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    expected = 0.75 * one.weight.detach() + 0.25 * other.weight.detach()
    blend(one, other, 0.25)
    torch.testing.assert_close(one.weight.detach(), expected)


def test_what_moves_little_counts_as_much_as_what_moves_widely() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.2, 2, CONTROLS)
    change = torch.randn(400, 4, CONTROLS, generator=generator) * scale
    assert float(unread(change, change)) == 0
    for control in (0, CONTROLS - 1):
        read = change.clone()
        read[..., control] = 0
        assert float(unread(read, change)) == pytest.approx(1 / CONTROLS, rel=0.05)
