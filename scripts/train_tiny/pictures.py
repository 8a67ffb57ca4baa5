"""Contact sheets of a training run, as PNG."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor


def save_sheet(pictures: Tensor, path: Path, columns: int) -> None:
    """pictures: (N, 3, H, W) in [0, 1], row by row."""
    count, _, height, width = pictures.shape
    rows = -(-count // columns)
    sheet = torch.full((3, rows * height, columns * width), 0.5)
    for i, picture in enumerate(pictures.float().cpu()):
        y, x = i // columns * height, i % columns * width
        sheet[:, y : y + height, x : x + width] = picture
    eight_bit = (sheet.clamp(0, 1) * 255).round().byte()
    Image.fromarray(eight_bit.permute(1, 2, 0).contiguous().numpy()).save(path)
