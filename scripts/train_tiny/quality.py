"""The character's acceptance: long talks of characters and voices never trained on, against truth.

    python -m scripts.train_tiny.quality --out scripts/measurements/quality_tiny.json

In: the weights as served, the renderer and held-out speech. Out: each figure with its goal, and a
contact sheet beside it. Talks take turns of speech and silence, with the motion that the server
would draw; all roll in step through the server's Denoiser, and the last seconds of each minute are
decoded. `talk` is 64 characters for ten minutes, `hour` the presets for sixty; `--parts` runs one
and keeps the other's figures in the file. On a CPU ask for little:

    python -m scripts.train_tiny.quality --device cpu --parts talk --characters 2 --minutes 0.5 \\
        --windows 2 --window-seconds 2 --out quality.json

Letters: N characters, T frames of a window, K chunks.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from characters_serve.config import ModelConfig
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.idle_controls import NUM_CONTROLS
from characters_serve.model.weights import BUILTIN, load_generator
from scripts.train_tiny.data import LOWEST, Clips, ClipSource, render_clips, render_references
from scripts.train_tiny.fused_renderer import FusedRenderer
from scripts.train_tiny.host_renderer import HostRenderer
from scripts.train_tiny.idle_tracks import idle_track
from scripts.train_tiny.make_presets import PRESETS, preset_attributes
from scripts.train_tiny.networks import MouthReader, correlation
from scripts.train_tiny.pictures import save_sheet
from scripts.train_tiny.renderer import Renderer, region_masks, sample_characters
from scripts.train_tiny.train_autoencoder import (
    Autoencoder,
    load_autoencoder,
    mouth_crops,
    psnr,
    say,
)
from scripts.train_tiny.train_dit import roll_out

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"
PARTS: Final = ("talk", "hour")
LAGS: Final = range(-3, 4)
_OPEN: Final = NUM_CONTROLS
"""Column of the mouth's opening among the controls."""
_CLOSED_TRUTH, _CLOSED_READ = 0.03, 0.15
_SETTLED_FRAMES: Final = 12
"""After speech the mouth may take so long to close."""
_TRACK_SEED: Final = 900_000
"""Idle motion of training is drawn from other seeds."""
_AT_ONCE: Final = {"cuda": 8, "cpu": 1}
"""Characters that are rendered and decoded together."""
_SHOWN: Final = 4
"""Characters on a row of the sheet."""


class Talk(NamedTuple):
    clips: Clips
    speaks: Tensor
    """(N, T): whether the character's turn it is; elsewhere it hears digital silence."""
    references: Tensor
    """uint8 (N, 3, H, W)."""


@dataclass(frozen=True)
class Judges:
    """What turns latents into figures: the served decoder, and what training measures with."""

    painter: Autoencoder
    reader: MouthReader
    renderer: Renderer


class Seen(NamedTuple):
    """One window of a talk, (N, ...) on the host. Drifts are (N, 3), the mean of made - truth."""

    first_frame: int
    squared: dict[str, Tensor]
    """Mean squared error (N,) of the whole, the mouth's and the eyes' boxes."""
    background: Tensor
    skin: Tensor
    sharpness: Tensor
    """(N,): mean gradient over the truth's."""
    read: Tensor
    opening: Tensor
    """(N, T): the mouth's opening as read from the pictures, and as it should be."""
    speaks: Tensor
    change: Tensor
    true_change: Tensor
    """(N, T - 1): mean absolute change from frame to frame."""


def converse(
    source: ClipSource,
    renderer: Renderer,
    model: ModelConfig,
    attributes: Tensor,
    frames: int,
    generator: torch.Generator,
) -> Talk:
    """A talk of each character: turns of speech, of listening and of quiet."""
    count, device = len(attributes), attributes.device
    tracks = [idle_track(_TRACK_SEED + i, frames) for i in range(count)]
    idle = torch.from_numpy(np.stack([controls for controls, _ in tracks])).to(device)
    speaks = torch.from_numpy(np.stack([flags for _, flags in tracks])).bool().to(device)
    clips = source.sample(count, frames, generator, held_out=True)
    mouth = clips.controls[..., NUM_CONTROLS:] * speaks[..., None]
    heard_in = source.frames_heard(frames).clamp(0, frames - 1)
    mel = torch.where(speaks[:, heard_in][..., None], clips.mel, LOWEST)
    clips = Clips(attributes, torch.cat([idle, mouth], dim=-1), mel, clips.reference_controls)
    drawn = torch.cat([render_references(renderer, part) for part in _split(clips, 64)])
    return Talk(clips, speaks, (drawn * 255).round().byte())


