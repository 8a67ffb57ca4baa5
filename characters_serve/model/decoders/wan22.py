"""The Wan2.2 video VAE: 48 channels, a latent for 16 x 16 pixels and four frames.

In and out: see wan_layers.py. State dicts of the public `Wan2.2_VAE.pth` load as they are.
Against Wan2.1's: pixels come in patches of 2 x 2, and a shortcut without weights leads around
each stage: means of blocks on the way down, repeated channels on the way up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from characters_serve.model.decoders.stream import StreamState, as_patches
from characters_serve.model.decoders.wan_layers import (
    Decoder,
    Downsample,
    Encoder,
    Layer,
    ResidualBlock,
    Upsample,
    WanVAE,
)

ENCODER_DIM, DECODER_DIM = 160, 256
PATCH = 2
# Of each latent channel, over the training videos.
MEAN = (
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
    *(-0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825),
    *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230),
    *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
    *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
)
STD = (
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013),
    *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
    *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
    *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
    *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)


def wan22_vae(encoder_dim: int = ENCODER_DIM, decoder_dim: int = DECODER_DIM) -> WanVAE:
    """dims: channels of the finest stage; other widths than the published are for tests."""
    z, pixels = len(MEAN), 3 * PATCH**2
    return WanVAE(
        Encoder(pixels, encoder_dim, 4 * encoder_dim, z, _down_stages(encoder_dim)),
        Decoder(z, 4 * decoder_dim, decoder_dim, pixels, _up_stages(decoder_dim)),
        MEAN,
        STD,
        PATCH,
    )


class DownStage(Layer):
    """Two residual blocks and a downsampler, beside the means of the blocks that it joins."""

    def __init__(self, before: int, after: int, time: int, space: int) -> None:
        super().__init__()
        self.factors = (time, space)
        layers: list[Layer] = [ResidualBlock(before, after), ResidualBlock(after, after)]
        if space > 1:
            layers.append(Downsample(after, halves_time=time > 1))
        self.downsamples: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        h = x_BTHWC
        for layer in self.downsamples:
            h = layer(h, state)
        return h + _mean_shortcut(x_BTHWC, *self.factors, h.shape[-1])


class UpStage(Layer):
    """Three residual blocks and an upsampler, beside the stage's channels, repeated and spread."""

    def __init__(self, before: int, after: int, time: int, space: int) -> None:
        super().__init__()
        self.factors = (time, space)
        layers: list[Layer] = [
            ResidualBlock(before, after),
            ResidualBlock(after, after),
            ResidualBlock(after, after),
        ]
        if space > 1:
            layers.append(Upsample(after, after, doubles_time=time > 1))
        self.upsamples: Sequence[Layer] = nn.ModuleList(layers)  # type: ignore[assignment]

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        h = x_BTHWC
        for layer in self.upsamples:
            h = layer(h, state)
        if self.factors == (1, 1):
            return h
        _, space = self.factors
        # (B, T, time, H, row, W, column, C); time is 1 for the stream's first latent.
        blocks = torch.unflatten(as_patches(h, space), 1, (x_BTHWC.shape[1], -1))
        blocks.add_(_spread(x_BTHWC, h.shape[-1]))
        return h


def _mean_shortcut(x_BTHWC: Tensor, time: int, space: int, channels: int) -> Tensor:
    """Blocks of time x space x space read as (channel, time, row, column), then means of runs.

    The stream's first frame has nothing before it to be joined with but zeros.
    """
    if x_BTHWC.shape[1] % time:
        x_BTHWC = torch.cat([torch.zeros_like(x_BTHWC[:, :1]), x_BTHWC], dim=1)
    blocks = torch.unflatten(as_patches(x_BTHWC, space), 1, (-1, time))
    # (B, T, time, H, row, W, column, C) -> (B, T, H, W, C, time, row, column)
    joined = blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(-4)
    return torch.unflatten(joined, -1, (channels, -1)).mean(-1)


def _spread(x_BTHWC: Tensor, channels: int) -> Tensor:
    """What goes to each block, to broadcast against (B, T, time, H, row, W, column, C).

    Channels repeated side by side and read as (channel, time, row, column): at these widths that
    is the channel itself everywhere, or the first of a pair for even rows, the second for odd.
    """
    pairs = torch.unflatten(x_BTHWC, -1, (channels, -1))
    return pairs.movedim(-1, 3)[:, :, None, :, :, :, None]


def _down_stages(dim: int) -> list[Layer]:
    widths = pairwise([dim, dim, 2 * dim, 4 * dim, 4 * dim])
    factors = [(1, 2), (2, 2), (2, 2), (1, 1)]
    return [DownStage(*width, *factor) for width, factor in zip(widths, factors, strict=True)]


def _up_stages(dim: int) -> list[Layer]:
    widths = pairwise([4 * dim, 4 * dim, 4 * dim, 2 * dim, dim])
    factors = [(2, 2), (2, 2), (1, 2), (1, 1)]
    return [UpStage(*width, *factor) for width, factor in zip(widths, factors, strict=True)]
