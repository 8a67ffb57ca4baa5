"""TAEHV: small, fast decoders (and encoders) of the Wan latents.

In: normalised latents (B, T, h, w, C), or frames (B, T, H, W, 3) in [0, 1]. Out: the other.
The networks are those of github.com/madebyollin/taehv (MIT), with its checkpoints' names:
`taew2_1.pth`, `taew2_2.pth` and the wider `taew2_2_super.pth` load as they are.

Letters: B batch, T frames, H, W the layer's own grid, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from characters_serve.model.decoders.stream import (
    FRAMES_PER_LATENT,
    FrameConv,
    StreamState,
    after_past,
    as_patches,
    nearest_2x,
)

Variant = Literal["taew2_1", "taew2_2", "taew2_2_super"]

DIM = 64
# The first latent stands for one frame: three of its four come out only to fill the memories.
_TRIMMED_FRAMES = 3


class _Layout(NamedTuple):
    latent_channels: int
    patch: int
    decoder_widths: tuple[int, int, int, int]  # in units of dim


_LAYOUTS: dict[Variant, _Layout] = {
    "taew2_1": _Layout(16, 1, (4, 2, 1, 1)),
    "taew2_2": _Layout(48, 2, (4, 2, 1, 1)),
    "taew2_2_super": _Layout(48, 2, (8, 4, 2, 1)),
}


class MemoryBlock(nn.Module):
    """A residual block that also sees its own input of the frame before."""

    def __init__(self, layers: Sequence[nn.Module], rectified: bool) -> None:
        super().__init__()
        self.conv = nn.Sequential(*layers)
        self._rectified = rectified

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        before = after_past(state.past(self, x_BTHWC, 1), x_BTHWC)[:, :-1]
        h: Tensor = self.conv(torch.cat([x_BTHWC, before], dim=-1)).add_(x_BTHWC)
        return h.relu_() if self._rectified else h


def _block(channels: int) -> MemoryBlock:
    layers = [
        FrameConv(2 * channels, channels, 3, padding=1),
        nn.ReLU(inplace=True),
        FrameConv(channels, channels, 3, padding=1),
        nn.ReLU(inplace=True),
        FrameConv(channels, channels, 3, padding=1),
    ]
    return MemoryBlock(layers, rectified=True)


def _super_block(channels: int) -> MemoryBlock:
    layers = [
        FrameConv(2 * channels, 2 * channels, 7, padding=3, groups=2 * channels, bias=False),
        FrameConv(2 * channels, 4 * channels, 1),
        nn.ReLU(inplace=True),
        FrameConv(4 * channels, channels, 1, bias=False),
    ]
    return MemoryBlock(layers, rectified=False)


class Squash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class Nearest2x(nn.Module):
    def forward(self, x_BTHWC: Tensor) -> Tensor:
        return nearest_2x(x_BTHWC)


class PixelShuffle2x(nn.Module):
    """Channels (colour, row, column) to pixels, as torch's pixel_shuffle reads them."""

    def forward(self, x_BTHWC: Tensor) -> Tensor:
        h = torch.unflatten(x_BTHWC, -1, (-1, 2, 2)).permute(0, 1, 2, 5, 3, 6, 4)
        return h.flatten(4, 5).flatten(2, 3)


class Grow(nn.Module):
    """Each frame becomes `stride` frames, the earlier from the earlier channels."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = FrameConv(channels, stride * channels, 1, bias=False)

    def forward(self, x_BTHWC: Tensor) -> Tensor:
        grown = torch.unflatten(self.conv(x_BTHWC), -1, (self.stride, -1))
        return grown.movedim(-2, 2).flatten(1, 2)


class Pool(nn.Module):
    """`stride` frames become one, the earlier in the earlier channels."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = FrameConv(stride * channels, channels, 1, bias=False)

    def forward(self, x_BTHWC: Tensor) -> Tensor:
        joined = torch.unflatten(x_BTHWC, 1, (-1, self.stride)).movedim(2, -2).flatten(-2)
        pooled: Tensor = self.conv(joined)
        return pooled


