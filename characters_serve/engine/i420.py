"""In: RGB frames in [0, 1] on any device. Out: planar I420, as video encoders take it.

BT.601, limited range; a chroma sample is the mean of its 2 x 2 pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Rows Y, U, V; columns R, G, B; for RGB in [0, 1].
_RGB_TO_YUV = (
    (65.481, 128.553, 24.966),
    (-37.797, -74.203, 112.0),
    (112.0, -93.786, -18.214),
)


def rgb_to_i420(frames_FCHW: Tensor) -> Tensor:
    """float (F, 3, H, W) with even H and W -> uint8 (F, H * W * 3 / 2)."""
    frames = frames_FCHW.float().clamp(0, 1)
    weight = frames.new_tensor(_RGB_TO_YUV)[:, :, None, None]
    luma = functional.conv2d(frames, weight[:1]) + 16
    chroma = functional.conv2d(functional.avg_pool2d(frames, 2), weight[1:]) + 128
    planes = torch.cat([luma.flatten(1), chroma.flatten(1)], dim=1)
    return planes.round_().to(torch.uint8)
