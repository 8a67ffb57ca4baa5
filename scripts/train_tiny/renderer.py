"""Procedural talking characters, drawn with distance fields in torch.

Who they are and how they move: `attributes.py`.  What is painted: `features.py` (the face),
`surroundings.py` (hair, body, clothes) and `scene.py` (the rest), from `shapes.py`.  Here: in which
order, where not, and where the mouth and the eyes come to lie.  `fused_renderer.py` makes one CUDA
kernel of it.

Picture coordinates: u in [-1.5, 1.5] to the right, v in [-1, 1] down; one unit is 128 pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from scripts.train_tiny import features, scene, surroundings
from scripts.train_tiny.attributes import (
    ATTRIBUTE_NAMES,
    NUM_ATTRIBUTES,
    NUM_CONTROLS,
    PARAMETER_INDEX,
    PIXELS_PER_UNIT,
    parameter_table,
    prepare,
    sample_characters,
)
from scripts.train_tiny.replayed import Replayed
from scripts.train_tiny.shapes import Parameters, Planes

__all__ = [
    "ATTRIBUTE_NAMES",
    "HEIGHT",
    "LAYERS",
    "NUM_ATTRIBUTES",
    "NUM_CONTROLS",
    "WIDTH",
    "Renderer",
    "eye_box",
    "mouth_box",
    "region_masks",
    "sample_characters",
]

HEIGHT: Final = 256
WIDTH: Final = 384


def _near_head(p: Parameters, planes: Planes) -> Tensor:
    """Negative where the head and its shadow may lie."""
    across, down = planes["hx"] / (p["face_width"] + 0.42), (planes["hy"] - 0.1) / 1.25
    return across.square() + down.square() - 1.0


def _in_head(p: Parameters, planes: Planes) -> Tensor:
    return planes["head"] - 0.02


def _beside_head(p: Parameters, planes: Planes) -> Tensor:
    return planes["hx"].abs() - 1.1


def _low(p: Parameters, planes: Planes) -> Tensor:
    return 0.08 - planes["y"]


class Layer(NamedTuple):
    """One thing to paint: from the planes so far, the planes that change.

    Pictures whose parameter ``when`` is zero, and pixels where ``within`` is not negative, may be
    left out: there the layer must change nothing that is seen.
    """

    paint: Callable[[Parameters, Planes], Planes]
    when: str | None = None
    within: Callable[[Parameters, Planes], Tensor] | None = None


LAYERS: Final = (
    Layer(scene.plain_background),
    Layer(scene.bokeh, "lights"),
    Layer(scene.window, "window"),
    Layer(scene.diagonal, "diagonal"),
    Layer(scene.shelf, "shelf"),
    Layer(scene.room, "room"),
    Layer(scene.outdoors, "outdoors"),
    Layer(scene.tiles, "tiles"),
    Layer(surroundings.back_hair, "has_hair", _beside_head),
    Layer(surroundings.body, None, _low),
    Layer(surroundings.human_ears, "bare_ears"),
    Layer(surroundings.animal_ears, "animal"),
    Layer(surroundings.creature_parts, "creature"),
    Layer(features.skin, None, _near_head),
    Layer(features.fur_markings, "marked", _in_head),
    Layer(features.complexion, None, _in_head),
    Layer(features.beard, "hairy", _in_head),
    Layer(features.nose, None, _in_head),
    Layer(features.mouth, None, features.near_mouth),
    Layer(features.moustache, "moustache", features.near_mouth),
    Layer(features.eyes, None, features.near_eyes),
    Layer(features.brows_and_whiskers, None, _in_head),
    Layer(features.lay_in, None, _in_head),
    Layer(surroundings.front_hair, "has_hair", _beside_head),
    Layer(surroundings.locks, "locks"),
    Layer(surroundings.tuft, "tuft"),
    Layer(surroundings.horns, "horns"),
    Layer(surroundings.head_scarf, "scarf"),
    Layer(surroundings.glasses, "glasses"),
    Layer(surroundings.caps, "soft_hat"),
    Layer(surroundings.tall_hats, "tall_hat"),
    Layer(surroundings.headphones, "headphones"),
    Layer(surroundings.bow, "bow"),
    Layer(scene.develop),
)
"""Painted in this order."""


def pixel_grid(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Picture coordinates of the pixel centres: u (1, 1, WIDTH) and v (1, HEIGHT, 1)."""
    u = ((torch.arange(WIDTH, device=device) + 0.5) / PIXELS_PER_UNIT - 1.5).view(1, 1, WIDTH)
    v = ((torch.arange(HEIGHT, device=device) + 0.5) / PIXELS_PER_UNIT - 1.0).view(1, HEIGHT, 1)
    return u, v


