"""The decoder process's computation with each of the decoders that a configuration can name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from characters_serve.config import ConfigError, ModelConfig, load_config
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.model.decoders.latent_video import LatentVideoDecoder, make_autoencoder
from characters_serve.model.decoders.stream import StreamState
from characters_serve.model.weights import WeightsError, load_decoder

CPU = torch.device("cpu")
SETTINGS = {
    "reference_warp": {},
    "wan22": {"latent_stride": 16, "latent_channels": 48, "patch": 2, "decoder_dim": 4},
    "wan21": {"latent_stride": 8, "latent_channels": 16, "patch": 2, "decoder_dim": 4},
    "taehv": {"latent_stride": 16, "latent_channels": 48, "patch": 2, "decoder_dim": 4},
    "taehv_super": {"latent_stride": 16, "latent_channels": 48, "decoder_dim": 4},
}
KINDS = list(SETTINGS)
LATENT_KINDS = KINDS[1:]


def model_of(kind: str) -> ModelConfig:
    return ModelConfig.model_validate(
        {"decoder": kind, "weights": "synthetic", "width": 64, "height": 32} | SETTINGS[kind]
    )


def image_of(model: ModelConfig, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, model.height * model.width * 3, np.uint8).tobytes()


def latents_of(model: ModelConfig, seed: int, count: int = 3) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (model.video_tokens, model.token_channels)
    return [torch.randn(shape, generator=random) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_chunk_of_a_session_has_its_frames(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind)
    decoder = ChunkDecoder(model, CPU, dtype)
    with pytest.raises(RuntimeError, match="before start"):
        decoder.decode(latents_of(model, 0)[0])

    def film(seed: int) -> list[bytes]:
        decoder.start(image_of(model, 0))
        return [frame for latent in latents_of(model, seed) for frame in decoder.decode(latent)]

    first = film(seed=1)
    assert len(first) == 3 * model.frames_per_chunk
    assert {len(frame) for frame in first} == {model.width * model.height * 3 // 2}
    assert len(set(first)) == len(first)
    assert film(seed=2) != first
    assert film(seed=1) == first


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_the_stream_begins_with_the_reference(kind: str) -> None:
    """What the engine shows is the autoencoder's own decoding of [reference, latents]."""
    model = model_of(kind)
    decoder = load_decoder(model, device=CPU, dtype=torch.float32)
    assert isinstance(decoder, LatentVideoDecoder)
    pixels = np.frombuffer(image_of(model, 1), np.uint8).reshape(model.height, model.width, 3)
    image = torch.from_numpy(pixels.copy())
    for parameter in decoder.vae.parameters():
        if parameter.ndim > 2:
            # As large as the input: what came before must show in what comes after.
            parameter.normal_(std=(1.5 / parameter[0].numel()) ** 0.5)
    state = decoder.start(image)
    shown = []
    for tokens in latents_of(model, 0):
        frames, state = decoder.decode(tokens, state)
        assert frames.shape == (model.frames_per_chunk, 3, model.height, model.width)
        shown.append(frames)

    vae, darkest = decoder.vae, decoder.vae.darkest
    reference = (image / 255)[None, None] * (1 - darkest) + darkest
    grid = (model.grid_rows, model.grid_columns)
    latents = [vae.encode(reference, StreamState())]
    for tokens in latents_of(model, 0):
        # pixel_shuffle reads a token's channels as (channel, row, column).
        picture = torch.unflatten(tokens.T, 1, grid)
        latents.append(torch.pixel_shuffle(picture, model.patch).permute(1, 2, 0)[None, None])
    frames = vae.decode(torch.cat(latents, dim=1), StreamState())[0, 1:]
    expected = ((frames - darkest) / (1 - darkest)).clamp(0, 1).permute(0, 3, 1, 2)
    torch.testing.assert_close(torch.cat(shown), expected, rtol=0, atol=1e-4)
    without = vae.decode(torch.cat(latents[1:], dim=1), StreamState())[0]
    assert (without - frames[3:]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_weights_are_read_under_the_published_names(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    made = load_decoder(model, device=CPU, dtype=torch.float32, seed=5)
    assert isinstance(made, LatentVideoDecoder)
    state = {key: value.contiguous() for key, value in made.vae.state_dict().items()}
    save_file(state, tmp_path / "decoder.safetensors")
    stored = model.model_copy(update={"weights": str(tmp_path)})
    read = load_decoder(stored, device=CPU, dtype=torch.float32, seed=6)
    assert isinstance(read, LatentVideoDecoder)
    assert all(torch.equal(value, state[key]) for key, value in read.vae.state_dict().items())
    save_file(dict(list(state.items())[1:]), tmp_path / "decoder.safetensors")
    with pytest.raises(WeightsError, match="missing keys"):
        load_decoder(stored, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("decoder=wan22", "latent_stride and latent_channels 16 and 48"),
        ("decoder=taehv", "8 and 16 or 16 and 48"),
        ("decoder=wan21 latent_stride=8 latent_channels=16 frames_per_chunk=6", "4 frames of each"),
        ("decoder=magvit", "model.decoder"),
    ],
)
def test_what_a_decoder_cannot_read_is_refused(settings: str, reason: str) -> None:
    overrides = [f"model.{setting}" for setting in settings.split()]
    with pytest.raises(ConfigError, match=reason):
        load_config(overrides=overrides)


def test_published_widths_are_the_default() -> None:
    model = model_of("wan22").model_copy(update={"decoder_dim": 0})
    with torch.device("meta"):
        published = make_autoencoder(model)
        small = make_autoencoder(model_of("wan22"))
    assert published.encoder.conv1.out_channels == 160  # type: ignore[union-attr]
    assert small.encoder.conv1.out_channels == 3  # type: ignore[union-attr]
