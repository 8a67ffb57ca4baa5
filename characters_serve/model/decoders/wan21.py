"""The Wan2.1 video VAE: 16 channels, a latent for 8 x 8 pixels and four frames.

In and out: see wan_layers.py. State dicts of the public `Wan2.1_VAE.pth` load as they are.
"""

from __future__ import annotations

from itertools import pairwise

from characters_serve.model.decoders.wan_layers import (
    Decoder,
    Downsample,
    Encoder,
    Layer,
    ResidualBlock,
    Upsample,
    WanVAE,
)

DIM = 96
# Of each latent channel, over the training videos.
MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


def wan21_vae(dim: int = DIM) -> WanVAE:
    """dim: channels at full resolution; other widths than the published are for tests."""
    z, widest = len(MEAN), 4 * dim
    return WanVAE(
        Encoder(3, dim, widest, z, _down_stages(dim)),
        Decoder(z, widest, dim, 3, _up_stages(dim)),
        MEAN,
        STD,
        patch=1,
    )


def _down_stages(dim: int) -> list[Layer]:
    widths = [dim, dim, 2 * dim, 4 * dim, 4 * dim]
    layers: list[Layer] = []
    for stage, (before, after) in enumerate(pairwise(widths)):
        layers += [ResidualBlock(before, after), ResidualBlock(after, after)]
        if stage < 3:
            layers.append(Downsample(after, halves_time=stage > 0))
    return layers


def _up_stages(dim: int) -> list[Layer]:
    """An upsampler halves its width; only the second stage widens again."""
    layers: list[Layer] = []
    channels = 4 * dim
    for stage, width in enumerate([4 * dim, 4 * dim, 2 * dim, dim]):
        layers += [
            ResidualBlock(channels, width),
            ResidualBlock(width, width),
            ResidualBlock(width, width),
        ]
        if stage < 3:
            channels = width // 2
            layers.append(Upsample(width, channels, doubles_time=stage < 2))
    return layers