def draw(table: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The points (u, v) of the pictures of a parameter table (n, K), as (n, 3, rows, columns)."""
    planes = scene.stage(Parameters(table, PARAMETER_INDEX), u, v)
    for layer in LAYERS:
        if layer.when is None:
            planes |= layer.paint(Parameters(table, PARAMETER_INDEX), planes)
            continue
        rows = table[:, PARAMETER_INDEX[layer.when]].nonzero()[:, 0]
        if len(rows):
            part = {name: plane[rows] for name, plane in planes.items()}
            changed = layer.paint(Parameters(table[rows], PARAMETER_INDEX), part)
            for name, plane in changed.items():
                planes[name] = planes[name].index_copy(0, rows, plane)
    return torch.stack([planes[f"image.{channel}"] for channel in range(3)], dim=1)


class Renderer:
    """Draws pictures in batches with torch, layer by layer: slow, and what is meant."""

    def __init__(self, device: torch.device | str, batch: int = 8) -> None:
        self._batch = batch
        self._grid = pixel_grid(device)

    @torch.no_grad()
    def __call__(self, attributes: Tensor, controls: Tensor) -> Tensor:
        """Pictures, float32 (n, 3, HEIGHT, WIDTH) in [0, 1].

        ``attributes`` (n, NUM_ATTRIBUTES) and ``controls`` (n, NUM_CONTROLS).
        """
        tables = torch.split(parameter_table(attributes, controls), self._batch)
        return torch.cat([draw(table, *self._grid) for table in tables])


def _to_pixels(p: dict[str, Tensor], fx: Tensor, fy: Tensor) -> Tensor:
    """Pixel positions (n, 2) as (x, y) of points given in the face's coordinates."""
    view = Parameters(torch.stack(list(p.values()), dim=1), PARAMETER_INDEX)
    hx, hy = fx[:, None, None], fy[:, None, None]
    target_x, target_y = hx, hy
    for _ in range(6):  # a fixed point: the point of the head where that of the face is seen
        seen_x, seen_y = scene.onto_face(view, hx, hy)
        hx, hy = hx + target_x - seen_x, hy + target_y - seen_y
    x, y = hx[:, 0, 0], hy[:, 0, 0] - 0.55
    px = (x * p["roll_cos"] - y * p["roll_sin"]) * p["head_scale"] + p["lean_x"]
    py = (x * p["roll_sin"] + y * p["roll_cos"]) * p["head_scale"]
    py = py + p["lean_y"] + p["head_y"] + 0.55
    u = (px * p["camera_cos"] - py * p["camera_sin"]) * p["zoom"] + p["camera_x"]
    v = (px * p["camera_sin"] + py * p["camera_cos"]) * p["zoom"] + p["camera_y"]
    return torch.stack([(u + 1.5) * PIXELS_PER_UNIT, (v + 1.0) * PIXELS_PER_UNIT], dim=1)


def _find_features(attributes: Tensor, controls: Tensor) -> Tensor:
    p = prepare(attributes, controls)
    mouth = _to_pixels(p, 0.020 * p["turn_sin"], p["mouth_rest_y"] + 0.03)
    eyes = _to_pixels(p, torch.zeros_like(p["eye_y"]), p["eye_y"] - 0.03)
    return torch.cat([mouth, eyes, (p["zoom"] * p["head_scale"])[:, None]], dim=1)


_found = Replayed(_find_features)


def _mouth_and_eyes(attributes: Tensor, controls: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centres of mouth and eyes in pixels, each (n, 2), and the head's scale (n,)."""
    found = _found(attributes.float(), controls.float())
    return found[:, :2], found[:, 2:4], found[:, 4]


def mouth_box(attributes: Tensor, controls: Tensor) -> tuple[Tensor, Tensor]:
    """Mouth centre in pixels (n, 2) as (x, y), and the head's scale (n,).

    The centre is that of the open mouth's range and does not move with the mouth controls.  At
    scale 1 the mouth with lips stays within 34 pixels sideways and 24 up or down of it.
    """
    mouth, _, scale = _mouth_and_eyes(attributes, controls)
    return mouth, scale


def eye_box(attributes: Tensor, controls: Tensor) -> tuple[Tensor, Tensor]:
    """The point midway between the eyes in pixels (n, 2) as (x, y), and the head's scale (n,).

    At scale 1 both eyes and brows stay within 52 pixels sideways and 26 up or down of it.
    """
    _, eyes, scale = _mouth_and_eyes(attributes, controls)
    return eyes, scale


def region_masks(attributes: Tensor, controls: Tensor) -> tuple[Tensor, Tensor]:
    """Float masks (n, 1, HEIGHT, WIDTH) of the mouth's and of the eyes' rectangles."""
    device = attributes.device
    px = (torch.arange(WIDTH, device=device) + 0.5).view(1, 1, 1, WIDTH)
    py = (torch.arange(HEIGHT, device=device) + 0.5).view(1, 1, HEIGHT, 1)
    *centres, scale = _mouth_and_eyes(attributes, controls)
    size = scale.view(-1, 1, 1, 1)
    masks = []
    for centre, half_x, half_y in zip(centres, (34.0, 52.0), (24.0, 26.0), strict=True):
        cx, cy = centre[:, 0].view(-1, 1, 1, 1), centre[:, 1].view(-1, 1, 1, 1)
        inside = ((px - cx).abs() < half_x * size) & ((py - cy).abs() < half_y * size)
        masks.append(inside.float())
    return masks[0], masks[1]
