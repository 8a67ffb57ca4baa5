"""Stage 1: the chunk encoder and the reference-warping decoder, on rendered characters and, for
the textures of what people upload, on moved real pictures.

In: clips on demand. Out: RUN/encoder.pt, RUN/decoder.pt, RUN/mouth_reader.pt, curves and pictures.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig
from characters_serve.model.decoders.reference_warp import (
    VideoDecoder,
    continued,
    expected_before,
)
from scripts.train_tiny.data import Clips, ClipSource, render_clips, render_with_references
from scripts.train_tiny.networks import (
    CONTROLS,
    AveragedWeights,
    ChunkEncoder,
    LatentReader,
    MouthReader,
    MuonAdamW,
    correlation,
    crop_mouth,
    mixed_precision,
    unread,
)
from scripts.train_tiny.pictures import save_sheet
from scripts.train_tiny.profiler import StepProfiler
from scripts.train_tiny.real_clips import RealClips, RealPictures
from scripts.train_tiny.renderer import Renderer, mouth_box, region_masks

LATENT_NOISE = 0.5
"""At most; the transformer's rollouts err by 0.3. Of latents that were learned under a noise of 0.1
nine tenths of the variance were the same all through a clip."""
READ_WEIGHT = 0.02
READER_RATE = 2e-3
COMPILE_STEPS = 3
"""A stage's clock starts after these."""
CHUNKS_PER_CLIP = 2


