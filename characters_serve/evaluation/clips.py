"""In: a configuration, pictures and speech. Out: clips of the character, and how each scores.

The session's own chunker, model and decoder, without a clock, as for `characters render`. A clip is
scored while it is drawn, so that sessions of any length fit into memory. Every run has idle motion
and noise of its own: two runs of one configuration differ as two sessions do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import av
import numpy as np
import soxr
import torch
from numpy.typing import NDArray
from torch import Tensor

from characters_serve.config import Config
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.device import choose_device
from characters_serve.engine.generator import load_family, load_prompt
from characters_serve.engine.reference_image import image_tensor
from characters_serve.engine.step_input import PackedStep
from characters_serve.evaluation.lse import LipSync, lse, num_windows
from characters_serve.evaluation.speech import Pcm, read_wav
from characters_serve.evaluation.syncnet import WINDOW, SyncNet
from characters_serve.gateway.images import load_reference
from characters_serve.messages import AgentAudio
from characters_serve.session.chunker import Chunker

_SESSION: Final = "eval"
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


class ClipRenderer:
    """One configuration's model and decoder, loaded once."""

    def __init__(self, config: Config) -> None:
        model = config.model
        self.model = model
        self._device, dtype = choose_device(config.engine)
        generator = load_family(model, device=self._device, dtype=dtype)
        prompt = load_prompt(model, self._device)
        self._denoiser = Denoiser(generator, model, config.optimizations, prompt=prompt)
        self._decoder = ChunkDecoder(model, self._device, dtype, config.optimizations)
        self._packed = PackedStep(model, self._device)

    def render(self, clip: Clip, speech: Pcm) -> Iterator[list[bytes]]:
        """The clip's frames, I420, chunk by chunk, for as long as the speech lasts."""
        model = self.model
        image_rgb = load_reference(clip.picture.read_bytes(), model.width, model.height)
        self._denoiser.start(image_tensor(image_rgb, model, self._device), clip.seed)
        self._decoder.start(image_rgb)
        chunker = Chunker(model, _SESSION, clip.seed)
        rate = model.audio.sample_rate
        chunker.add(AgentAudio(_SESSION, 1, rate, speech.tobytes(), "", last=True))
        for _ in range(len(speech) // model.audio_samples_per_chunk):
            step = chunker.next(passes=len(model.noise_levels), listening_energy=0.0)
            self._packed.fill(step)
            latent = self._denoiser.step(
                self._packed.audio_window, self._packed.controls, self._packed.passes
            )
            yield self._decoder.decode(latent)


def score_clip(
    renderer: ClipRenderer, syncnet: SyncNet, clip: Clip, window_s: float
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
    for chunk in renderer.render(clip, speech):
        planes = [_planes(frame, model.height) for frame in chunk]
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
