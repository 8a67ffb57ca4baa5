"""Training pictures: generated code draws what torch draws, and boxes are where features are."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from scripts.train_tiny.attributes import CONTROL_NAMES, PARAMETER_INDEX, parameter_table
from scripts.train_tiny.host_renderer import HostRenderer
from scripts.train_tiny.renderer import (
    HEIGHT,
    LAYERS,
    NUM_CONTROLS,
    WIDTH,
    draw,
    eye_box,
    mouth_box,
    pixel_grid,
    region_masks,
    sample_characters,
)

EVERY = 4
"""One pixel of so many in a row and a column is drawn: a whole picture takes seconds."""


def coarse_grid() -> tuple[Tensor, Tensor]:
    u, v = pixel_grid("cpu")
    return u[..., ::EVERY], v[:, ::EVERY]


def _characters(count: int) -> Tensor:
    return sample_characters(count, torch.Generator().manual_seed(8), "cpu")


def _who_shows_every_layer() -> Tensor:
    """A few characters who together wear and are all that is ever left out."""
    many = _characters(800)
    table = parameter_table(many, torch.zeros(len(many), NUM_CONTROLS))
    missing = {layer.when for layer in LAYERS if layer.when is not None}
    chosen = []
    while missing:
        shown = torch.stack([table[:, PARAMETER_INDEX[name]] != 0 for name in sorted(missing)])
        best = int(shown.sum(0).argmax())
        chosen.append(best)
        missing -= {name for name, has in zip(sorted(missing), shown[:, best], strict=True) if has}
    return many[chosen]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_generated_code_draws_what_torch_draws() -> None:
    attributes = _who_shows_every_layer()
    controls = torch.rand(len(attributes), NUM_CONTROLS, generator=torch.Generator().manual_seed(9))
    table = parameter_table(attributes, controls)
    drawn = HostRenderer(every=EVERY, optimise=0)(attributes, controls)

    meant = draw(table, *coarse_grid())
    off = (drawn - meant).abs().amax(1) > 1 / 255
    # The noise of books and tiles jumps between cells, where rounding may choose the other one.
    assert off.float().mean() < 0.001, off.float().mean((1, 2))


def _change(attributes: Tensor, control: str) -> tuple[Tensor, Tensor]:
    """Controls at rest but for a turned head, and by how much the control changes the points."""
    still = torch.zeros(len(attributes), NUM_CONTROLS)
    still[:, CONTROL_NAMES.index("head_x")] = torch.linspace(-1, 1, len(attributes))
    moved = still.clone()
    moved[:, CONTROL_NAMES.index(control)] = 0.9
    pictures = [draw(parameter_table(attributes, c), *coarse_grid()) for c in (still, moved)]
    return still, (pictures[1] - pictures[0]).abs().mean(1)


def test_mouth_and_eyes_move_where_the_boxes_say() -> None:
    attributes = _characters(12)
    still, opened = _change(attributes, "open")
    _, blinked = _change(attributes, "blink")
    mouth, eyes = (mask[:, 0, ::EVERY, ::EVERY] for mask in region_masks(attributes, still))
    # An opening mouth also moves the chin; a blink moves nothing but eyes and brows.
    for change, mask, share in ((opened, mouth, 0.3), (blinked, eyes, 0.97)):
        inside = (change * mask).sum((1, 2)) / change.sum((1, 2))
        assert (inside > share).all(), inside
    columns, rows = torch.arange(0, WIDTH, EVERY) + 0.5, torch.arange(0, HEIGHT, EVERY) + 0.5
    # The farther eye of a turned head is narrower.
    for change, box, most in ((opened * mouth, mouth_box, 9.0), (blinked * eyes, eye_box, 16.0)):
        centre, scale = box(attributes, still)
        weight = change / change.sum((1, 2), keepdim=True)
        x, y = (weight.sum(1) * columns).sum(1), (weight.sum(2) * rows).sum(1)
        away = (torch.stack([x, y], 1) - centre).abs() / scale[:, None]
        assert (away < most).all(), away


def test_a_talking_mouth_moves_nothing_behind_the_character() -> None:
    _, change = _change(_characters(4), "open")
    assert change[:, :4].max() == 0.0
