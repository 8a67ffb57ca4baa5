"""The Wan decoders' fast path: the plain one's layers, replaced one for one, over the same state.

In: an autoencoder whose weights are there. Out: its decoder decodes one stream, latent after
latent, to the same frames but for rounding. Three things differ: 3 x 3 x 3 convolutions with
several new frames are sums of fewer 2-D ones, and norm and SiLU are in the same kernel as the sums
(characters_kernels/frame_tile.py); an upsampled picture is never made, its 3 x 3 convolution is one
of 2 x 2 for each of a pixel's four children; the head's few channels are padded to what one load
takes.

At the published width a chunk of four 1088 x 704 frames then takes 30 Tflop, for the plain path's
56: the stages with one frame 1.7 (plain 1.7), with two 5.4 (8.1), with four 9.7 (19.2) and 9.8
(19.3), convolutions after upsampling 3.4 (7.7), over time alone 0.3 (0.3).

Letters: B batch, T frames, H, W the layer's own grid, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_kernels.frame_tile import join_tile, norm_silu_tile, tap_sums
from characters_serve.model.decoders.stream import FrameConv, StreamState
from characters_serve.model.decoders.wan_layers import (
    CausalConv,
    ChannelNorm,
    Decoder,
    Head,
    Layer,
    ResidualBlock,
    Upsample,
    WanVAE,
    pointwise,
)

_CHANNELS_OF_A_LOAD = 8
"""Tensor cores' convolutions read and write 16 bytes at once."""


def fuse(vae: WanVAE) -> None:
    """Replaces the decoder's layers. Its weights must be there and laid out channels last."""
    decoder = vae.decoder
    assert isinstance(decoder, Decoder)
    frames = _fuse_within(decoder.middle, 1)
    frames = _fuse_within(decoder.upsamples, frames)
    assert isinstance(decoder.head, Head)
    decoder.head = FusedHead(decoder.head, frames)
    vae.decoder = OneLatentAtATime(decoder)


def _fuse_within(parent: nn.Module, frames: int) -> int:
    """frames: that a latent has become on its way to `parent`. Returns those that leave it."""
    for name, layer in list(parent.named_children()):
        match layer:
            case ResidualBlock():
                parent.add_module(name, FusedResidualBlock(layer, frames))
            case Upsample():
                frames *= 1 if layer.time_conv is None else 2
                parent.add_module(name, FusedUpsample(layer))
            case _:
                frames = _fuse_within(layer, frames)
    return frames