def picture_loss(frames: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """Weighted L1 of pixels, of their gradients and of their change in time.

    frames, truth: (N, T, 3, H, W); weights: (N, T, 1, H, W).
    """
    error = frames - truth
    pixels = (error.abs() * weights).mean()
    columns = (error.diff(dim=-1).abs() * weights[..., 1:]).mean()
    rows = (error.diff(dim=-2).abs() * weights[..., 1:, :]).mean()
    time_change = (error.diff(dim=1).abs() * weights[:, 1:]).mean()
    return pixels + 0.7 * (columns + rows) + 1.0 * time_change


def region_weights(clips: Clips) -> Tensor:
    """(N, T, 1, H, W): 1, and 9 on the mouth and the eyes."""
    count, length = clips.controls.shape[:2]
    attributes = clips.attributes[:, None].expand(-1, length, -1).flatten(0, 1)
    mouth, eyes = region_masks(attributes, clips.controls.flatten(0, 1))
    weights = 1 + 8 * mouth + 8 * eyes
    return torch.unflatten(weights, 0, (count, length))


class Autoencoder(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.encoder = ChunkEncoder(model)
        self.decoder = VideoDecoder(model)

    def encode(self, frames: Tensor, reference: Tensor) -> Tensor:
        """(N, T, 3, H, W) -> (N, K, tokens, C)."""
        latent: Tensor = self.encoder(frames, reference)
        return latent

    def decode(self, latent: Tensor, reference: Tensor, previous: Tensor | None = None) -> Tensor:
        """All chunks of a clip at once, each beside the one before: (N, K, tokens, C) -> frames.

        previous: the latent before the first, (N, tokens, C); the session's start if None.
        """
        length = latent.shape[1]
        first = torch.zeros_like(latent[:, :1]) if previous is None else previous[:, None]
        before = torch.cat([first, latent[:, :-1]], dim=1)
        decoder = self.decoder.decoder
        features = self.decoder.pyramid(reference)
        repeated = type(features)(*(f.repeat_interleave(length, dim=0) for f in features))
        now, then = (decoder.on_grid(part.flatten(0, 1)) for part in (latent, before))
        hidden, motion = decoder.move(now, then, repeated)
        flow = torch.unflatten(motion[:, :, :2], 0, (-1, length))
        # What the first chunk follows is at rest, or not known.
        began = expected_before(flow[:, 0])
        if previous is None:
            began = torch.zeros_like(began)
        last = torch.cat([began[:, None], flow[:, :-1, -1]], dim=1)
        flow = continued(flow.flatten(0, 1), last.flatten(0, 1))
        frames = decoder.draw(hidden, flow, motion[:, :, 2:], repeated)
        return torch.unflatten(frames, 0, (-1, length)).flatten(1, 2).float()


def autoencoder_loss(
    network: Autoencoder,
    reader: LatentReader,
    frames: Tensor,
    reference: Tensor,
    weights: Tensor,
    change: Tensor,
) -> Tensor:
    """Of pictures, and of what reads the change (R, T, 12) of the first R clips' controls from the
    latents."""
    latent = network.encode(frames, reference)
    level = LATENT_NOISE * torch.rand(len(latent), 1, 1, 1, device=latent.device)
    latent = latent + level * torch.randn_like(latent)
    read = reader(latent[: len(change)]).float().flatten(1, 2)
    pictures = picture_loss(network.decode(latent, reference), frames, weights)
    return pictures + READ_WEIGHT * unread(read, change)


def train_autoencoder(
    model: ModelConfig,
    source: ClipSource,
    renderer: Renderer,
    run: Path,
    *,
    start: Autoencoder | None,
    profiler: StepProfiler,
    real: RealPictures | None,
    seconds: float,
    batch: int,
    rate: float,
    seed: int,
) -> tuple[Autoencoder, MouthReader, dict[str, Any]]:
    """The last clips of each batch are of real pictures, where there are.

    Returns averaged weights, the yardstick, and the record of the run.
    """
    device = source.device
    generator = _generator(source, seed)
    torch.manual_seed(seed)
    network = start or _autoencoder(model, device)
    network.train().requires_grad_(True)
    reader = LatentReader(model).to(device)
    reader_optimizer = torch.optim.Adam(reader.parameters(), lr=READER_RATE)
    # These networks are bound by memory traffic: eager steps took 85 ms at 4 TFLOP/s.
    compiled = device.type == "cuda"
    loss_of = torch.compile(autoencoder_loss, dynamic=False) if compiled else autoencoder_loss
    optimizer = MuonAdamW([network], adam_only=("motion", "fine_flow", "paint", "layers.1."))
    average = AveragedWeights(network)
    frames = CHUNKS_PER_CLIP * model.frames_per_chunk
    log: list[dict[str, float]] = []
    started = time.monotonic()
    step = 0
    while (elapsed := time.monotonic() - started) < seconds:
        if step == COMPILE_STEPS:
            say(f"autoencoder compiled in {elapsed:.1f} s")
            seconds, started = seconds - elapsed, time.monotonic()
        clips = source.sample(batch, frames, generator)
        with torch.no_grad():
            truth, reference, weights = show(clips, renderer, real, generator)
        change = clips.change()[: _drawn(batch, real)]
        with mixed_precision(device):
            loss = loss_of(network, reader, truth, reference, weights, change)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(optimizer.parameters, 1.0)
        progress = elapsed / seconds
        warm = min(1.0, (step + 1) / 150)
        pace = warm * max(0.02, 0.5 + 0.5 * math.cos(math.pi * progress))
        optimizer.step(rate * pace)
        for group in reader_optimizer.param_groups:
            group["lr"] = READER_RATE * pace
        reader_optimizer.step()
        reader_optimizer.zero_grad(set_to_none=True)
        average.update()
        step += 1
        profiler.tick("autoencoder", step)
        if step % 200 == 0 or step in (1, 20):
            log.append({"step": step, "seconds": elapsed, "loss": loss.item()})
            say(f"autoencoder {step:5d} {elapsed:6.1f} s loss {log[-1]['loss']:.4f}")
    average.copy_to(network)
    network.eval().requires_grad_(False)
    mouth_reader = train_mouth_reader(source, renderer, seed)
    report = score_autoencoder(network, mouth_reader, reader, source, renderer, real, run)
    say(f"autoencoder {step} steps: {report}")
    return network, mouth_reader, {"log": log, "steps": step, "score": report}


def show(
    clips: Clips, renderer: Renderer, real: RealPictures | None, generator: torch.Generator
) -> RealClips:
    """The clips rendered, but for the last, which move real pictures."""
    drawn = _drawn(len(clips.controls), real)
    rendered = Clips(*(field[:drawn] for field in clips))
    made = RealClips(*render_with_references(renderer, rendered), region_weights(rendered))
    if real is None:
        return made
    moved = real.sample(clips.controls[drawn:], clips.reference_controls[drawn:], generator)
    return RealClips(*(torch.cat(pair) for pair in zip(made, moved, strict=True)))


def train_mouth_reader(
    source: ClipSource, renderer: Renderer, seed: int, steps: int = 1600
) -> MouthReader:
    """Learns to read mouth controls from true pictures: the yardstick, never a training signal."""
    generator = _generator(source, seed + 1)
    device = generator.device
    reader = MouthReader().to(device)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-3)
    for step in range(steps if device.type == "cuda" else 2):
        clips = source.sample(256 if device.type == "cuda" else 4, 4, generator)
        one = clips._replace(controls=clips.controls[:, :1])
        with torch.no_grad():
            crops = mouth_crops(one, render_clips(renderer, one))
        loss = functional.mse_loss(reader(crops), one.controls[:, 0, 7:10])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
    return reader.eval().requires_grad_(False)


def mouth_crops(clips: Clips, frames: Tensor) -> Tensor:
    """(N, T, 3, H, W) -> (N x T, 3, 48, 64), where the truth says the mouth is."""
    length = frames.shape[1]
    attributes = clips.attributes[:, None].expand(-1, length, -1).flatten(0, 1)
    centre, scale = mouth_box(attributes, clips.controls[:, :length].flatten(0, 1))
    return crop_mouth(frames.flatten(0, 1), centre, scale)


@torch.no_grad()
def score_autoencoder(
    network: Autoencoder,
    mouth_reader: MouthReader,
    reader: LatentReader,
    source: ClipSource,
    renderer: Renderer,
    real: RealPictures | None,
    run: Path,
    count: int = 16,
    frames: int = 96,
) -> dict[str, Any]:
    generator = _generator(source, 99)
    if generator.device.type == "cpu":
        count, frames = 2, 16
    clips = source.sample(count, frames, generator, held_out=True)
    totals: dict[str, list[float]] = {}
    reads, truths, shown = [], [], []
    changes, moved = [], []
    for i in range(count):
        one = Clips(*(field[i : i + 1] for field in clips))
        truth, reference = render_with_references(renderer, one)
        latent = network.encode(truth, reference)
        made = network.decode(latent, reference).clamp(0, 1)
        changes.append(reader(latent).flatten(1, 2)[0])
        moved.append(made[0].diff(dim=0).abs().mean((1, 2, 3)))
        for name, value in compare(one, made, truth).items():
            totals.setdefault(name, []).append(value)
        reads.append(mouth_reader(mouth_crops(one, made))[:, 0])
        truths.append(one.controls[0, :, 7])
        if i < 6:
            at = int(truths[-1][: frames - 6].unfold(0, 6, 1).std(1).argmax())
            shown += [reference[0], *truth[0, at : at + 6 : 2]]
            shown += [reference[0], *made[0, at : at + 6 : 2]]
    save_sheet(torch.stack(shown), run / "autoencoder.png", columns=8)
    score: dict[str, Any] = {k: round(sum(v) / len(v), 3) for k, v in totals.items()}
    score["mouth_correlation"] = round(correlation(torch.cat(reads), torch.cat(truths)), 3)
    moving, read, told = torch.stack(moved), torch.cat(changes), clips.change().flatten(0, 1)
    border = (torch.arange(1, frames) % network.model.frames_per_chunk == 0).to(moving.device)
    jump = moving[:, border].median() / moving[:, ~border].median()
    score["jump_at_chunk_border"] = round(float(jump), 3)
    score["controls_read"] = [
        round(correlation(read[:, i], told[:, i]), 3) for i in range(CONTROLS)
    ]
    if real:
        score |= score_real(network, source, real, run)
    return score


@torch.no_grad()
def score_real(
    network: Autoencoder, source: ClipSource, real: RealPictures, run: Path
) -> dict[str, float]:
    """PSNR of the held-out pictures' clips in dB; `real_still_db`: if nothing moved in them."""
    generator = _generator(source, 98)
    frames = 6 * network.model.frames_per_chunk
    errors, still, shown = [], [], []
    for row in range(real.held_out if generator.device.type == "cuda" else 2):
        told = source.sample(1, frames, generator, held_out=True)
        truth, reference, _ = real.sample_held_out(
            row, told.controls, told.reference_controls, generator
        )
        made = network.decode(network.encode(truth, reference), reference).clamp(0, 1)
        errors.append(float(psnr((made - truth).square().mean())))
        still.append(float(psnr((reference[:, None] - truth).square().mean())))
        shown += [reference[0], *truth[0, ::8], reference[0], *made[0, ::8]]
    save_sheet(torch.stack(shown), run / "autoencoder-real.png", columns=8)
    return {
        "real_db": round(sum(errors) / len(errors), 3),
        "real_still_db": round(sum(still) / len(still), 3),
    }


def psnr(squared_error: Tensor) -> Tensor:
    """In dB, of pictures in [0, 1]."""
    return -10 * torch.log10(squared_error.clamp(min=1e-9))


def compare(clips: Clips, made: Tensor, truth: Tensor) -> dict[str, float]:
    """PSNR of the whole, mouth and eyes in dB; frame-to-frame error and change, of 255."""
    length = truth.shape[1]
    attributes = clips.attributes[:, None].expand(-1, length, -1).flatten(0, 1)
    mouth, eyes = region_masks(attributes, clips.controls.flatten(0, 1))
    squared = (made - truth).square().mean(2, keepdim=True).flatten(0, 1)

    def within(mask: Tensor) -> float:
        return float(psnr((squared * mask).sum() / mask.sum().clamp(min=1)))

    change = (truth.diff(dim=1)).abs().mean(2, keepdim=True)
    wrong = (made.diff(dim=1) - truth.diff(dim=1)).abs().mean(2, keepdim=True)
    inside = torch.unflatten(mouth, 0, truth.shape[:2])[:, 1:]
    area = inside.sum().clamp(min=1)
    return {
        "whole_db": float(psnr(squared.mean())),
        "mouth_db": within(mouth),
        "eyes_db": within(eyes),
        "mouth_change_error": float((wrong * inside).sum() / area * 255),
        "mouth_change": float((change * inside).sum() / area * 255),
    }


def save_autoencoder(network: Autoencoder, reader: MouthReader, run: Path) -> None:
    """In fp16, but for the latent's scale, which overflows it."""

    def halved(part: nn.Module) -> dict[str, Tensor]:
        return {
            key: value.half() if value.is_floating_point() and "mean_square" not in key else value
            for key, value in part.state_dict().items()
        }

    torch.save(halved(network.encoder), run / "encoder.pt")
    torch.save(halved(reader), run / "mouth_reader.pt")


def load_autoencoder(
    model: ModelConfig, checkpoint: Path, weights: Path, device: torch.device
) -> tuple[Autoencoder, MouthReader]:
    """checkpoint: what only training needs; weights: what is served."""
    network, reader = _autoencoder(model, device), MouthReader()
    network.encoder.load_state_dict(torch.load(checkpoint / "encoder.pt", map_location="cpu"))
    network.decoder.load_state_dict(load_file(weights / "decoder.safetensors"))
    reader.load_state_dict(torch.load(checkpoint / "mouth_reader.pt", map_location="cpu"))
    return network.eval().requires_grad_(False), reader.to(device).eval().requires_grad_(False)


def _drawn(batch: int, real: RealPictures | None) -> int:
    """How many of a batch's clips are rendered, before those that move real pictures."""
    return batch - (real.per_batch if real else 0)


def _autoencoder(model: ModelConfig, device: torch.device) -> Autoencoder:
    network = Autoencoder(model).to(device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _generator(source: ClipSource, seed: int) -> torch.Generator:
    return torch.Generator(device=source.device).manual_seed(seed)


def say(text: str) -> None:
    print(text, flush=True)
