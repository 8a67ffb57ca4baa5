"""What causal video networks remember between chunks, and how their convolutions see frames.

Letters: B batch, T frames, H, W the layer's own grid, C channels. Activations are (B, T, H, W, C):
one position's channels are one run of memory, which convolutions on a GPU want, and so are the
frames of a stream, which lets a past be put in front of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FRAMES_PER_LATENT = 4


class StreamState:
    """What one stream's decoding (or encoding) remembers: the last input frames of its layers.

    The caller holds one for each stream. It is advanced in place, so that its memory never grows
    and a captured decode finds it where it was; a stream cannot be continued from an older point.
    `started` is false until the first latent has passed: some layers treat that one differently.
    """

    def __init__(self) -> None:
        self.started = False
        self._past: dict[nn.Module, Tensor] = {}

    def past(self, layer: nn.Module, x_BTHWC: Tensor, num_frames: int) -> Tensor:
        """The layer's own memory (B, num_frames, H, W, C); zeros when a stream begins."""
        if layer not in self._past:
            batch, _, *rest = x_BTHWC.shape
            self._past[layer] = x_BTHWC.new_zeros(batch, num_frames, *rest)
        return self._past[layer]

    def clear(self) -> None:
        """Forgets the stream, and keeps the memory for the next one of the same size."""
        self.started = False
        for past in self._past.values():
            past.zero_()

    @property
    def num_bytes(self) -> int:
        return sum(past.numel() * past.element_size() for past in self._past.values())


@torch.no_grad()
def lay_out_channels_last(network: nn.Module) -> None:
    """Weights of convolutions as activations are: channels innermost."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in network.parameters():
        if parameter.ndim in formats:
            parameter.data = parameter.contiguous(memory_format=formats[parameter.ndim])


def after_past(past_BTHWC: Tensor, x_BTHWC: Tensor) -> Tensor:
    """past, then x, in one buffer; past becomes the buffer's last frames."""
    padded = torch.cat([past_BTHWC, x_BTHWC], dim=1)
    past_BTHWC.copy_(padded[:, -past_BTHWC.shape[1] :])
    return padded


class FrameConv(nn.Conv2d):
    """A convolution of each frame by itself, on (B, T, H, W, C)."""

    def forward(self, x_BTHWC: Tensor) -> Tensor:
        y = super().forward(x_BTHWC.flatten(0, 1).permute(0, 3, 1, 2))
        return torch.unflatten(y.permute(0, 2, 3, 1), 0, x_BTHWC.shape[:2])


def as_patches(x_BTHWC: Tensor, side: int) -> Tensor:
    """A view of the picture's squares: (B, T, H side, W side, C) -> (B, T, H, side, W, side, C)."""
    return torch.unflatten(torch.unflatten(x_BTHWC, 3, (-1, side)), 2, (-1, side))


def nearest_2x(x_HWC: Tensor) -> Tensor:
    """Each pixel four times: (..., H, W, C) -> (..., 2H, 2W, C), in one copy."""
    *leading, height, width, channels = x_HWC.shape
    repeated = x_HWC[..., None, :, None, :].expand(*leading, height, 2, width, 2, channels)
    return repeated.reshape(*leading, 2 * height, 2 * width, channels)
