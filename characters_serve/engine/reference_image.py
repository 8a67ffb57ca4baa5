"""In: a reference image's packed RGB rows. Out: the tensor that image encoders take."""

from __future__ import annotations

import torch
from torch import Tensor

from characters_serve.config import ModelConfig


def image_tensor(image_rgb: bytes, model: ModelConfig, device: torch.device) -> Tensor:
    """uint8 (H, W, 3) at the model's size."""
    expected = model.height * model.width * 3
    if len(image_rgb) != expected:
        raise ValueError(f"image_rgb: {len(image_rgb)} bytes, the model takes {expected}")
    pixels = torch.frombuffer(bytearray(image_rgb), dtype=torch.uint8)
    return pixels.view(model.height, model.width, 3).to(device)