class TAEHV(nn.Module):
    darkest = 0.0

    def __init__(self, variant: Variant, dim: int = DIM, widths: Sequence[int] = ()) -> None:
        """dim, widths: of the encoder and of the decoder's stages, other than the published."""
        super().__init__()
        layout = _LAYOUTS[variant]
        self.patch = layout.patch
        pixels = 3 * layout.patch**2
        widths = widths or [factor * dim for factor in layout.decoder_widths]
        self.encoder = nn.ModuleList(_encoder(pixels, dim, layout.latent_channels))
        make = _super_decoder if variant == "taew2_2_super" else _decoder
        self.decoder = nn.ModuleList(make(layout.latent_channels, widths, pixels))

    def decode(self, latents_BTHWC: Tensor, state: StreamState) -> Tensor:
        """Latents (B, T, h, w, z) -> frames (B, F, H, W, 3) in [0, 1].

        F is 4 T, or 4 T - 3 at the start of a stream.
        """
        frames = self.decode_untrimmed(latents_BTHWC, state).clamp_(0, 1)
        if state.started:
            return frames
        state.started = True
        return frames[:, _TRIMMED_FRAMES:]

    def decode_untrimmed(self, latents_BTHWC: Tensor, state: StreamState) -> Tensor:
        """Four frames for each latent, as the last convolution gives them."""
        h = _run(self.decoder, latents_BTHWC, state)
        return PixelShuffle2x()(h) if self.patch == 2 else h

    def encode(self, frames_BTHWC: Tensor, state: StreamState) -> Tensor:
        """Frames (B, F, H, W, 3) in [0, 1] -> latents; the last frame fills up an odd four."""
        missing = -frames_BTHWC.shape[1] % FRAMES_PER_LATENT
        if missing:
            repeated = frames_BTHWC[:, -1:].expand(-1, missing, -1, -1, -1)
            frames_BTHWC = torch.cat([frames_BTHWC, repeated], dim=1)
        h = frames_BTHWC
        if self.patch == 2:
            h = as_patches(h, 2).permute(0, 1, 2, 4, 6, 3, 5).flatten(-3)
        return _run(self.encoder, h, state)


def _run(layers: Iterable[nn.Module], x_BTHWC: Tensor, state: StreamState) -> Tensor:
    for layer in layers:
        x_BTHWC = layer(x_BTHWC, state) if isinstance(layer, MemoryBlock) else layer(x_BTHWC)
    return x_BTHWC


def _encoder(pixels: int, dim: int, latent_channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = [FrameConv(pixels, dim, 3, padding=1), nn.ReLU(inplace=True)]
    for time in (2, 2, 1):
        layers += [
            Pool(dim, time),
            FrameConv(dim, dim, 3, stride=2, padding=1, bias=False),
            *(_block(dim) for _ in range(3)),
        ]
    return [*layers, FrameConv(dim, latent_channels, 3, padding=1)]


def _decoder(latent_channels: int, widths: Sequence[int], pixels: int) -> list[nn.Module]:
    layers: list[nn.Module] = [
        Squash(),
        FrameConv(latent_channels, widths[0], 3, padding=1),
        nn.ReLU(inplace=True),
    ]
    for before, after, time in zip(widths, widths[1:], (1, 2, 2), strict=False):
        layers += [
            *(_block(before) for _ in range(3)),
            Nearest2x(),
            Grow(before, time),
            FrameConv(before, after, 3, padding=1, bias=False),
        ]
    return [*layers, nn.ReLU(inplace=True), FrameConv(widths[-1], pixels, 3, padding=1)]


def _super_decoder(latent_channels: int, widths: Sequence[int], pixels: int) -> list[nn.Module]:
    layers: list[nn.Module] = [FrameConv(latent_channels, widths[0], 1, bias=False)]
    for before, after, time in zip(widths, widths[1:], (1, 2, 2), strict=False):
        layers += [
            *(_super_block(before) for _ in range(3)),
            FrameConv(before, 4 * after, 3, padding=1),
            nn.ReLU(inplace=True),
            PixelShuffle2x(),
            Grow(after, time),
        ]
    return [*layers, FrameConv(widths[-1], pixels, 3, padding=1)]
