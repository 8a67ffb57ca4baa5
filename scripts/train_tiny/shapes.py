"""What pictures are drawn with: distance fields, soft masks, colours, and named parameters.

Knows nothing of characters.  Everything is elementwise arithmetic on planes (n, HEIGHT, WIDTH) and
on parameters (n, 1, 1), so that a drawing can be traced into one kernel (`fused_renderer.py`).
Distances are in units of the character: one is 128 pixels where it is seen at its usual size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Colour = list[Tensor]
"""Red, green and blue, each broadcastable to (n, HEIGHT, WIDTH)."""
Planes = dict[str, Tensor]
"""Named planes, each (n, HEIGHT, WIDTH)."""


class Parameters:
    """Named access to a parameter table (n, K), shaped to broadcast over pixels."""

    def __init__(self, table: Tensor, index: Mapping[str, int]) -> None:
        self._table, self._index = table, index

    def __getitem__(self, name: str) -> Tensor:
        return self._table[:, self._index[name], None, None]

    def colour(self, name: str) -> Colour:
        return [self[f"{name}.{index}"] for index in range(3)]

    def cover(self, distance: Tensor) -> Tensor:
        """Coverage of the inside of a shape, its edge one pixel of the picture wide."""
        return (0.5 - distance * self["pixels"]).clamp(0.0, 1.0)

    def line(self, distance: Tensor, half_width: float) -> Tensor:
        """Coverage of a line along a shape's outline."""
        return self.cover(distance.abs() - half_width)


def colour(planes: Planes, name: str) -> Colour:
    return [planes[f"{name}.{index}"] for index in range(3)]


def painted(name: str, value: Colour) -> Planes:
    return {f"{name}.{index}": channel for index, channel in enumerate(value)}


def soft(distance: Tensor, width: Tensor | float) -> Tensor:
    """Coverage of the inside of a shape with an edge ``width`` units wide."""
    part = (0.5 - distance / width).clamp(0.0, 1.0)
    return part * part * (3.0 - 2.0 * part)


def ellipse(x: Tensor, y: Tensor, half_x: Tensor | float, half_y: Tensor | float) -> Tensor:
    """Signed distance to an ellipse: exact on its outline to first order."""
    u, v = x / half_x, y / half_y
    level = u * u + v * v
    slope = torch.sqrt((u / half_x).square() + (v / half_y).square() + 1e-4)
    return (level - 1.0) / (2.0 * slope)


def box(
    x: Tensor,
    y: Tensor,
    half_x: Tensor | float,
    half_y: Tensor | float,
    corner: Tensor | float,
) -> Tensor:
    """Signed distance to a rounded box."""
    dx, dy = x.abs() - half_x + corner, y.abs() - half_y + corner
    outside = torch.sqrt(dx.clamp(min=0.0).square() + dy.clamp(min=0.0).square() + 1e-8)
    return outside + torch.maximum(dx, dy).clamp(max=0.0) - corner


def join(first: Tensor, second: Tensor, radius: float) -> Tensor:
    """Union of two shapes with a smooth seam; their intersection for a negative radius."""
    part = (0.5 + 0.5 * (second - first) / radius).clamp(0.0, 1.0)
    return second + (first - second) * part - radius * part * (1.0 - part)


def bump(x: Tensor, width: Tensor | float) -> Tensor:
    """Gaussian bump of height one."""
    return torch.exp(-(x / width).square())


def noise(cell: Tensor) -> Tensor:
    """A number in [0, 1) for each value of ``cell``; smooth rounding differences do not matter."""
    return torch.remainder(torch.sin(cell * 12.9898) * 437.585, 1.0)


def ripples(x: Tensor, y: Tensor, seed: Tensor) -> Tensor:
    """Smooth cloudy texture in about [-1, 1] with features about one unit large."""
    warp_x = x + 0.6 * torch.sin(1.7 * y + seed)
    warp_y = y + 0.6 * torch.sin(1.9 * x + 1.3 * seed)
    broad = torch.sin(2.3 * warp_x + seed) * torch.sin(2.1 * warp_y + 2.0 * seed)
    fine = torch.sin(5.1 * warp_x + 3.1 * warp_y) * torch.sin(4.3 * warp_y - 3.7 * warp_x + seed)
    return 0.65 * broad + 0.35 * fine


def over(base: Colour, top: Colour, mask: Tensor) -> Colour:
    return [b + (c - b) * mask for b, c in zip(base, top, strict=True)]


def tint(base: Colour, factors: tuple[float, float, float], mask: Tensor) -> Colour:
    return [b * (1.0 - mask * (1.0 - f)) for b, f in zip(base, factors, strict=True)]


def lighten(base: Colour, mask: Tensor) -> Colour:
    return [b + (1.0 - b) * mask for b in base]


def scale(base: Colour, factor: Tensor | float) -> Colour:
    return [b * factor for b in base]


def constant(like: Tensor, red: float, green: float, blue: float) -> Colour:
    zero = torch.zeros_like(like)
    return [zero + red, zero + green, zero + blue]