@torch.no_grad()
def watch(
    dit: CharacterDiT, judges: Judges, talk: Talk, starts: list[int], length: int
) -> Iterator[tuple[Seen, list[Tensor]]]:
    """Rolls the talk and looks at windows of it, each beginning at one of the chunks `starts`.

    Also yields a row of pictures for the sheet: truth beside what was made, mouths at their widest.
    """
    kept: list[Tensor] = []
    chunks = talk.speaks.shape[1] // dit.config.frames_per_chunk
    device = talk.references.device.type
    rolled = roll_out(dit, talk.clips, talk.references, seed=7)
    for chunk, latent in enumerate(tqdm(rolled, total=chunks, unit="chunk", desc="rolled")):
        kept = [*kept[-length:], latent]
        start = chunk + 1 - length
        if start in starts:
            before = kept[0] if len(kept) > length else torch.zeros_like(latent)
            latents = torch.stack([before, *kept[-length:]], dim=1).float()
            with torch.autocast(device, enabled=False):  # the rollout's own is still on
                yield _look(judges, talk, latents, start)


def _look(judges: Judges, talk: Talk, latents: Tensor, start: int) -> tuple[Seen, list[Tensor]]:
    """latents: (N, 1 + K, tokens, C), the first that of the chunk before the window."""
    per_chunk = judges.painter.model.frames_per_chunk
    frames = slice(start * per_chunk, (start + latents.shape[1] - 1) * per_chunk)
    clips = talk.clips._replace(controls=talk.clips.controls[:, frames])
    at_once = _AT_ONCE[latents.device.type]
    parts: list[tuple[Tensor, ...]] = []
    shown: list[Tensor] = []
    for part, images, z in zip(
        _split(clips, at_once),
        torch.split(talk.references, at_once),
        torch.split(latents, at_once),
        strict=True,
    ):
        reference = images.float() / 255
        truth = render_clips(judges.renderer, part)
        made = judges.painter.decode(z[:, 1:], reference, z[:, 0]).clamp(0, 1)
        parts.append(_compare(judges.reader, part, made, truth))
        if len(shown) < 2 * _SHOWN:
            at = part.controls[0, :, _OPEN].argmax()
            shown += [truth[0, at].cpu(), made[0, at].cpu()]
    joined = [torch.cat(field).cpu() for field in zip(*parts, strict=True)]
    whole, mouth, eyes, background, skin, sharpness, read, change, true_change = joined
    seen = Seen(
        first_frame=frames.start,
        squared={"whole": whole, "mouth": mouth, "eyes": eyes},
        background=background,
        skin=skin,
        sharpness=sharpness,
        read=read,
        opening=clips.controls[..., _OPEN].cpu(),
        speaks=talk.speaks[:, frames].cpu(),
        change=change,
        true_change=true_change,
    )
    return seen, shown


def _compare(reader: MouthReader, clips: Clips, made: Tensor, truth: Tensor) -> tuple[Tensor, ...]:
    """(N, T, 3, H, W) twice -> the fields of Seen that pictures tell, in its order."""
    shape = truth.shape[:2]
    attributes = clips.attributes[:, None].expand(-1, shape[1], -1).flatten(0, 1)
    boxes = region_masks(attributes, clips.controls.flatten(0, 1))
    mouth, eyes = (torch.unflatten(box, 0, shape) for box in boxes)
    wrong = made - truth
    squared = wrong.square().mean(2, keepdim=True)

    def inside(values: Tensor, box: Tensor) -> Tensor:
        return (values * box).sum((1, 3, 4)) / box.sum((1, 3, 4)).clamp(min=1)

    return (
        squared.mean((1, 2, 3, 4)),
        inside(squared, mouth)[:, 0],
        inside(squared, eyes)[:, 0],
        wrong[..., :60, :40].mean((1, 3, 4)),
        inside(wrong, (mouth + eyes).clamp(max=1)),
        made.diff(dim=-1).abs().mean((1, 2, 3, 4)) / truth.diff(dim=-1).abs().mean((1, 2, 3, 4)),
        torch.unflatten(reader(mouth_crops(clips, made))[:, 0], 0, shape),
        made.diff(dim=1).abs().mean((2, 3, 4)),
        truth.diff(dim=1).abs().mean((2, 3, 4)),
    )


# ------------------------------------------------------------ from windows to figures


def decibels(squared: Tensor) -> float:
    """Mean PSNR over characters."""
    return round(float(psnr(squared).mean()), 3)


