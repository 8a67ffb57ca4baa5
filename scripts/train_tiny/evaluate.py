"""Scores a trained character on held-out characters and voices, against the renderer's truth.

Rolls the server's Denoiser for minutes and decodes windows of it: lip correlation by lag, closed
mouth in silence, PSNR and colour drift early and late, change at position resets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from characters_serve.model.dit import CharacterDiT
from scripts.train_tiny.data import Clips, ClipSource, render_clips, render_references
from scripts.train_tiny.networks import MouthReader, correlation
from scripts.train_tiny.pictures import save_sheet
from scripts.train_tiny.renderer import Renderer
from scripts.train_tiny.train_autoencoder import Autoencoder, compare, mouth_crops
from scripts.train_tiny.train_dit import roll_out

LAGS = range(-3, 4)
_OPEN = 7
"""Column of the mouth's opening among the controls."""


@torch.no_grad()
def evaluate(
    dit: CharacterDiT,
    painter: Autoencoder,
    reader: MouthReader,
    source: ClipSource,
    renderer: Renderer,
    run: Path,
    *,
    characters: int,
    seconds: int,
    passes: int,
    window_seconds: int = 10,
) -> dict[str, Any]:
    model = dit.config
    per_chunk = model.frames_per_chunk
    generator = torch.Generator(device=source.device).manual_seed(4321)
    chunks = seconds * model.fps // per_chunk
    clips = source.sample(characters, chunks * per_chunk, generator, held_out=True)
    references = torch.cat(
        [
            (render_references(renderer, Clips(*(f[i : i + 64] for f in clips))) * 255)
            .round()
            .byte()
            for i in range(0, characters, 64)
        ]
    )
    latents = torch.stack(list(roll_out(dit, clips, references, passes, seed=7)), dim=1)
    window = window_seconds * model.fps // per_chunk
    middle = (chunks - window) // 2
    starts = {"first": 0, "middle": middle, "last": chunks - window}
    result: dict[str, Any] = {"characters": characters, "seconds": seconds, "passes": passes}
    sheet: list[Tensor] = []
    for part, start in starts.items():
        score, shown = _score_window(
            painter, reader, renderer, clips, references, latents, start, window
        )
        result[part] = score
        sheet += shown
    change = latents.diff(dim=1).square().mean((0, 2, 3))
    resets = torch.zeros(chunks - 1, dtype=torch.bool, device=change.device)
    # The first reset is at step window_chunks + 42, counted from one.
    first_reset = model.window_chunks + model.position_reset_steps - 2
    resets[first_reset :: model.position_reset_steps] = True
    if resets.any():
        result["change_at_resets"] = round(float(change[resets].mean() / change[~resets].mean()), 3)
    save_sheet(torch.stack(sheet), run / f"rollout-{passes}.png", columns=9)
    return result


def _score_window(
    painter: Autoencoder,
    reader: MouthReader,
    renderer: Renderer,
    clips: Clips,
    references: Tensor,
    latents: Tensor,
    start: int,
    length: int,
) -> tuple[dict[str, Any], list[Tensor]]:
    per_chunk = painter.model.frames_per_chunk
    frames = slice(start * per_chunk, (start + length) * per_chunk)
    totals: dict[str, list[float]] = {}
    reads, truths, per_character, shown = [], [], [], []
    for i in range(len(references)):
        one = Clips(*(field[i : i + 1] for field in clips))
        one = one._replace(controls=one.controls[:, frames])
        truth = render_clips(renderer, one)
        reference = references[i : i + 1].float() / 255
        before = latents[i : i + 1, start - 1] if start else None
        made = torch.cat(
            [
                painter.decode(
                    latents[i : i + 1, at : at + 1],
                    reference,
                    latents[i : i + 1, at - 1] if at else before,
                )
                for at in range(start, start + length)
            ],
            dim=1,
        ).clamp(0, 1)
        for key, value in compare(one, made, truth).items():
            totals.setdefault(key, []).append(value)
        corner = made[..., :60, :40].mean((2, 3, 4)) - truth[..., :60, :40].mean((2, 3, 4))
        totals.setdefault("background_drift", []).append(float(corner.abs().mean() * 255))
        colour = made.mean((3, 4)) - truth.mean((3, 4))
        totals.setdefault("colour_drift", []).append(float(colour.abs().mean() * 255))
        reads.append(reader(mouth_crops(one, made))[:, 0])
        truths.append(one.controls[0, :, _OPEN])
        if truths[-1].std() > 0.01:  # undefined for who is silent all the while
            per_character.append(correlation(reads[-1], truths[-1]))
        if i < 5:
            moving = truths[-1][: len(truths[-1]) - 8].unfold(0, 8, 1).std(1)
            at = int(moving.argmax())
            shown += [reference[0], *truth[0, at : at + 8]]
            shown += [reference[0], *made[0, at : at + 8]]
    read, truth_open = torch.stack(reads), torch.stack(truths)
    lags = {
        lag: round(
            correlation(read[:, 3 + lag : read.shape[1] - 3 + lag], truth_open[:, 3:-3]),
            3,
        )
        for lag in LAGS
    }
    still = (torch.nn.functional.max_pool1d(truth_open[:, None], 7, 1, 3) < 0.03)[:, 0]
    score: dict[str, Any] = {k: round(sum(v) / len(v), 3) for k, v in totals.items()}
    score["mouth_correlation_by_lag"] = lags
    if per_character:
        score["mouth_correlation_mean"] = round(sum(per_character) / len(per_character), 3)
        score["mouth_correlation_worst"] = round(min(per_character), 3)
    if still.any():
        score["closed_in_silence"] = round(float((read[still] < 0.15).float().mean()), 4)
        score["opening_in_silence"] = round(float(read[still].mean()), 4)
    return score, shown
