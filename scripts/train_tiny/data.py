"""Training clips on the device: a character, its idle motion, speech, and frames on demand.

In: speech.npz and idle.npz. Out: batches of clips; every clip is a character never seen before.

Letters: N clips, T video frames of a clip, K chunks of a clip (T / 4), A attributes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from characters_serve.config import ModelConfig
from characters_serve.model.audio import LOG_FLOOR, LOG_MEL_MEAN, LOG_MEL_STD, LogMel
from characters_serve.model.idle_controls import CONTROL_NAMES, NUM_CONTROLS
from scripts.train_tiny.renderer import Renderer, sample_characters
from scripts.train_tiny.visemes import MEL_HIGH, MEL_LOW

LOWEST = (math.log(LOG_FLOOR) - LOG_MEL_MEAN) / LOG_MEL_STD
"""Digital silence."""
BLINK_SHARE = 0.35
"""Of the training clips: these are placed around a blink."""


class Clips(NamedTuple):
    """attributes (N, A); controls (N, T, 12) idle then mouth; mel (N, K, mel frames, mels)
    normalised; reference_controls (N, 12): how the character sits in its reference image."""

    attributes: Tensor
    controls: Tensor
    mel: Tensor
    reference_controls: Tensor

    def idle_by_chunk(self, frames: int) -> Tensor:
        """(N, K, frames, 7): what the model is told of the idle motion."""
        return torch.unflatten(self.controls[..., :NUM_CONTROLS], 1, (-1, frames))

    def change(self) -> Tensor:
        """(N, T, 12): how the controls differ from the reference's, which is what pictures show."""
        return self.controls - self.reference_controls[:, None]


class ClipSource:
    def __init__(self, folder: Path, model: ModelConfig, device: torch.device) -> None:
        speech, idle = np.load(folder / "speech.npz"), np.load(folder / "idle.npz")
        self._mel = torch.from_numpy(speech["mel"]).to(device)
        self._viseme = torch.from_numpy(speech["viseme"]).to(device)
        self._idle = torch.from_numpy(idle["controls"]).to(device)
        self._blinks = (self._idle[..., CONTROL_NAMES.index("blink")] > 0.5).nonzero()
        self._held_out = int(speech["held_out"])
        self._model, self.device = model, device
        self._window = torch.arange(
            -model.audio.past_frames,
            model.frames_per_chunk * model.mels_per_frame + model.audio.future_frames,
            device=device,
        )

    def sample(
        self, count: int, frames: int, generator: torch.Generator, *, held_out: bool = False
    ) -> Clips:
        model, device = self._model, self.device

        def integers(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (count,), generator=generator, device=device)

        margin = 16
        first, last = (self._held_out, len(self._viseme)) if held_out else (0, self._held_out)
        first, last = first + margin, last - margin
        # The held-out speech is ten minutes; whoever talks for longer goes round it.
        start = integers(first, last if held_out else last - frames)
        idle_start = integers(0, self._idle.shape[1])
        steps = torch.arange(frames, device=device)
        said = first + (start[:, None] - first + steps) % (last - first)
        viseme = self._viseme[said].float() / 255
        track = integers(0, len(self._idle))
        if not held_out:  # eyes are closed in few frames, and were the last to be learned
            row = torch.randint(0, len(self._blinks), (count,), generator=generator, device=device)
            blink_track, blink_at = self._blinks[row].unbind(1)
            chosen = torch.rand(count, generator=generator, device=device) < BLINK_SHARE
            track = torch.where(chosen, blink_track, track)
            idle_start = torch.where(chosen, blink_at - integers(0, frames), idle_start)
        # A clip longer than a track goes round it; the seam is one jump in minutes.
        idle_at = (idle_start[:, None] + steps) % self._idle.shape[1]
        idle = self._idle[track[:, None], idle_at].float()

        first_mel = said[:, :: model.frames_per_chunk] * model.mels_per_frame
        quantised = self._mel[first_mel[..., None] + self._window]
        mel = LogMel.normalise(MEL_LOW + quantised.float() * ((MEL_HIGH - MEL_LOW) / 255))

        attributes = sample_characters(count, generator, device)
        reference = self._reference_controls(count, generator)
        return Clips(attributes, torch.cat([idle, viseme], dim=-1), mel, reference)

    def frames_heard(self, frames: int) -> Tensor:
        """(K, mel frames): the clip's frame that each of a chunk's mel frames belongs to; of a
        clip's ends, also frames before and after it."""
        starts = torch.arange(0, frames, self._model.frames_per_chunk, device=self.device)
        ahead = torch.div(self._window, self._model.mels_per_frame, rounding_mode="floor")
        return starts[:, None] + ahead

    def _reference_controls(self, count: int, generator: torch.Generator) -> Tensor:
        """References are at rest, but for where some look and for mouths that some have open.

        Whoever sees a picture cannot tell a head that is held at a tilt from one that is built so;
        so what a picture shows is where its controls are zero, as it is for a picture that a user
        picks. Gaze and open lips show where their zero is.
        """
        device = self.device
        rows = torch.randint(0, len(self._idle), (count,), generator=generator, device=device)
        times = torch.randint(0, self._idle.shape[1], (count,), generator=generator, device=device)
        weights = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.3, 0.0], device=device)
        idle = self._idle[rows, times].float() * weights
        where = torch.randint(16, self._held_out - 16, (count,), generator=generator, device=device)
        open_mouth = torch.rand(count, 1, generator=generator, device=device) < 0.12
        mouth = torch.where(open_mouth, self._viseme[where].float() / 255, 0.0)
        return torch.cat([idle, mouth], dim=-1)