def figures(windows: list[Seen], model: ModelConfig) -> dict[str, Any]:
    """All of a talk's figures; a goal that the issue of quality sets stands beside its figure."""
    minutes = [seen.first_frame / model.fps / 60 for seen in windows]
    result: dict[str, Any] = {"window_minutes": [round(minute, 2) for minute in minutes]}
    for region in windows[0].squared:
        values = [decibels(seen.squared[region]) for seen in windows]
        result[f"{region}_db"] = values
        if len(values) > 2:
            # The first window shows the way from the reference to the first pose.
            slope = np.polyfit(minutes[1:], values[1:], 1)[0]
            result[f"{region}_db_per_minute"] = round(float(slope), 4)
    result["sharpness"] = [round(float(seen.sharpness.mean()), 3) for seen in windows]
    fall = result["whole_db"][-1] - result["whole_db"][min(1, len(windows) - 1)]
    result["whole_db_from_second_to_last"] = goal(fall, ">=", -0.5)
    for region in ("background", "skin"):
        moved = getattr(windows[-1], region) - getattr(windows[0], region)
        worst = moved.abs().amax(1) * 255
        result[f"{region}_drift_mean"] = round(float(worst.mean()), 3)
        result[f"{region}_drift_worst"] = goal(float(worst.max()), "<=", 2.0)
    return result | lips(windows) | jumps(windows, model)


def lips(windows: list[Seen]) -> dict[str, Any]:
    """How the mouth follows the voice, and whether it is closed where there is none."""
    edge = max(LAGS)
    read = torch.stack([seen.read for seen in windows], dim=1)  # (N, windows, T)
    true = torch.stack([seen.opening for seen in windows], dim=1)
    speaks = torch.stack([seen.speaks for seen in windows], dim=1)
    inner = slice(edge, -edge)
    turn = speaks[..., inner]
    lags = {
        lag: round(
            correlation(
                read[..., edge + lag : read.shape[-1] - edge + lag][turn], true[..., inner][turn]
            ),
            3,
        )
        for lag in LAGS
    }
    best_lag = max(LAGS, key=lags.__getitem__)
    each = [
        correlation(r[s], t[s])
        for r, t, s in zip(read, true, speaks, strict=True)
        if s.any() and t[s].std() > 0.01  # undefined for who is silent all the while
    ]
    silent = ~_within(speaks, _SETTLED_FRAMES)
    pause = speaks & ~_within(true > _CLOSED_TRUTH, edge)
    result: dict[str, Any] = {
        "mouth_correlation_by_lag": lags,
        "mouth_correlation": goal(lags[0], ">=", 0.92),
        "mouth_best_lag_frames": goal(abs(best_lag), "<=", 1),
    }
    if each:
        result["mouth_correlation_mean"] = round(sum(each) / len(each), 3)
        result["mouth_correlation_worst"] = round(min(each), 3)
    for name, where in (("silence", silent), ("pauses", pause)):
        if where.any():
            closed = float((read[where] < _CLOSED_READ).float().mean())
            result[f"closed_in_{name}"] = goal(closed, ">=", 0.98)
            result[f"opening_in_{name}"] = round(float(read[where].mean()), 4)
    return result


def _within(flags: Tensor, frames: int) -> Tensor:
    """Where a flag is set at most so many frames away, (..., T)."""
    near = torch.nn.functional.max_pool1d(
        flags.flatten(0, -2)[:, None].float(), 2 * frames + 1, 1, frames
    )
    return near[:, 0].bool().view(flags.shape)


def jumps(windows: list[Seen], model: ModelConfig) -> dict[str, Any]:
    """The change between frames at chunk borders, at position resets and where turns change, over
    the change elsewhere: medians, and 95th percentiles, which an occasional cut would raise."""
    per_chunk = model.frames_per_chunk
    first_reset = model.window_chunks + model.position_reset_steps - 1
    kinds: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for seen in windows:
        frame = seen.first_frame + 1 + torch.arange(seen.change.shape[1])
        chunk = frame // per_chunk
        border = frame % per_chunk == 0
        reset = border & (chunk >= first_reset)
        reset &= (chunk - first_reset) % model.position_reset_steps == 0
        turned = seen.speaks.diff(dim=1)
        for kind, where in {
            "chunk_border": (border & ~reset) & ~turned,
            "position_reset": reset & ~turned,
            "turn": turned,
            "elsewhere": ~border & ~turned,
        }.items():
            chosen = where.expand_as(seen.change)
            kinds.setdefault(kind, []).append((seen.change[chosen], seen.true_change[chosen]))
    levels = torch.tensor([0.5, 0.95])
    spread = {}
    for kind, pairs in kinds.items():
        made, true = (torch.cat(values) for values in zip(*pairs, strict=True))
        if len(made):
            spread[kind] = torch.stack([made.quantile(levels), true.quantile(levels)])
    usual = spread.pop("elsewhere")
    result: dict[str, Any] = {}
    for kind, values in spread.items():
        (median, rare), (true_median, true_rare) = (values / usual).tolist()
        # Pictures of the truth change more where speech begins, too.
        result[f"jump_at_{kind}"] = goal(median, "<=", round(1.3 * max(1.0, true_median), 3))
        result[f"rare_jump_at_{kind}"] = goal(rare, "<=", round(1.3 * max(1.0, true_rare), 3))
    return result


