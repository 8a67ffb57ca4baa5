"""Clips of real pictures: still ones, moved as heads and faces move. All on the device.

In: real.npz and a clip's controls. Out: frames, reference and region weights, as of rendered clips.
A picture's own pose is unknown, so what moves it is how the controls differ from the reference's.
Everything is one look-up in the picture: the head in a soft ellipse against a still background,
mouths and eyes that open and close by a power of the distance from their middle, which never folds.

Letters: N clips, T frames, P pictures.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from characters_serve.config import ModelConfig
from scripts.train_tiny.attributes import CONTROL_NAMES
from scripts.train_tiny.replayed import Replayed

_EYES: Final = -0.12
_MOUTH: Final = 0.50
_EYE_SIDE: Final = 0.42
"""Heights of eyes and mouth, and how far beside the middle eyes are, in a face whose ellipse is the
unit circle."""
_HEAD: Final = (0.154, 0.193)
"""Half width and height of a rendered character's head of scale 1; of the picture's width."""
_STILL_SHARE: Final = 1 / 6
_FACES_WEIGHT: Final = 4.0
"""A picture with a face is drawn so many times as often; photographs as often as drawings."""

Face = tuple[float, float, float, float]
"""Middle of the eyes (x, y), y of the mouth, half the distance between the eyes; all in shares of
the picture's width, and all 0 where there is no face."""


class Pictures(NamedTuple):
    """What real.npz holds: P files one after the other. The first are photographs, the next
    drawings, the last held out.

    files: uint8, all bytes; ends (P,): where each file ends; faces float32 (P, 4), `Face`;
    counts (3,): of photographs, drawings, held out.
    """

    files: NDArray[np.uint8]
    ends: NDArray[np.int64]
    faces: NDArray[np.float32]
    counts: NDArray[np.int64]

    def images(self) -> Iterator[Image.Image]:
        start = 0
        for end in self.ends.tolist():
            yield Image.open(io.BytesIO(self.files[start:end].tobytes())).convert("RGB")
            start = end


class RealClips(NamedTuple):
    """frames (N, T, 3, H, W) and reference (N, 3, H, W) in [0, 1]; weights (N, T, 1, H, W)."""

    frames: Tensor
    reference: Tensor
    weights: Tensor