def augment_mel(mel: Tensor, generator: torch.Generator) -> Tensor:
    """Other microphones, rooms and levels: a gain, a slope, bumps and ends of the band, noise.

    mel: (N, K, frames, mels), normalised.
    """
    count, bands = mel.shape[0], mel.shape[-1]
    device = mel.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    place = torch.linspace(-1, 1, bands, device=device)
    slope = normal(count, 1) * 0.15 * place
    bumps = sum(
        normal(count, 1) * 0.08 * torch.cos((n * place + normal(count, 1)) * 3.1416)
        for n in (1, 2, 3)
    )
    # Telephones and muffled microphones: little above a band, or below one.
    ends = torch.rand(count, 2, 1, generator=generator, device=device)
    above = torch.sigmoid((place - (0.2 + 1.2 * ends[:, 0])) * 12)
    below = torch.sigmoid(((-1.3 + 0.8 * ends[:, 1]) - place) * 12)
    limited = torch.rand(count, 1, generator=generator, device=device) < 0.3
    cut = torch.where(limited, -2.5 * (above + below), 0.0)
    change = (slope + bumps + cut + normal(count, 1) * 0.2)[:, None, None]
    floor = -1.7 + 0.4 * normal(count, 1, 1, 1)
    quiet = torch.rand(count, 1, 1, 1, generator=generator, device=device) < 0.4
    floor = torch.where(quiet, torch.full_like(floor, LOWEST), floor)
    changed = (mel + change).clamp(min=LOWEST) * LOG_MEL_STD
    return torch.logaddexp(changed, floor * LOG_MEL_STD) / LOG_MEL_STD


def render_clips(renderer: Renderer, clips: Clips) -> Tensor:
    """(N, T, 3, H, W) in [0, 1]."""
    count, length = clips.controls.shape[:2]
    attributes = clips.attributes[:, None].expand(-1, length, -1)
    rendered: Tensor = renderer(attributes.flatten(0, 1), clips.controls.flatten(0, 1))
    return torch.unflatten(rendered, 0, (count, length)).float()


def render_references(renderer: Renderer, clips: Clips) -> Tensor:
    """(N, 3, H, W)."""
    rendered: Tensor = renderer(clips.attributes, clips.reference_controls)
    return rendered.float()


def render_with_references(renderer: Renderer, clips: Clips) -> tuple[Tensor, Tensor]:
    """Both at once, since the renderer pads every call to whole batches."""
    controls = torch.cat([clips.controls, clips.reference_controls[:, None]], dim=1)
    rendered = render_clips(renderer, clips._replace(controls=controls))
    return rendered[:, :-1], rendered[:, -1]