def goal(value: float, sign: str, limit: float) -> dict[str, Any]:
    met = value >= limit if sign == ">=" else value <= limit
    return {"value": round(value, 4), "goal": f"{sign} {limit:g}", "met": met}


# ------------------------------------------------------------ the command


def judge(
    dit: CharacterDiT,
    judges: Judges,
    talk: Talk,
    *,
    windows: int,
    window_seconds: float,
    sheet: Path,
) -> dict[str, Any]:
    """Figures of `windows` pieces of the talk that end after equal parts of it."""
    model = dit.config
    count, frames = talk.speaks.shape
    chunks = frames // model.frames_per_chunk
    length = round(window_seconds * model.fps / model.frames_per_chunk)
    starts = [chunks * (i + 1) // windows - length for i in range(windows)]
    if starts[0] < 0:
        raise ValueError(f"{windows} windows of {window_seconds:g} s do not fit into the talk")
    seen, rows = zip(*watch(dit, judges, talk, starts, length), strict=True)
    # An hour's sheet need not show every minute.
    shown = rows[:: -(-windows // 10)]
    save_sheet(torch.stack([picture for row in shown for picture in row]), sheet, len(rows[0]))
    size = {"characters": count, "minutes": round(frames / model.fps / 60, 2)}
    size["passes"] = len(model.noise_levels)
    return size | {"window_seconds": window_seconds} | figures(list(seen), model)


def _split(clips: Clips, size: int) -> Iterator[Clips]:
    yield from (Clips(*parts) for parts in zip(*(torch.split(f, size) for f in clips), strict=True))


def make_renderer(device: torch.device, data: Path) -> Renderer:
    return (
        FusedRenderer(device, data / "renderer.cubin") if device.type == "cuda" else HostRenderer()
    )


def about(device: torch.device, weights: Path, command: str) -> dict[str, str]:
    digest = hashlib.sha256()
    for name in ("dit", "decoder"):
        digest.update((weights / f"{name}.safetensors").read_bytes())
    cuda = device.type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        "weights_sha256": digest.hexdigest()[:16],
        "command": command,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("scripts/train_tiny/data"))
    parser.add_argument("--weights", type=Path, default=BUILTIN)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--characters", type=int, default=64, help="of the talk")
    parser.add_argument("--minutes", type=float, default=10, help="of the talk")
    parser.add_argument("--windows", type=int, default=10, help="of the talk")
    parser.add_argument("--hour-minutes", type=int, default=60, help="of the presets' hour")
    parser.add_argument("--window-seconds", type=float, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)  # on a busy machine two wait for each other
    device = torch.device(options.device)
    model = ModelConfig(weights=str(options.weights))
    source = ClipSource(options.data, model, device)
    renderer = make_renderer(device, options.data)
    painter, reader = load_autoencoder(model, options.checkpoint, options.weights, device)
    dit = load_generator(model, device=device, dtype=torch.float32)
    command = shlex.join(["python", "-m", "scripts.train_tiny.quality", *sys.argv[1:]])
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    document = {part: kept[part] for part in PARTS if part in kept}
    for part in options.parts:
        generator = torch.Generator(device=device).manual_seed(4321)
        if part == "talk":
            attributes = sample_characters(options.characters, generator, device)
            minutes, windows = options.minutes, options.windows
        else:
            attributes = torch.cat([preset_attributes(preset) for preset in PRESETS]).to(device)
            minutes = windows = options.hour_minutes
        frames = round(minutes * 60 * model.fps)
        talk = converse(source, renderer, model, attributes, frames, generator)
        found = judge(
            dit,
            Judges(painter, reader, renderer),
            talk,
            windows=windows,
            window_seconds=options.window_seconds,
            sheet=options.out.with_name(f"{options.out.stem}_{part}.png"),
        )
        document[part] = about(device, options.weights, command) | found
        options.out.write_text(json.dumps(document, indent=1) + "\n")
        say(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
