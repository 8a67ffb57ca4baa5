"""Trains the small SyncNet that judges the embedded character, and validates it on held-out clips.

    python -m scripts.train_tiny.train_syncnet --run scripts/train_tiny/runs/syncnet --seconds 90

Out: RUN/syncnet.safetensors, for characters_serve/assets/, and RUN/syncnet.json with the curve and
the scores of held-out characters and voices. It takes the seconds it is given on one H200-class
GPU; on a CPU it only proves that the code runs. Nothing of the character's own output is trained
on, and the held-out clips are looked at once, at the end.

Letters: B clips, T frames, N windows of five frames, D dims.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig
from characters_serve.evaluation.lse import LipSync, lse
from characters_serve.evaluation.syncnet import OwnSyncNet
from characters_serve.model.weights import save_network
from scripts.train_tiny.attributes import centred
from scripts.train_tiny.data import Clips, ClipSource, augment_mel, render_clips
from scripts.train_tiny.fused_renderer import FusedRenderer
from scripts.train_tiny.networks import AveragedWeights, mixed_precision
from scripts.train_tiny.renderer import Renderer

TOGETHER = 4
"""Clips whose windows are told apart from each other."""
VALIDATION_S = 25.0
"""Kept for the validation and the export, out of the seconds given."""
SHIFTS = (-5, -2, -1, 1, 2, 5)
_OPEN = 7
"""Column of the mouth's opening among the controls."""


class ClipPool:
    """The last clips drawn: crops uint8 (P, T, 3, h, w), log-mel (P, T x 4, M)."""

    def __init__(self, source: ClipSource, renderer: Renderer, size: int, frames: int) -> None:
        self._source, self._renderer = source, renderer
        self._size, self._frames = size, frames
        self._crops = self._mel = torch.empty(0)
        self._drawn = 0

    def draw(self, count: int, generator: torch.Generator) -> None:
        clips = self._source.sample(count, self._frames, generator)
        crops, mel = picture_crops(self._renderer, clips), own_mel(clips)
        if not self._drawn:
            self._crops = crops.new_empty(self._size, *crops.shape[1:])
            self._mel = mel.new_empty(self._size, *mel.shape[1:])
        at = (self._drawn + torch.arange(count, device=crops.device)) % self._size
        self._crops[at], self._mel[at] = crops, mel
        self._drawn += count

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        there = min(self._drawn, self._size)
        rows = torch.randint(0, there, (count,), generator=generator, device=self._crops.device)
        return self._crops[rows], self._mel[rows]


@torch.no_grad()
def picture_crops(renderer: Renderer, clips: Clips) -> Tensor:
    """uint8 (B, T, 3, h, w), as the network will crop them: it looks for no face."""
    clips = clips._replace(attributes=centred(clips.attributes))
    crops = []
    for i in range(0, len(clips.attributes), 8):
        frames = render_clips(renderer, Clips(*(field[i : i + 8] for field in clips)))
        pixels = (frames.flatten(0, 1).clamp(0, 1) * 255).round().byte()
        crops.append(torch.unflatten(OwnSyncNet.crop(pixels), 0, frames.shape[:2]))
    return torch.cat(crops)


def own_mel(clips: Clips) -> Tensor:
    """(B, T x 4, M): the chunks' own frames, without their margins, one after the other."""
    model = ModelConfig()
    past, own = model.audio.past_frames, model.frames_per_chunk * model.mels_per_frame
    return clips.mel[:, :, past : past + own].flatten(1, 2)


