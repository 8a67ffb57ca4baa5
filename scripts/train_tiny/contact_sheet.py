"""Contact sheets of the rendered characters, to be looked at before a training.

    python -m scripts.train_tiny.contact_sheet --out sheet.png
    python -m scripts.train_tiny.contact_sheet --show turns --count 4 --only kind=0:0.57 --out t.png

``characters``: one picture of each; ``turns``: poses, gaze, brows and a blink, a row for each;
``mouths``: crops of the mouth in the shapes of eight sounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from scripts.train_tiny.attributes import ATTRIBUTE_NAMES, CONTROL_NAMES
from scripts.train_tiny.pictures import save_sheet
from scripts.train_tiny.renderer import NUM_CONTROLS, Renderer, mouth_box, sample_characters

_COLUMNS: Final = 8
_POSES: Final[tuple[dict[str, float], ...]] = (
    {"head_x": -1.0},
    {"head_x": -0.5, "gaze_x": 0.7},
    {},
    {"head_x": 0.5, "brow": -0.6},
    {"head_x": 1.0},
    {"head_y": -1.0, "roll": 0.7, "gaze_y": -0.8},
    {"head_y": 1.0, "roll": -0.7, "brow": 1.0},
    {"blink": 1.0},
)
_SOUNDS: Final = (
    # open, width, round, teeth, tongue: silence, eh, ah, ee, oo, f, th, aw
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (0.6, 0.55, 0.0, 0.55, 0.2),
    (0.92, 0.3, 0.0, 0.4, 0.2),
    (0.27, 0.95, 0.0, 0.8, 0.2),
    (0.22, 0.0, 1.0, 0.0, 0.0),
    (0.09, 0.25, 0.0, 1.0, 0.0),
    (0.26, 0.3, 0.0, 0.65, 1.0),
    (0.7, 0.0, 0.65, 0.1, 0.1),
)


def _pictures(show: str, renderer: Renderer, attributes: Tensor, seed: int) -> Tensor:
    count = len(attributes)
    if show == "characters":
        generator = torch.Generator().manual_seed(seed)
        controls = torch.randn(count, NUM_CONTROLS, generator=generator) * 0.3
        controls[:, CONTROL_NAMES.index("blink") :] = 0.0
        talking = torch.rand(count, 5, generator=generator)
        controls[::4, -5:] = talking[::4]
        return renderer(attributes, controls)
    controls = torch.zeros(_COLUMNS, NUM_CONTROLS)
    for row, pose in zip(controls, _POSES, strict=True):
        for name, value in pose.items():
            row[CONTROL_NAMES.index(name)] = value
    if show == "mouths":
        controls = torch.zeros(_COLUMNS, NUM_CONTROLS)
        controls[:, -5:] = torch.tensor(_SOUNDS)
    rows = attributes.repeat_interleave(_COLUMNS, dim=0)
    pictures = renderer(rows, controls.repeat(count, 1))
    if show == "turns":
        return pictures
    centres, scales = mouth_box(rows, torch.zeros(len(rows), NUM_CONTROLS))
    return torch.stack(
        [_crop(*each) for each in zip(pictures, centres.tolist(), scales.tolist(), strict=True)]
    )


def _crop(picture: Tensor, centre: list[float], scale: float) -> Tensor:
    (x, y), half_x, half_y = centre, round(60 * scale), round(40 * scale)
    left, top = max(0, round(x) - half_x), max(0, round(y) - half_y)
    part = picture[None, :, top : round(y) + half_y, left : round(x) + half_x]
    return torch.nn.functional.interpolate(part, size=(160, 240))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", choices=("characters", "turns", "mouths"), default="characters")
    parser.add_argument("--count", type=int, default=48, help="characters")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME=LOW:HIGH", help="a range of an attribute"
    )
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    attributes = sample_characters(options.count, generator, "cpu")
    for text in options.only:
        name, limits = text.split("=")
        low, high = (float(limit) for limit in limits.split(":"))
        column = ATTRIBUTE_NAMES.index(name)
        attributes[:, column] = low + (high - low) * attributes[:, column]
    pictures = _pictures(options.show, Renderer("cpu"), attributes, options.seed)
    save_sheet(pictures, options.out, _COLUMNS)


if __name__ == "__main__":
    main()
