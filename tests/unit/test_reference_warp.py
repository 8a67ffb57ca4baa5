"""The chunk decoder: all that streams is in its state, and texture is the reference's own."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from characters_serve.config import ModelConfig
from characters_serve.model.decoders.reference_warp import DecoderState, VideoDecoder, continued
from characters_serve.model.weights import load_decoder
from scripts.train_tiny.train_autoencoder import Autoencoder

SMALL = ModelConfig(name="small", weights="synthetic", width=128, height=64)


@functools.cache
def synthetic() -> VideoDecoder:
    decoder = load_decoder(SMALL, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(decoder, VideoDecoder)
    # Flows of some pixels and half-seen paint, so that every part shows in the frames.
    decoder.decoder.motion.weight.mul_(20)
    return decoder


def image_of(seed: int) -> Tensor:
    """(1, 3, H, W), smooth enough to be moved by parts of a pixel."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 8, 16, generator=random)
    size = (SMALL.height, SMALL.width)
    return torch.nn.functional.interpolate(coarse, size, mode="bilinear", align_corners=True)


def latents_of(seed: int, count: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, SMALL.video_tokens, SMALL.token_channels, generator=random)


@torch.no_grad()
def decoded(decoder: VideoDecoder, state: DecoderState, latents: Tensor) -> Tensor:
    """(chunks, F, 3, H, W), each chunk from the state that the one before left."""
    chunks = []
    for latent in latents:
        frames, state = decoder.decode(latent, state)
        chunks.append(frames)
    return torch.stack(chunks)


@torch.no_grad()
def started(decoder: VideoDecoder, image: Tensor) -> DecoderState:
    return decoder.start(image)


@torch.no_grad()
def painting(mask: float, paint: float = 0.0, flow: tuple[float, float] = (0, 0)) -> VideoDecoder:
    """A decoder whose last layers give the same everywhere, whatever the latent."""
    torch.manual_seed(0)
    decoder = VideoDecoder(SMALL).eval()
    last = decoder.decoder
    for layer in (last.motion, last.fine_flow, last.paint):
        layer.weight.zero_()
        assert layer.bias is not None
        layer.bias.zero_()
    assert last.motion.bias is not None and last.paint.bias is not None
    last.motion.bias.view(-1, 3)[:, :2] = torch.tensor(flow)
    last.paint.bias[: 3 * 4] = 0.5 + paint
    last.paint.bias[3 * 4 :] = mask
    return decoder


def test_sizes() -> None:
    frames = decoded(synthetic(), started(synthetic(), image_of(0)), latents_of(0, 3))
    assert frames.shape == (3, SMALL.frames_per_chunk, 3, SMALL.height, SMALL.width)
    assert frames.dtype == torch.float32
    assert (frames[:, 1:] - frames[:, :-1]).abs().mean() > 1e-3


def test_a_session_decoded_twice_is_the_same() -> None:
    decoder, latents = synthetic(), latents_of(0, 5)
    first = decoded(decoder, started(decoder, image_of(0)), latents)
    decoded(decoder, started(decoder, image_of(1)), latents_of(1, 3))
    assert torch.equal(decoded(decoder, started(decoder, image_of(0)), latents), first)


@torch.no_grad()
def test_a_state_can_be_continued_more_than_once() -> None:
    decoder, latents = synthetic(), latents_of(0, 4)
    state = decoder.start(image_of(0))
    whole = decoded(decoder, state, latents)
    for latent in latents[:2]:
        _, state = decoder.decode(latent, state)
    for _ in range(2):
        assert torch.equal(decoded(decoder, state, latents[2:]), whole[2:])


@torch.no_grad()
def test_the_state_is_the_reference_and_the_previous_latent() -> None:
    decoder, latents = synthetic(), latents_of(0, 2)
    start = decoder.start(image_of(0))
    assert not start.previous.any()
    _, state = decoder.decode(latents[0], start)
    assert state.reference is start.reference
    grid = (SMALL.grid_rows, SMALL.grid_columns)
    assert torch.equal(state.previous[0], latents[0].T.reshape(-1, *grid))
    after, _ = decoder.decode(latents[1], state)
    alone, _ = decoder.decode(latents[1], start)
    assert (after - alone).abs().max() > 1e-3


@torch.no_grad()
def test_the_state_keeps_no_hold_of_the_callers_latent() -> None:
    """A captured step writes each latent over the last one, in the same memory."""
    decoder, latents = synthetic(), latents_of(0, 4)
    expected = decoded(decoder, decoder.start(image_of(0)), latents)
    state, buffer = decoder.start(image_of(0)), torch.empty_like(latents[0])
    for latent, right in zip(latents, expected, strict=True):
        buffer.copy_(latent)
        frames, state = decoder.decode(buffer, state)
        assert torch.equal(frames, right)


@torch.no_grad()
def test_bytes_and_floats_start_the_same_session() -> None:
    decoder = synthetic()
    image = (image_of(0)[0].permute(1, 2, 0) * 255).round().to(torch.uint8)
    from_bytes = decoder.start(image)
    from_floats = decoder.start(image.permute(2, 0, 1)[None].float() / 255)
    for one, other in zip(from_bytes.reference, from_floats.reference, strict=True):
        torch.testing.assert_close(one, other)