class OneLatentAtATime(Layer):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        if x_BTHWC.shape[0] != 1:
            raise ValueError(f"fast_decoder: one stream, not {x_BTHWC.shape[0]}")
        parts = [self.decoder(latent, state) for latent in torch.split(x_BTHWC, 1, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class NormConv:
    """Norm, SiLU and a causal convolution over `frames` new frames, or over a stream's first one.

    Its results are the tile's products, still to be joined; a single frame's need no joining.
    """

    def __init__(
        self, norm: ChannelNorm, conv: CausalConv, frames: int, channels_of: int = 1
    ) -> None:
        """channels_of: products get a multiple of so many channels."""
        self._conv = conv
        self._gamma = norm.gamma.flatten()
        missing = -conv.out_channels % channels_of
        assert conv.bias is not None
        self.bias = functional.pad(conv.bias, (0, missing))
        self._kernels = [
            functional.pad(kernel, (0,) * 7 + (missing,)).contiguous(
                memory_format=torch.channels_last
            )
            for kernel in (tap_sums(conv.weight, frames) if frames > 1 else ())
        ]

    def single(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        """(1, 1, H, W, C) -> (1, 1, H, W, C)."""
        padded = self._tile(list(x_BTHWC[0]), None, state, 1, x_BTHWC.dtype)
        return self._conv.on_padded(padded[None])

    def products(
        self, sources: list[Tensor], bias: Tensor | None, state: StreamState
    ) -> list[Tensor]:
        """sources: T frames (H, W, C), or T + 2 products of a convolution with that bias."""
        frames = len(self._kernels) - 2
        dtype = self._kernels[0].dtype
        tile = self._tile(sources, bias, state, frames, dtype).permute(0, 3, 1, 2)
        made = []
        for index, kernel in enumerate(self._kernels):
            # A slice, not an index: cuDNN tells the layout from a batch's stride too.
            product = functional.conv2d(tile[index : index + 1], kernel, padding=1)
            made.append(product.permute(0, 2, 3, 1)[0])
        return made

    def _tile(
        self,
        sources: list[Tensor],
        bias: Tensor | None,
        state: StreamState,
        frames: int,
        dtype: torch.dtype,
    ) -> Tensor:
        # Copies nothing where convolutions keep the layout of their inputs, as cuDNN's do.
        sources = [source.contiguous() for source in sources]
        like = sources[0].new_empty((), dtype=self._gamma.dtype)
        past = state.past(self._conv, like.expand(1, 1, *sources[0].shape), 2)[0]
        tile = sources[0].new_empty(frames + 2, *sources[0].shape, dtype=dtype)
        norm_silu_tile(sources, bias, self._gamma, past, tile)
        return tile


class FusedResidualBlock(Layer):
    def __init__(self, block: ResidualBlock, frames: int) -> None:
        super().__init__()
        self._first, self._second = (NormConv(*half, frames) for half in block.halves)
        self._shortcut = block.shortcut

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        beside = x_BTHWC if self._shortcut is None else pointwise(self._shortcut, x_BTHWC)
        if x_BTHWC.shape[1] == 1:
            return self._second.single(self._first.single(x_BTHWC, state), state) + beside
        products = self._first.products(list(x_BTHWC[0]), None, state)
        products = self._second.products(products, self._first.bias, state)
        joined = torch.empty_like(beside)
        join_tile([y.contiguous() for y in products], self._second.bias, beside[0], joined[0])
        return joined


class FusedHead(Layer):
    def __init__(self, head: Head, frames: int) -> None:
        super().__init__()
        norm, conv = head.norm_conv
        self._channels = conv.out_channels
        self._norm_conv = NormConv(norm, conv, frames, _CHANNELS_OF_A_LOAD)

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        if x_BTHWC.shape[1] == 1:
            return self._norm_conv.single(x_BTHWC, state)
        products = self._norm_conv.products(list(x_BTHWC[0]), None, state)
        joined = x_BTHWC.new_empty(*x_BTHWC.shape[:-1], products[0].shape[-1])
        join_tile([y.contiguous() for y in products], self._norm_conv.bias, None, joined[0])
        return joined[..., : self._channels]


class FusedUpsample(Layer):
    """A child's 3 x 3 neighbours are its parent's 2 x 2: taps that fall on one parent are added."""

    def __init__(self, upsample: Upsample) -> None:
        super().__init__()
        conv = upsample.resample["1"]
        assert isinstance(conv, FrameConv)
        self._in_time = upsample.in_time
        self._bias = conv.bias
        wide = conv.weight.double()
        self._children = {
            (row, column): _adjacent(_adjacent(wide, 2, row), 3, column)
            .to(conv.weight.dtype)
            .contiguous(memory_format=torch.channels_last)
            for row in (0, 1)
            for column in (0, 1)
        }

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        frames = self._in_time(x_BTHWC, state).flatten(0, 2).permute(0, 3, 1, 2)
        count, _, height, width = frames.shape
        channels = self._children[0, 0].shape[0]
        picture = frames.new_empty(1, count, height, 2, width, 2, channels)
        for (row, column), kernel in self._children.items():
            # One row and column more than there are parents: each child leaves out its own.
            y = functional.conv2d(frames, kernel, self._bias, padding=1)
            child = y[..., row : row + height, column : column + width]
            picture[0, :, :, row, :, column] = child.permute(0, 2, 3, 1)
        return picture.flatten(4, 5).flatten(2, 3)


def _adjacent(weight: Tensor, dim: int, child: int) -> Tensor:
    """Three taps along `dim` -> two: the first child's last two fall on its parent, and the second
    child's first two."""
    before, on, after = torch.split(weight, 1, dim)
    return torch.cat([before, on + after] if child == 0 else [before + on, after], dim)