def augment_pictures(crops: Tensor, generator: torch.Generator) -> Tensor:
    """Another framing, light and camera for each clip, softness and noise as generated pictures
    have: uint8 (B, T, 3, h, w) -> float in [0, 1]."""
    count, length = crops.shape[:2]
    device = crops.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device) * 2 - 1

    pictures = crops.float() / 255
    scale, turn = 1 + 0.12 * uniform(count), 0.08 * uniform(count)
    move = 0.1 * uniform(count, 2)
    rows = torch.stack(
        [
            torch.stack([scale * turn.cos(), -scale * turn.sin(), move[:, 0]], -1),
            torch.stack([scale * turn.sin(), scale * turn.cos(), move[:, 1]], -1),
        ],
        dim=1,
    )
    place = functional.affine_grid(rows, [count, 3, *crops.shape[-2:]], align_corners=False)
    place = place.repeat_interleave(length, dim=0)
    flat = functional.grid_sample(
        pictures.flatten(0, 1), place, padding_mode="border", align_corners=False
    )
    soft = functional.interpolate(
        functional.avg_pool2d(flat, 2), scale_factor=2.0, mode="bilinear", align_corners=False
    )
    share = uniform(count, 1, 1, 1, 1).clamp(min=0)
    pictures = torch.lerp(
        torch.unflatten(flat, 0, (count, length)), torch.unflatten(soft, 0, (count, length)), share
    )
    gain, bias = 1 + 0.2 * uniform(count, 1, 3, 1, 1), 0.1 * uniform(count, 1, 3, 1, 1)
    noise = torch.randn(pictures.shape, generator=generator, device=device)
    level = 0.03 * uniform(count, 1, 1, 1, 1).clamp(min=0)
    return (pictures * gain + bias + noise * level).clamp(0, 1)


def sync_loss(video_BND: Tensor, speech_BND: Tensor) -> Tensor:
    """N-way cross-entropy over -distance, both ways (as in Perfect Match, Chung et al. 2019): each
    window against the other times of its own clip and of a few others."""
    video = torch.unflatten(video_BND.float(), 0, (-1, TOGETHER)).flatten(1, 2)
    speech = torch.unflatten(speech_BND.float(), 0, (-1, TOGETHER)).flatten(1, 2)
    apart = -(video[:, :, None] - speech[:, None] + 1e-6).norm(dim=-1)
    groups, windows = apart.shape[:2]
    truth = torch.arange(windows, device=apart.device).expand(groups, -1)
    return (functional.cross_entropy(apart, truth) + functional.cross_entropy(apart.mT, truth)) / 2


def train(
    source: ClipSource, renderer: Renderer, options: argparse.Namespace, seconds: float
) -> tuple[OwnSyncNet, dict[str, Any]]:
    """Returns averaged weights, and the record of the run."""
    device = source.device
    cuda = device.type == "cuda"
    torch.manual_seed(options.seed)
    generator = torch.Generator(device=device).manual_seed(options.seed)
    network = OwnSyncNet().to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-4, fused=cuda)
    average = AveragedWeights(network)
    pool = ClipPool(source, renderer, options.pool, options.frames)
    started = time.monotonic()
    pool.draw(options.batch, generator)
    log: list[dict[str, float]] = []
    step = 0
    while (elapsed := time.monotonic() - started) < seconds and step != options.steps:
        pool.draw(options.fresh, generator)
        crops, mel = pool.sample(options.batch, generator)
        pictures = augment_pictures(crops, generator)
        heard = augment_mel(mel[:, None], generator)[:, 0]
        with mixed_precision(device):
            video, speech = network.video_windows(pictures), network.speech_windows(heard)
        loss = sync_loss(video, speech)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        fall = 0.5 + 0.5 * math.cos(math.pi * min(1.0, elapsed / seconds))
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 50) * max(0.02, fall)
        optimizer.step()
        average.update()
        step += 1
        if step % 50 == 0 or step in (1, 10):
            log.append({"step": step, "seconds": round(elapsed, 1), "loss": round(loss.item(), 4)})
            say(f"syncnet {step:5d} {elapsed:6.1f} s loss {loss.item():.4f}")
    average.copy_to(network)
    return network.eval().requires_grad_(False), {"steps": step, "log": log}


