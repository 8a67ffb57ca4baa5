"""In: a configuration, pictures and speech. Out: clips of the character, and how each scores.

Drawn as `characters render` draws. A clip is scored meanwhile, so that sessions of any length fit
into memory. Every run has idle motion and noise of its own: two runs of one configuration differ as
two sessions do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import av
import numpy as np
import soxr
import torch
from numpy.typing import NDArray
from torch import Tensor

from characters_serve.evaluation.lse import LipSync, lse, num_windows
from characters_serve.evaluation.speech import read_wav
from characters_serve.evaluation.syncnet import WINDOW, SyncNet
from characters_serve.gateway.images import load_reference
from characters_serve.render import OfflineRenderer

_EMBED_FRAMES: Final = 240
LOOK_EVERY_S: Final = 0.5
"""Between the pictures that are kept to compare runs by their pixels."""
_LOOK_FOR_S: Final = 30


@dataclass(frozen=True, slots=True)
class Clip:
    """One rendering. run: 0, and 1 and up for reruns of the same configuration."""

    configuration: str
    run: int
    number: int
    picture: Path
    speech: Path

    @property
    def name(self) -> str:
        return f"{self.configuration}-{self.run}-{self.number:03d}"

    @property
    def seed(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=4).digest(), "big")


@dataclass(frozen=True, slots=True)
class Score:
    """Of a whole clip, and of each of its windows in order."""

    whole: LipSync
    windows: list[LipSync]


def score_clip(
    renderer: OfflineRenderer, syncnet: SyncNet, clip: Clip, window_s: float
) -> tuple[Score, NDArray[np.uint8]]:
    """Also the brightness of pictures LOOK_EVERY_S apart in the first half minute, uint8 (n, H, W).
    Raises ValueError for clips that are too short to score."""
    model = renderer.model
    speech = read_wav(clip.speech)
    speech = speech[: len(speech) // model.audio_samples_per_chunk * model.audio_samples_per_chunk]
    num_frames = len(speech) * model.fps // model.audio.sample_rate
    seen = _Seen(syncnet, nearest_frames(num_frames, model.fps, syncnet.fps))
    looks: list[NDArray[np.uint8]] = []
    looked_at = range(0, _LOOK_FOR_S * model.fps, round(LOOK_EVERY_S * model.fps))
    shown = 0
    image_rgb = load_reference(clip.picture.read_bytes(), model.width, model.height)
    for frames, _ in renderer.render(image_rgb, speech, clip.seed):
        planes = [_planes(frame, model.height) for frame in frames]
        seen.add(torch.stack([_rgb(frame) for frame in planes]))
        looks += [
            frame[: model.height] for at, frame in enumerate(planes, shown) if at in looked_at
        ]
        shown += len(planes)
    video = seen.embeddings()
    heard = soxr.resample(speech, model.audio.sample_rate, syncnet.sample_rate, quality="HQ")
    voice = syncnet.embed_speech(torch.from_numpy(np.ascontiguousarray(heard)))
    samples_per_frame = syncnet.sample_rate // syncnet.fps
    rows = num_windows(seen.frames, len(heard), samples_per_frame)
    every = round(window_s * syncnet.fps)
    in_window = num_windows(every, every * samples_per_frame, samples_per_frame)
    windows = [
        lse(video[at : at + in_window], voice[at : at + in_window])
        for at in range(0, rows - in_window + 1, every)
    ]
    return Score(lse(video[:rows], voice[:rows]), windows), np.stack(looks)


def nearest_frames(count: int, fps: int, wanted_fps: int) -> NDArray[np.int64]:
    """Which of `count` frames is shown at each frame of another rate, as `ffmpeg -r` chooses: from
    24 to 25 one is shown twice in a second."""
    times = np.arange(count * wanted_fps // fps)
    nearest = (2 * times * fps + wanted_fps) // (2 * wanted_fps)
    return np.minimum(nearest, count - 1)


class _Seen:
    """Takes frames as they come and embeds them, holding few of them."""

    def __init__(self, syncnet: SyncNet, wanted: NDArray[np.int64]) -> None:
        self._syncnet, self._wanted = syncnet, wanted
        self.frames = len(wanted)
        self._taken = self._shown = 0
        self._crops: list[Tensor] = []
        self._rows: list[Tensor] = []

    def add(self, frames: Tensor) -> None:
        """uint8 RGB (n, 3, H, W), the next ones."""
        end = int(np.searchsorted(self._wanted, self._shown + len(frames)))
        which = torch.from_numpy(self._wanted[self._taken : end] - self._shown)
        self._crops += list(self._syncnet.crop(frames)[which])
        self._shown += len(frames)
        self._taken = end
        if len(self._crops) >= _EMBED_FRAMES:
            self._embed()

    def embeddings(self) -> Tensor:
        if len(self._crops) >= WINDOW:
            self._embed()
        if not self._rows:
            raise ValueError(f"a clip of {self.frames} frames is too short to score")
        return torch.cat(self._rows)

    def _embed(self) -> None:
        self._rows.append(self._syncnet.embed_video(torch.stack(self._crops)))
        self._crops = self._crops[1 - WINDOW :]


def _planes(frame: bytes, height: int) -> NDArray[np.uint8]:
    return np.frombuffer(frame, np.uint8).reshape(height * 3 // 2, -1)


def _rgb(planes: NDArray[np.uint8]) -> Tensor:
    picture = av.VideoFrame.from_ndarray(planes, format="yuv420p").to_ndarray(format="rgb24")
    return torch.from_numpy(picture).permute(2, 0, 1)