class RealPictures:
    """per_batch: how many clips of a step of the autoencoder's are of them."""

    def __init__(
        self, folder: Path, model: ModelConfig, device: torch.device, per_batch: int
    ) -> None:
        self.per_batch = per_batch
        path = folder / "real.npz"
        if not path.exists():
            raise SystemExit(
                f"there is no {path}: make it with `python -m scripts.train_tiny.real_pictures "
                f"--out {path}`, or train without real pictures with --real-clips 0"
            )
        with np.load(path) as arrays:
            pictures = Pictures(**arrays)
        images = [torch.from_numpy(np.array(image)) for image in pictures.images()]
        height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
        # One array, so that pictures are chosen on the device; filled up at the right and below.
        filled = torch.zeros(len(images), 3, height, width, dtype=torch.uint8)
        for row, image in zip(filled, images, strict=True):
            row[:, : image.shape[0], : image.shape[1]] = image.permute(2, 0, 1)
        self._filled = filled.to(device)
        sizes = [[image.shape[1], image.shape[0]] for image in images]
        self._sizes = torch.tensor(sizes, dtype=torch.float32, device=device)
        self._faces = torch.from_numpy(pictures.faces).to(device) * self._sizes[:, :1]
        photographs, drawings, self.held_out = pictures.counts.tolist()
        self._training = photographs + drawings
        shares = torch.where(self._faces[: self._training, 3] > 0, _FACES_WEIGHT, 1.0)
        for kind in (shares[:photographs], shares[photographs:]):
            kind /= 2 * kind.sum()
        self._up_to = shares.cumsum(0)
        self._size = (model.height, model.width)
        self._moved = Replayed(moved)

    def sample(
        self, controls: Tensor, reference_controls: Tensor, generator: torch.Generator
    ) -> RealClips:
        """controls (N, T, 12) and reference_controls (N, 12), as of `Clips`."""
        count, device = len(controls), controls.device

        def chance() -> Tensor:
            return torch.rand(count, generator=generator, device=device)

        which = torch.searchsorted(self._up_to, chance()).clamp(max=self._training - 1)
        reference, face = self._crop(which, generator)
        reference = jittered(reference, generator)
        strength = torch.where(chance() < _STILL_SHARE, 0.05, 0.6 + 0.6 * chance())
        change = (controls - reference_controls[:, None]) * strength[:, None, None]
        return self._clips(reference, face, change, generator)

    def sample_held_out(
        self, row: int, controls: Tensor, reference_controls: Tensor, generator: torch.Generator
    ) -> RealClips:
        """Of one picture, uncropped and in its own colours."""
        which = torch.full((len(controls),), self._training + row, device=controls.device)
        height, width = self._size
        reference = self._filled[which, :, :height, :width].float() / 255
        face = _somewhere(len(controls), self._size, generator)
        return self._clips(reference, face, controls - reference_controls[:, None], generator)

    def _clips(
        self, reference: Tensor, face: Tensor, change: Tensor, generator: torch.Generator
    ) -> RealClips:
        inside = 0.15 * torch.rand(len(reference), 3, generator=generator, device=reference.device)
        inside[:, 0] *= 2.5
        made = self._moved(reference, face, change, inside)
        return RealClips(made[:, :, :3], reference, made[:, :, 3:])

    def _crop(self, which: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pictures (N, 3, H, W), and in each a face (N, 5), most often where there is one."""
        (height, width), count, device = self._size, len(which), which.device

        def chance() -> Tensor:
            return torch.rand(count, generator=generator, device=device)

        sizes, eyes = self._sizes[which], self._faces[which]
        anywhere = _somewhere(count, self._size, generator)
        middle_x, middle_y, half_width, half_height = _ellipse(eyes)
        known = (eyes[:, 3] > 0) & (chance() < 0.85)

        # Pixels of the picture for each of the crop: the face as large as rendered ones, or any.
        largest = torch.minimum(sizes[:, 0] / width, sizes[:, 1] / height)
        step = torch.where(known, half_width / anywhere[:, 2], largest * 2 ** -chance())
        step = torch.minimum(step.clamp(min=0.75), largest)
        free_x, free_y = sizes[:, 0] - width * step, sizes[:, 1] - height * step
        left = torch.where(known, middle_x - anywhere[:, 0] * step, chance() * free_x)
        top = torch.where(known, middle_y - anywhere[:, 1] * step, chance() * free_y)
        left, top = left.clamp(min=0).minimum(free_x), top.clamp(min=0).minimum(free_y)
        flipped = chance() < 0.5

        # Two samples across and down for each pixel, since a step may be of two.
        x = (torch.arange(2 * width, device=device) + 0.5) / 2
        y = (torch.arange(2 * height, device=device) + 0.5) / 2
        x = torch.where(flipped[:, None], width - x, x)
        across = (left[:, None] + x * step[:, None]).minimum(sizes[:, :1] - 0.5)
        down = (top[:, None] + y * step[:, None]).minimum(sizes[:, 1:] - 0.5)
        across = across / self._filled.shape[-1] * 2 - 1
        down = down / self._filled.shape[-2] * 2 - 1
        shape = (count, 2 * height, 2 * width)
        place = torch.stack([across[:, None].expand(shape), down[:, :, None].expand(shape)], dim=-1)
        fine = functional.grid_sample(self._filled[which].float() / 255, place, align_corners=False)
        face_x = (middle_x - left) / step
        face_x = torch.where(flipped, width - face_x, face_x)
        found = [face_x, (middle_y - top) / step, half_width / step, half_height / step]
        face = torch.stack([*found, 0.3 * anywhere[:, 4]], dim=1)
        return functional.avg_pool2d(fine, 2), torch.where(known[:, None], face, anywhere)


def _ellipse(eyes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`Face` in pixels (N, 4) -> the head's middle x and y, half its width and height."""
    x, eye_y, mouth_y, gap = eyes.unbind(1)
    half_height = (mouth_y - eye_y) / (_MOUTH - _EYES)
    return x, eye_y - _EYES * half_height, gap / _EYE_SIDE, half_height


def _somewhere(count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Faces (N, 5): middle x and y, half width and height in pixels, and tilt in radians."""
    height, width = size
    chance = torch.rand(count, 5, generator=generator, device=generator.device)
    across, down, scale, aspect, tilt = (chance * 2 - 1).unbind(1)
    scale = 0.8 * 1.5**scale
    return torch.stack(
        [
            width * (0.5 + 0.12 * across),
            height * (0.46 + 0.1 * down),
            _HEAD[0] * width * scale * 1.15**aspect,
            _HEAD[1] * width * scale / 1.15**aspect,
            0.2 * tilt,
        ],
        dim=1,
    )


def jittered(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Other exposures, contrasts, whites and saturations; (N, 3, H, W) in [0, 1]."""

    def around(spread: float, channels: int = 1) -> Tensor:
        shape = (len(pictures), channels, 1, 1)
        drawn = torch.rand(shape, generator=generator, device=pictures.device)
        return spread ** (2 * drawn - 1)

    x = pictures.clamp(min=1e-4) ** around(1.5)
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * around(1.6)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (x - mean) * around(1.25)
    return (x * around(1.12, 3) * around(1.2)).clamp(0, 1)


def moved(picture: Tensor, face: Tensor, change: Tensor, inside: Tensor) -> Tensor:
    """picture (N, 3, H, W); face (N, 5) as of `_somewhere`; change (N, T, 12) of the controls;
    inside (N, 3): the mouth's colour -> (N, T, 4, H, W): frames, and weights 1 or 9."""
    count, length = change.shape[:2]
    height, width = picture.shape[-2:]
    device = picture.device
    x = (torch.arange(width, device=device) + 0.5).view(1, 1, 1, -1)
    y = (torch.arange(height, device=device) + 0.5).view(1, 1, -1, 1)
    middle_x, middle_y, half_width, half_height, tilt = face.view(count, 1, 5, 1, 1).unbind(2)
    by_name = change[..., None, None].unbind(2)
    c = dict(zip(CONTROL_NAMES, by_name, strict=True))

    # The head. It shifts and leans as a whole, what is in front moves more, shoulders follow.
    shift_x, shift_y = 0.15 * half_width * c["head_x"], 0.06 * half_height * c["head_y"]
    right, down = x - middle_x - shift_x, y - middle_y - shift_y
    radius = (right / half_width).square() + (down / half_height).square()
    head = torch.sigmoid((1.25 - radius.sqrt()) * 5)
    front = (1 - radius / 1.4).clamp(min=0).square()
    body = torch.sigmoid((down / half_height - 1.4) * 4)
    body = body * torch.sigmoid((2.2 - right.abs() / half_width) * 4)
    follows = head + (1 - head) * 0.25 * body
    cosine, sine = torch.cos(0.15 * c["roll"]), torch.sin(0.15 * c["roll"])
    neck = down - half_height
    lean_x = right * (cosine - 1) + neck * sine
    lean_y = neck * (cosine - 1) - right * sine
    turn_x, turn_y = 0.30 * half_width * c["head_x"], 0.16 * half_height * c["head_y"]
    right = x - middle_x - shift_x * follows + lean_x * head - turn_x * front
    down = y - middle_y - shift_y * follows + lean_y * head - turn_y * front

    # The face, in which eyes and mouth have their places.
    level, slope = torch.cos(tilt), torch.sin(tilt)
    fx = (right * level + down * slope) / half_width
    fy = (down * level - right * slope) / half_height
    seen_x, seen_y = fx, fy

    # Eyes: what shows is drawn together towards their middle lines; gaze and brows shift.
    eye_x, eye_y = (fx.abs() - _EYE_SIDE) / 0.32, (fy - _EYES) / 0.24
    near = _hill(eye_x, eye_y)
    open_eye = (1 - c["blink"]).clamp(0, 1) * _hill(eye_x * 1.4, eye_y * 1.4)
    closing = 1 - 0.8 * c["blink"].clamp(0, 1) * (1 - eye_x.square()).clamp(min=0)
    seen_y = seen_y + 0.24 * (_power(eye_y, closing) - eye_y)
    seen_x = seen_x - 0.08 * c["gaze_x"] * open_eye
    seen_y = seen_y - 0.05 * c["gaze_y"] * open_eye
    seen_y = seen_y + 0.07 * c["brow"] * _hill(eye_x * 0.8, eye_y + 1.4)

    # The mouth: stretched from its middle line, spread or rounded, dark inside but for teeth.
    mouth_x, mouth_y = fx / 0.52, (fy - _MOUTH) / 0.32
    opening = c["open"].clamp(-0.5, 1)
    stretch = 1 + 1.5 * opening * (1 - mouth_x.square()).clamp(min=0)
    seen_y = seen_y + 0.32 * (_power(mouth_y, stretch) - mouth_y)
    spread = 0.35 * (c["width"] - c["round"]).clamp(-1, 1)
    spread = 1 + spread * (1 - mouth_y.square()).clamp(min=0)
    seen_x = seen_x + 0.52 * (_power(mouth_x, spread) - mouth_x)
    opening = opening.clamp(min=0)
    wide = 0.62 * (1 + 0.3 * (c["width"] - c["round"]).clamp(-1, 1))
    gap_x, gap_y = mouth_x / wide, mouth_y / (0.62 * opening + 0.02)
    within = gap_x.square() + gap_y.square()
    hole = torch.sigmoid((1 - within) * 12) * (opening * 8).clamp(max=1)
    teeth = torch.sigmoid((-0.35 - gap_y) * 8) * c["teeth"].clamp(0, 1)

    seen_x, seen_y = seen_x * half_width, seen_y * half_height
    place_x = (middle_x + seen_x * level - seen_y * slope) / width * 2 - 1
    place_y = (middle_y + seen_y * level + seen_x * slope) / height * 2 - 1
    place = torch.stack([place_x, place_y], dim=-1).flatten(1, 2)
    frames = functional.grid_sample(picture, place, padding_mode="border", align_corners=False)
    frames = torch.unflatten(frames, 2, (length, height)).transpose(1, 2)
    colour = inside.view(count, 1, 3, 1, 1)
    colour = colour + (0.9 - colour) * teeth[:, :, None]
    frames = torch.lerp(frames, colour, hole[:, :, None])
    regions = (near > 0) | ((mouth_x.abs() < 1) & (mouth_y.abs() < 1))
    return torch.cat([frames, 1 + 8 * regions[:, :, None].float()], dim=2)


def _hill(x: Tensor, y: Tensor) -> Tensor:
    """1 at the origin, 0 and flat from the unit circle on."""
    return (1 - x.square() - y.square()).clamp(min=0).square()


def _power(x: Tensor, exponent: Tensor) -> Tensor:
    """x within [-1, 1] with its size raised to a power; x elsewhere."""
    size = x.abs()
    return torch.where(size < 1, x.sign() * size.clamp(1e-4, 1) ** exponent, x)