def test_without_flow_and_paint_every_frame_is_the_reference() -> None:
    image = image_of(0)
    decoder = painting(mask=-40)
    frames = decoded(decoder, started(decoder, image), latents_of(0, 3))
    torch.testing.assert_close(frames, image.expand_as(frames), rtol=0, atol=1e-4)


def test_paint_covers_the_reference_where_the_mask_says() -> None:
    half = decoded(
        painting(mask=0, paint=0.25), started(painting(mask=0), image_of(0)), latents_of(0, 1)
    )
    expected = (0.75 + image_of(0)) / 2
    torch.testing.assert_close(half, expected.expand_as(half), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("paint", "shown"), [(9.0, 1.0), (-9.0, 0.0)])
def test_frames_stay_in_range(paint: float, shown: float) -> None:
    decoder = painting(mask=40, paint=paint)
    frames = decoded(decoder, started(decoder, image_of(0)), latents_of(0, 1))
    assert (frames == shown).all()


@pytest.mark.parametrize("pixels_xy", [(3, 0), (0, -2), (-1, 4)])
def test_flow_looks_that_many_pixels_away(pixels_xy: tuple[int, int]) -> None:
    """A flow of 1 is half the picture; the layer's output is a tenth of it."""
    x, y = pixels_xy
    flow = (10 * 2 * x / (SMALL.width - 1), 10 * 2 * y / (SMALL.height - 1))
    decoder, image = painting(mask=-40, flow=flow), image_of(0)
    frames = decoded(decoder, started(decoder, image), latents_of(0, 1))[0, -1:]  # started at rest
    moved = image.roll((-y, -x), dims=(-2, -1)).expand_as(frames)
    inside = (..., slice(8, -8), slice(8, -8))
    torch.testing.assert_close(frames[inside], moved[inside], rtol=0, atol=1e-3)
    assert (frames - image)[inside].abs().max() > 0.02


def test_a_small_step_between_chunks_fades_and_a_motion_stays() -> None:
    """A flow of 1 is a tenth of half the picture: 6.4 pixels across."""
    going = torch.arange(4.0)[None, :, None, None, None] * 0.1 * torch.ones(1, 4, 2, 8, 16)
    before = going[:, 0] - 0.1
    torch.testing.assert_close(continued(going, before), going)
    for step, pixels in ((0.05, 0.358), (2.0, 14.3)):
        moved = continued(going, before + step) - going
        left = step * math.exp(-((pixels / 2) ** 2))
        for frame, share in enumerate((0.75, 0.5, 0.25, 0.0)):
            expected = torch.full_like(moved[:, frame], share * left)
            torch.testing.assert_close(moved[:, frame], expected, rtol=0.01, atol=1e-5)


@torch.no_grad()
def test_clips_are_decoded_in_training_as_they_are_served() -> None:
    network = Autoencoder(SMALL)
    network.decoder = synthetic()
    image, latents = image_of(0), latents_of(0, 4)
    served = decoded(synthetic(), started(synthetic(), image), latents)
    whole = network.decode(latents[None], image)[0].clamp(0, 1)
    torch.testing.assert_close(whole, served.flatten(0, 1), rtol=0, atol=1e-4)
    later = network.decode(latents[None, 2:], image, latents[None, 1])[0].clamp(0, 1)
    torch.testing.assert_close(later[-4:], served[3], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_batch_is_its_single_sessions() -> None:
    network = synthetic()
    images = torch.cat([image_of(0), image_of(1)])
    latents = torch.stack([latents_of(0, 3), latents_of(1, 3)], dim=1)
    state = network.start(images)
    both = []
    for latent in latents:
        frames, state = network.decoder(latent, state)
        both.append(frames)
    for row in range(2):
        single = decoded(network, network.start(images[row : row + 1]), latents[:, row])
        batched = torch.stack(both)[:, row].clamp(0, 1)
        torch.testing.assert_close(batched, single, rtol=1e-4, atol=1e-4)
    assert (both[0][0] - both[0][1]).abs().max() > 0.05


def test_bf16_stays_near_float32() -> None:
    """The decoder of a GPU: within what eight bits of mantissa leave of a picture."""
    half = load_decoder(SMALL, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert isinstance(half, VideoDecoder)
    half.decoder.motion.weight.mul_(20)
    latents = latents_of(0, 2)
    frames = decoded(half, started(half, image_of(0)), latents)
    assert frames.dtype == torch.float32
    exact = decoded(synthetic(), started(synthetic(), image_of(0)), latents)
    error = float((frames - exact).square().mean())
    assert -10 * math.log10(error) > 35


def test_other_strides_are_refused() -> None:
    with pytest.raises(ValueError, match="stride 32"):
        VideoDecoder(ModelConfig(latent_stride=16))
    with pytest.raises(ValueError, match="two frames"):
        VideoDecoder(ModelConfig(frames_per_chunk=1))
