"""The fast decoders on a GPU: the plain one's pictures, without a wait or an allocation a chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from characters_serve.bench.decode import readers
from characters_serve.config import ModelConfig, Optimizations, load_config
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.engine.decode_graph import CapturedStream
from characters_serve.model.decoders.latent_video import make_autoencoder
from tests.kernels.gpu_rig import no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU of Hopper's class"),
]

CONFIGS = Path(__file__).parents[2] / "configs"
BIG = load_config([CONFIGS / "characters-57b.yaml"]).model
# A fifth of the picture: what differs between the paths does not depend on its size.
MODELS: dict[str, ModelConfig] = {
    model.decoder: model for model in readers(BIG.model_copy(update={"width": 512, "height": 320}))
}
CHUNKS = 6
KINDS = pytest.mark.parametrize("kind", ["wan22", "taehv", "taehv_super"])
DEVICE = torch.device("cuda")
Make = Callable[..., ChunkDecoder]


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default convolutions may compute in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @functools.cache
    def weights(kind: str) -> str:
        """Without norms, a small network's synthetic weights would leave nothing of its input."""
        if kind == "wan22":
            return "synthetic"
        folder = tmp_path_factory.mktemp(kind)
        state = make_autoencoder(MODELS[kind]).state_dict()
        random = torch.Generator().manual_seed(0)
        for value in state.values():
            spread = (1.5 / value[0].numel()) ** 0.5 if value.ndim > 1 else 0.1
            value.normal_(std=spread, generator=random)
        save_file(state, folder / "decoder.safetensors")
        return str(folder)

    @functools.cache
    def make(kind: str, fast: bool, dtype: torch.dtype = torch.bfloat16) -> ChunkDecoder:
        model = MODELS[kind].model_copy(update={"weights": weights(kind)})
        return ChunkDecoder(model, DEVICE, dtype, Optimizations(fast_decoder=fast))

    return make


def latents(model: ModelConfig, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (model.video_tokens, model.token_channels)
    return [torch.randn(shape, generator=random).to(DEVICE) for _ in range(CHUNKS)]


def film(made: ChunkDecoder, model: ModelConfig, seed: int = 0) -> Tensor:
    """Planes of a character, (chunks, frames, bytes), as float."""
    random = torch.Generator().manual_seed(seed)
    shape = (model.height * model.width * 3,)
    image = torch.randint(256, shape, generator=random, dtype=torch.uint8)
    made.start(image.numpy().tobytes())
    chunks = [b"".join(made.decode(latent)) for latent in latents(model, seed)]
    planes = [torch.frombuffer(bytearray(chunk), dtype=torch.uint8) for chunk in chunks]
    return torch.stack(planes).view(CHUNKS, model.frames_per_chunk, -1).float()


def brightness(planes: Tensor, model: ModelConfig) -> Tensor:
    return planes[..., : model.height * model.width]


@KINDS
def test_fast_errs_no_more_than_plain(decoder: Make, kind: str) -> None:
    """From float32, over six chunks and a second character in the same memory."""
    model = MODELS[kind]
    for seed in (0, 1):
        truth = film(decoder(kind, False, torch.float32), model, seed)
        assert brightness(truth, model).std() > 10

        def error(fast: bool, truth: Tensor = truth, seed: int = seed) -> Tensor:
            """Root mean square of each chunk, in levels."""
            found = film(decoder(kind, fast), model, seed)
            return (found - truth).square().flatten(1).mean(1).sqrt()

        plain, fast = error(fast=False), error(fast=True)
        assert fast.max() <= 1.5 * plain.max() + 0.1
        assert fast[-2:].max() <= 2 * fast[:2].max() + 0.1, "the error must not grow"


@KINDS
def test_a_character_decodes_alike_after_another(decoder: Make, kind: str) -> None:
    made, model = decoder(kind, True), MODELS[kind]
    first = film(made, model, 0)
    assert not torch.equal(film(made, model, 1), first)
    assert torch.equal(film(made, model, 0), first)


@KINDS
def test_a_steady_chunk_never_waits_and_takes_no_memory(decoder: Make, kind: str) -> None:
    made, model = decoder(kind, True), MODELS[kind]
    stream = made._stream
    assert isinstance(stream, CapturedStream)
    film(made, model)
    given = latents(model, 2)
    before = torch.cuda.memory_stats()
    with no_waits(), torch.inference_mode():
        for latent in given:
            stream.replay(latent)
    with torch.inference_mode():
        stream.collect()
    after = torch.cuda.memory_stats()
    for key in ("num_device_alloc", "reserved_bytes.all.current", "allocated_bytes.all.current"):
        assert after[key] == before[key], key


def test_a_stream_that_starts_without_a_reference_is_decoded_alike() -> None:
    """Its first latent is no steady chunk, so it is decoded eagerly before the replays."""
    open_model = load_config([CONFIGS / "self-forcing-1.3b.yaml"]).model
    model = open_model.model_copy(update={"width": 416, "height": 240, "decoder_dim": 32})
    plain, fast = (
        ChunkDecoder(model, DEVICE, torch.float32, Optimizations(fast_decoder=flag))
        for flag in (False, True)
    )
    assert (film(fast, model) - film(plain, model)).abs().max() <= 2
