"""In: pictures of a speaking face, and the speech. Out: one embedding of each for every frame.

Two networks of the kind of Chung and Zisserman, "Out of time" (2016): this project's own, small,
for its own drawn characters, and the published one, whose weights are the user's to bring. Both see
five frames of the picture and the 0.2 s of speech that belong to them. Knows nothing of scores.

Letters: T frames, N windows of five frames (T - 4), D dims of an embedding, M mel bands.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Final, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig
from characters_serve.evaluation.mfcc import mfcc
from characters_serve.model.audio import LogMel, log_mel_for
from characters_serve.model.weights import WeightsError

WINDOW: Final = 5
"""Frames of a window."""
STEPS_PER_FRAME: Final = 4
"""Rows of speech features for each frame, in both networks."""
OWN_WEIGHTS: Final = Path(__file__).parent.parent / "assets" / "syncnet.safetensors"
_BATCH: Final = 64


class SyncNet(Protocol):
    @property
    def fps(self) -> int: ...

    @property
    def sample_rate(self) -> int:
        """Of the speech; a whole number of samples for each frame."""

    def crop(self, frames: Tensor) -> Tensor:
        """uint8 RGB (T, 3, H, W) -> uint8 (T, 3, h, w), the part that the network looks at."""

    def embed_video(self, crops: Tensor) -> Tensor:
        """uint8 (T, 3, h, w) -> float32 (N, D)."""

    def embed_speech(self, pcm: Tensor) -> Tensor:
        """int16 (samples,) -> float32 (n, D): row i belongs to the window that begins at frame i.
        As many rows as the speech has whole windows."""


class OwnSyncNet(nn.Module):
    """Trained by scripts/train_tiny/train_syncnet.py. No face is searched for: it looks at where
    this project's pictures have the mouth, whatever the head does."""

    ROWS: Final = 64
    COLUMNS: Final = 96
    LEFT, TOP, RIGHT, BOTTOM = 0.25, 0.4375, 0.75, 0.9375
    """The part of the picture that is looked at."""

    def __init__(self, dims: int = 128) -> None:
        super().__init__()
        model = ModelConfig()
        self.fps, self.sample_rate = model.fps, model.audio.sample_rate
        self._log_mel: LogMel = log_mel_for(model)
        self.video = nn.Sequential(
            *_convolve(WINDOW * 3, 48, 5),
            *_convolve(48, 64, 3),
            *_convolve(64, 96, 3),
            *_convolve(96, 128, 3),
            nn.Flatten(),
            nn.Linear(128 * (self.ROWS // 16) * (self.COLUMNS // 16), dims),
        )
        self.speech = nn.Sequential(
            *_convolve_in_time(model.audio.num_mels, 96, stride=1),
            *_convolve_in_time(96, 128, stride=2),
            *_convolve_in_time(128, 160, stride=2),
            nn.Flatten(),
            nn.Linear(160 * WINDOW, 128),
            nn.ReLU(),
            nn.Linear(128, dims),
        )

    @classmethod
    def crop(cls, frames: Tensor) -> Tensor:
        height, width = frames.shape[-2:]
        top, bottom = round(cls.TOP * height), round(cls.BOTTOM * height)
        left, right = round(cls.LEFT * width), round(cls.RIGHT * width)
        part = frames[..., top:bottom, left:right].float()
        size = (cls.ROWS, cls.COLUMNS)
        return functional.interpolate(part, size, mode="area").round().byte()

    def video_windows(self, crops: Tensor) -> Tensor:
        """float (B, T, 3, 64, 96) in [0, 1] -> (B, N, D)."""
        windows = crops.unfold(1, WINDOW, 1).movedim(-1, 2)
        rows = self.video(windows.flatten(0, 1).flatten(1, 2) * 2 - 1)
        return torch.unflatten(rows, 0, windows.shape[:2])

    def speech_windows(self, mel: Tensor) -> Tensor:
        """Normalised log-mel (B, T x 4, M) -> (B, N, D)."""
        windows = mel.unfold(1, WINDOW * STEPS_PER_FRAME, STEPS_PER_FRAME)
        rows = self.speech(windows.flatten(0, 1))
        return torch.unflatten(rows, 0, windows.shape[:2])

    @torch.inference_mode()
    def embed_video(self, crops: Tensor) -> Tensor:
        parts = [
            self.video_windows(part[None].to(_device(self)).float() / 255)[0]
            for part in _overlapping(crops)
        ]
        return torch.cat(parts).float().cpu()

    @torch.inference_mode()
    def embed_speech(self, pcm: Tensor) -> Tensor:
        margin = (self._log_mel.n_fft - self._log_mel.hop) // 2
        padded = functional.pad(pcm.float() / 32768, (margin, margin))
        mel = LogMel.normalise(self._log_mel.log_mel(padded.to(_device(self))))
        return self.speech_windows(mel[None])[0].float().cpu()


class PublishedSyncNet(nn.Module):
    """syncnet_v2 of joonson/syncnet_python, by its names and shapes: 25 frames and 100 rows of 13
    MFCCs a second, embeddings of 1024.

    The authors track and crop faces with a detector. Here the square in the middle of the picture
    stands for the face track: as high as the picture, which frames a portrait much as they do.
    """

    fps: Final = 25
    sample_rate: Final = 16_000
    SIDE: Final = 224

    def __init__(self) -> None:
        super().__init__()
        self.netcnnaud = nn.Sequential(
            *_layer2d(1, 64, 3, padding=1),
            nn.MaxPool2d(1, 1),
            *_layer2d(64, 192, 3, padding=1),
            nn.MaxPool2d(3, (1, 2)),
            *_layer2d(192, 384, 3, padding=1),
            *_layer2d(384, 256, 3, padding=1),
            *_layer2d(256, 256, 3, padding=1),
            nn.MaxPool2d(3, 2),
            *_layer2d(256, 512, (5, 4), padding=0),
        )
        self.netcnnlip = nn.Sequential(
            *_layer3d(3, 96, (5, 7, 7), stride=2, padding=0),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2)),
            *_layer3d(96, 256, (1, 5, 5), stride=2, padding=1),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
            *_layer3d(256, 256, (1, 3, 3), stride=1, padding=1),
            *_layer3d(256, 256, (1, 3, 3), stride=1, padding=1),
            *_layer3d(256, 256, (1, 3, 3), stride=1, padding=1),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2)),
            *_layer3d(256, 512, (1, 6, 6), stride=1, padding=0),
        )
        self.netfcaud, self.netfclip = _head(), _head()

    def crop(self, frames: Tensor) -> Tensor:
        height, width = frames.shape[-2:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = frames[..., top : top + side, left : left + side].float()
        size = (self.SIDE, self.SIDE)
        resized = functional.interpolate(square, size, mode="bilinear", antialias=True)
        return resized.round().clamp(0, 255).byte()

    @torch.inference_mode()
    def embed_video(self, crops: Tensor) -> Tensor:
        """As its authors' pictures were: BGR, 0 to 255."""
        parts = []
        for part in _overlapping(crops):
            bgr = part.flip(1).to(_device(self)).float().movedim(1, 0)[None]
            # Its first layer spans five frames and no other spans any: all windows at once.
            features = self.netcnnlip(bgr).flatten(3).squeeze(-1)[0].mT
            parts.append(self.netfclip(features))
        return torch.cat(parts).cpu()

    @torch.inference_mode()
    def embed_speech(self, pcm: Tensor) -> Tensor:
        rows = torch.from_numpy(mfcc(pcm.numpy(), self.sample_rate)).float()
        windows = rows.unfold(0, WINDOW * STEPS_PER_FRAME, STEPS_PER_FRAME)[:, None]
        parts = [
            self.netfcaud(self.netcnnaud(part.to(_device(self))).flatten(1))
            for part in torch.split(windows, _BATCH)
        ]
        return torch.cat(parts).cpu()


def load_own(weights: Path = OWN_WEIGHTS, device: torch.device | str = "cpu") -> OwnSyncNet:
    network = OwnSyncNet()
    _fill(network, weights, _read(weights))
    return network.to(device).eval().requires_grad_(False)


def load_published(weights: Path, device: torch.device | str = "cpu") -> PublishedSyncNet:
    """weights: the authors' syncnet_v2.model, or the same names in safetensors. As weights only:
    no code in the file runs. Raises WeightsError."""
    network = PublishedSyncNet()
    _fill(network, weights, _read(weights))
    return network.to(device).eval().requires_grad_(False)


def _read(weights: Path) -> dict[str, Tensor]:
    try:
        if weights.suffix == ".safetensors":
            return load_file(weights)
        state = torch.load(weights, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise WeightsError(f"{weights}: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise WeightsError(f"{weights}: expected the tensors of a network by their names")
    return state


def _fill(network: nn.Module, weights: Path, state: dict[str, Tensor]) -> None:
    """Names and shapes must be the network's. Batch counters, which old files lack, say nothing."""

    def shapes(tensors: dict[str, Tensor]) -> set[tuple[str, tuple[int, ...]]]:
        return {
            (name, tuple(tensor.shape))
            for name, tensor in tensors.items()
            if not name.endswith("num_batches_tracked")
        }

    differing = sorted(shapes(state) ^ shapes(network.state_dict()))
    if differing:
        names = ", ".join(dict.fromkeys(name for name, _ in differing[:8]))
        raise WeightsError(f"{weights}: not a SyncNet of this kind; it differs in {names}")
    network.load_state_dict(state, strict=False)


def _overlapping(crops: Tensor) -> list[Tensor]:
    """Pieces of `_BATCH` windows; each goes on where the windows of the one before end."""
    windows = len(crops) - WINDOW + 1
    return [crops[at : at + _BATCH + WINDOW - 1] for at in range(0, windows, _BATCH)]


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def _convolve(channels: int, out: int, size: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, out, size, stride=2, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(out), nn.ReLU()]


def _convolve_in_time(channels: int, out: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv1d(channels, out, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm1d(out), nn.ReLU()]


def _layer2d(
    channels: int, out: int, size: int | tuple[int, int], padding: int
) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out, size, padding=padding), nn.BatchNorm2d(out), nn.ReLU()


def _layer3d(
    channels: int, out: int, size: tuple[int, int, int], stride: int, padding: int
) -> tuple[nn.Module, ...]:
    """Stride and padding of rows and columns; in time there is neither."""
    convolution = nn.Conv3d(channels, out, size, (1, stride, stride), (0, padding, padding))
    return convolution, nn.BatchNorm3d(out), nn.ReLU()


def _head() -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 1024))
