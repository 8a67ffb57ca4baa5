"""In: RGB frames in [0, 1] on any device. Out: planar I420, as video encoders take it.

BT.601, limited range; a chroma sample is the mean of its 2 x 2 pixels.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

# Rows Y, U, V; columns R, G, B; for RGB in [0, 1].
_RGB_TO_YUV = (
    (65.481, 128.553, 24.966),
    (-37.797, -74.203, 112.0),
    (112.0, -93.786, -18.214),
)


@functools.cache
def _weight(device: torch.device) -> Tensor:
    """Made once for each device: a captured decode may not copy from the host."""
    return torch.tensor(_RGB_TO_YUV, device=device)


def rgb_to_i420(frames_FCHW: Tensor) -> Tensor:
    """float (F, 3, H, W) with even H and W -> uint8 (F, H * W * 3 / 2).

    Sums of strided views and matrix products: 2.1 ms for 4 frames of 384 x 256 on one core, where
    avg_pool2d and 1 x 1 convolutions took 4.6 ms.
    """
    frames = frames_FCHW.float().clamp(0, 1)
    weight = _weight(frames.device)
    luma = (weight[:1] @ frames.flatten(2)).add_(16)
    rows = frames[:, :, 0::2] + frames[:, :, 1::2]
    sums = rows[..., 0::2] + rows[..., 1::2]
    chroma = (weight[1:] / 4 @ sums.flatten(2)).add_(128)
    planes = torch.cat([luma.flatten(1), chroma.flatten(1)], dim=1)
    return planes.round_().to(torch.uint8)
