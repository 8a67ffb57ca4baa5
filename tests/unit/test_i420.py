"""RGB to I420 against swscale, the converter that video tools agree on."""

from __future__ import annotations

import av
import numpy as np
import torch

from characters_serve.engine.i420 import rgb_to_i420

HEIGHT, WIDTH = 64, 96


def swscale_i420(rgb_HWC: np.ndarray) -> np.ndarray:
    frame = av.VideoFrame.from_ndarray(rgb_HWC, format="rgb24")
    converted = frame.reformat(
        format="yuv420p",
        dst_colorspace="ITU601",
        src_color_range="JPEG",
        dst_color_range="MPEG",
        interpolation="AREA",
    )
    return converted.to_ndarray().reshape(-1).astype(np.int32)


def test_agrees_with_swscale_within_two_levels() -> None:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(3, 3, HEIGHT // 8, WIDTH // 8, generator=generator)
    frames = torch.nn.functional.interpolate(coarse, scale_factor=8, mode="bilinear")
    frames[2] = (frames[2] > 0.5).float()
    levels = (frames * 255).round().to(torch.uint8)
    ours = rgb_to_i420(levels.float() / 255).numpy().astype(np.int32)
    for index, level in enumerate(levels):
        theirs = swscale_i420(level.permute(1, 2, 0).contiguous().numpy())
        assert np.abs(ours[index] - theirs).max() <= 2


def test_black_white_and_primaries_have_their_known_levels() -> None:
    colours = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]).float()
    planes = rgb_to_i420(colours[:, :, None, None].expand(-1, 3, 2, 2))
    assert planes.shape == (5, 6)
    assert planes[:, [0, 4, 5]].tolist() == [
        [16, 128, 128],
        [235, 128, 128],
        [81, 90, 240],
        [145, 54, 34],
        [41, 240, 110],
    ]


def test_values_outside_the_range_are_clipped_not_wrapped() -> None:
    planes = rgb_to_i420(torch.tensor([-3.0, 3.0]).view(2, 1, 1, 1).expand(2, 3, 2, 2))
    assert planes[:, 0].tolist() == [16, 235]


def test_planes_are_in_order_y_u_v() -> None:
    frames = torch.zeros(1, 3, 2, 4)
    frames[0, 2, :, 2:] = 1.0  # the right half is blue
    assert rgb_to_i420(frames)[0].tolist() == [16, 16, 41, 41] * 2 + [128, 240] + [128, 110]