@torch.no_grad()
def validate(
    network: OwnSyncNet, source: ClipSource, renderer: Renderer, count: int, frames: int
) -> dict[str, Any]:
    """Scores of clips with speech in half of their frames or more: where nothing is said, no shift
    is the true one."""
    generator = torch.Generator(device=source.device).manual_seed(99)
    clips = source.sample(count, frames, generator, held_out=True)
    spoken = (clips.controls[:, :, _OPEN] > 0.05).float().mean(1) >= 0.5
    clips = Clips(*(field[spoken] for field in clips))
    kept = len(clips.attributes)
    if kept < 2:
        return {"clips": kept}
    mel = own_mel(clips)
    softened = torch.Generator(device=source.device).manual_seed(100)
    true: list[LipSync] = []
    shuffled: list[LipSync] = []
    soft: list[LipSync] = []
    moved: list[bool] = []
    speech = [network.speech_windows(mel[i : i + 1])[0].float().cpu() for i in range(kept)]
    for i in range(kept):
        crops = picture_crops(renderer, Clips(*(field[i : i + 1] for field in clips)))
        video = network.video_windows(crops.float() / 255)[0].float().cpu()
        true.append(lse(video, speech[i]))
        shuffled.append(lse(video, speech[(i + 1) % kept]))
        blurred = network.video_windows(augment_pictures(crops, softened))[0].float().cpu()
        soft.append(lse(blurred, speech[i]))
        moved += [lse(*_picture_late(video, speech[i], k)).offset == k for k in SHIFTS]
    return {
        "clips": kept,
        "seconds": frames / network.fps,
        "true": _summary(true),
        "speech_of_another_clip": _summary(shuffled),
        "augmented_pictures": _summary(soft),
        "better_than_speech_of_another_clip": _share(
            [a.distance < b.distance for a, b in zip(true, shuffled, strict=True)]
        ),
        "moved_by_frames": list(SHIFTS),
        "moved_and_found": _share(moved),
    }


def _picture_late(video: Tensor, speech: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Both, with the picture moved back by some frames, as far as both are there."""
    kept = len(video) - abs(frames)
    return video[max(0, -frames) :][:kept], speech[max(0, frames) :][:kept]


def _summary(scores: list[LipSync]) -> dict[str, float]:
    count = len(scores)
    return {
        "lse_d": round(sum(s.distance for s in scores) / count, 3),
        "lse_c": round(sum(s.confidence for s in scores) / count, 3),
        "found": _share([s.offset == 0 for s in scores]),
        "found_within_1": _share([abs(s.offset) <= 1 for s in scores]),
    }


def _share(outcomes: list[bool]) -> float:
    return round(sum(outcomes) / len(outcomes), 4)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("scripts/train_tiny/data"))
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90, help="for everything")
    parser.add_argument("--steps", type=int, default=-1, help="at most; -1: as time allows")
    parser.add_argument("--batch", type=int, default=96, help="clips a step")
    parser.add_argument("--fresh", type=int, default=24, help="clips drawn for each step")
    parser.add_argument("--pool", type=int, default=4096, help="clips kept to train on again")
    parser.add_argument("--frames", type=int, default=36, help="of a clip; whole chunks")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--validate-clips", type=int, default=256)
    parser.add_argument("--validate-frames", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.batch % TOGETHER:
        parser.error(f"--batch must be a multiple of {TOGETHER}")
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    if cuda:
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    options.run.mkdir(parents=True, exist_ok=True)
    source = ClipSource(options.data, ModelConfig(), device)
    renderer = FusedRenderer(device, options.data / "renderer.cubin") if cuda else Renderer(device)
    say(f"data after {time.monotonic() - started:.1f} s")
    left_s = options.seconds - VALIDATION_S - (time.monotonic() - started)
    network, record = train(source, renderer, options, left_s)
    save_network(network, options.run, "syncnet")
    record["seed"], record["seconds"] = options.seed, options.seconds
    record["held_out"] = validate(
        network, source, renderer, options.validate_clips, options.validate_frames
    )
    (options.run / "syncnet.json").write_text(json.dumps(record, indent=1) + "\n")
    say(json.dumps(record["held_out"], indent=1))
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
