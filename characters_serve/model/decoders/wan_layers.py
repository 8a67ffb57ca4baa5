"""The Wan video VAEs' common parts: causal layers, and the autoencoder around its stages.

In: normalised latents (B, T, h, w, C), or frames (B, T, H, W, 3) from -1 to 1. Out: the other.
The networks are those of the public Wan2.1 and Wan2.2 code (github.com/Wan-Video, Apache-2.0;
arXiv 2503.20314), with their checkpoints' parameter names; wan21.py and wan22.py have the stages.

Letters: B batch, T frames, H, W the layer's own grid, C channels.

The first latent of a stream stands for one frame, every later one for four: layers that change
the number of frames leave the first alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.model.decoders.stream import (
    FRAMES_PER_LATENT,
    FrameConv,
    StreamState,
    after_past,
    as_patches,
    nearest_2x,
)

_NORM_EPS = 1e-12


class ChannelNorm(nn.Module):
    """The gain of a norm over channels, in the checkpoint's shape (C, 1, 1, 1) or (C, 1, 1)."""

    def __init__(self, channels: int, num_axes: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *[1] * num_axes))


def channel_norm(x_BTHWC: Tensor, gamma: Tensor) -> Tensor:
    """x / |x| x sqrt(C) x gamma over each position's channels; the length in float32."""
    wide = torch.promote_types(x_BTHWC.dtype, torch.float32)
    length: Tensor = torch.linalg.vector_norm(x_BTHWC, dim=-1, keepdim=True, dtype=wide)
    scale: Tensor = x_BTHWC.shape[-1] ** 0.5 / length.clamp_min(_NORM_EPS)
    return x_BTHWC * scale.to(x_BTHWC.dtype) * gamma.flatten()


def norm_silu_after_past(past_BTHWC: Tensor, x_BTHWC: Tensor, gamma: Tensor) -> Tensor:
    """What every 3 x 3 x 3 convolution reads: its past, then silu(norm(x)), in one buffer.

    past (B, 2, H, W, C) becomes the buffer's last frames. All of the decoder's elementwise work on
    full-size activations is here, so that one kernel can stand for it: x read once, the buffer
    written once.
    """
    past_frames, frames = past_BTHWC.shape[1], x_BTHWC.shape[1]
    batch, _, *rest = x_BTHWC.shape
    padded = x_BTHWC.new_empty(batch, past_frames + frames, *rest)
    padded[:, :past_frames] = past_BTHWC
    padded[:, past_frames:] = functional.silu(channel_norm(x_BTHWC, gamma), inplace=True)
    past_BTHWC.copy_(padded[:, -past_frames:])
    return padded


class CausalConv(nn.Conv3d):
    """A convolution over its own input's past and present frames; space is padded with zeros."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int, int] = (3, 3, 3),
        time_stride: int = 1,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel,
            stride=(time_stride, 1, 1),
            padding=(0, kernel[1] // 2, kernel[2] // 2),
        )
        self.past_frames = kernel[0] - time_stride

    def forward(  # type: ignore[override]  # its keys are a convolution's, its past comes beside
        self, x_BTHWC: Tensor, state: StreamState
    ) -> Tensor:
        past = state.past(self, x_BTHWC, self.past_frames)
        return self.on_padded(after_past(past, x_BTHWC))

    def on_padded(self, padded_BTHWC: Tensor) -> Tensor:
        """x with its past in front."""
        y = super().forward(padded_BTHWC.permute(0, 4, 1, 2, 3))
        return y.permute(0, 2, 3, 4, 1)


def pointwise(conv: nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """A 1 x 1 convolution as the matrix product that it is with channels last."""
    return functional.linear(x, conv.weight.flatten(1), conv.bias)


def norm_conv(norm: ChannelNorm, conv: CausalConv, x_BTHWC: Tensor, state: StreamState) -> Tensor:
    past = state.past(conv, x_BTHWC, conv.past_frames)
    return conv.on_padded(norm_silu_after_past(past, x_BTHWC, norm.gamma))


class Layer(nn.Module):
    """Whatever stands in a stage: (B, T, H, W, C) and the stream's state -> the same layout."""

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        raise NotImplementedError


class ResidualBlock(Layer):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        first = (ChannelNorm(in_channels), CausalConv(in_channels, out_channels))
        second = (ChannelNorm(out_channels), CausalConv(out_channels, out_channels))
        # Numbered as in the checkpoints, whose lists also count activations and a dropout.
        self.residual = nn.ModuleDict(
            {"0": first[0], "2": first[1], "3": second[0], "6": second[1]}
        )
        self.halves = (first, second)
        self.shortcut = (
            None if in_channels == out_channels else nn.Conv3d(in_channels, out_channels, 1)
        )

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        h = x_BTHWC
        for norm, conv in self.halves:
            h = norm_conv(norm, conv, h, state)
        return h + (x_BTHWC if self.shortcut is None else pointwise(self.shortcut, x_BTHWC))


class Head(Layer):
    """The last norm, SiLU and convolution, numbered as in the checkpoints."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm_conv = (ChannelNorm(in_channels), CausalConv(in_channels, out_channels))
        self.add_module("0", self.norm_conv[0])
        self.add_module("2", self.norm_conv[1])

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        return norm_conv(*self.norm_conv, x_BTHWC, state)


class FrameAttention(Layer):
    """One head over the pixels of one frame; frames do not see each other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels, num_axes=2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        h = pointwise(self.to_qkv, channel_norm(x_BTHWC, self.norm.gamma))
        q, k, v = h.flatten(2, 3).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(q, k, v).view_as(x_BTHWC)
        return x_BTHWC + pointwise(self.proj, attended)


class Upsample(Layer):
    """Twice the height and width, and the frames too where the stage doubles time."""

    def __init__(self, in_channels: int, out_channels: int, doubles_time: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": FrameConv(in_channels, out_channels, 3, padding=1)})
        self.time_conv = (
            CausalConv(in_channels, 2 * in_channels, (3, 1, 1)) if doubles_time else None
        )

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        upsampled = nearest_2x(self.in_time(x_BTHWC, state)).flatten(1, 2)
        frames: Tensor = self.resample["1"](upsampled)
        return frames

    def in_time(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        """What each frame becomes: (B, T, 1 or 2, H, W, C)."""
        # The first latent stays one frame, and leaves nothing behind for the second to see.
        if self.time_conv is None or not state.started:
            return x_BTHWC[:, :, None]
        pairs = torch.unflatten(self.time_conv(x_BTHWC, state), -1, (2, -1))
        return pairs.movedim(-2, 2)


class Downsample(Layer):
    """Half the height and width, and of the frames too where the stage halves time."""

    def __init__(self, channels: int, halves_time: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": FrameConv(channels, channels, 3, stride=2)})
        self.time_conv = (
            CausalConv(channels, channels, (3, 1, 1), time_stride=2) if halves_time else None
        )

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        h: Tensor = self.resample["1"](functional.pad(x_BTHWC, (0, 0, 0, 1, 0, 1)))
        if self.time_conv is None:
            return h
        if not state.started:
            state.past(self.time_conv, h, 1).copy_(h[:, -1:])
            return h
        halved: Tensor = self.time_conv(h, state)
        return halved


class Coder(Layer):
    """An encoder or a decoder: a convolution, stages, a middle (before or after them), a head."""

    def __init__(
        self,
        in_channels: int,
        first_channels: int,
        middle_channels: int,
        head_channels: int,
        out_channels: int,
    ) -> None:
        super().__init__()
        self.conv1 = CausalConv(in_channels, first_channels)
        self.middle = nn.ModuleList(
            [
                ResidualBlock(middle_channels, middle_channels),
                FrameAttention(middle_channels),
                ResidualBlock(middle_channels, middle_channels),
            ]
        )
        self.head: Layer = Head(head_channels, out_channels)

    def _run(self, layers: Iterable[nn.Module], x_BTHWC: Tensor, state: StreamState) -> Tensor:
        h: Tensor = self.conv1(x_BTHWC, state)
        for layer in layers:
            h = layer(h, state)
        frames: Tensor = self.head(h, state)
        return frames


class Encoder(Coder):
    """stages take dim channels; the last ends with `widest`."""

    def __init__(
        self, in_channels: int, dim: int, widest: int, z: int, stages: Sequence[Layer]
    ) -> None:
        super().__init__(in_channels, dim, widest, widest, 2 * z)
        self.downsamples = nn.ModuleList(stages)

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        return self._run([*self.downsamples, *self.middle], x_BTHWC, state)


class Decoder(Coder):
    """stages take `widest` channels; the last ends with dim."""

    def __init__(
        self, z: int, widest: int, dim: int, out_channels: int, stages: Sequence[Layer]
    ) -> None:
        super().__init__(z, widest, widest, dim, out_channels)
        self.upsamples = nn.ModuleList(stages)

    def forward(self, x_BTHWC: Tensor, state: StreamState) -> Tensor:
        return self._run([*self.middle, *self.upsamples], x_BTHWC, state)


class WanVAE(nn.Module):
    """patch: pixels of a side that are folded into channels. mean, std: of each latent channel."""

    darkest = -1.0
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        mean: Sequence[float],
        std: Sequence[float],
        patch: int,
    ) -> None:
        super().__init__()
        z = len(mean)
        self.patch = patch
        self.encoder = encoder
        self.decoder: Layer = decoder
        self.conv1 = nn.Conv3d(2 * z, 2 * z, 1)
        self.conv2 = nn.Conv3d(z, z, 1)
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def decode(self, latents_BTHWC: Tensor, state: StreamState) -> Tensor:
        """Normalised latents (B, T, h, w, z) -> frames (B, F, H, W, 3), about -1 to 1, not clamped.

        F is 4 T, or 4 T - 3 at the start of a stream.
        """
        z = pointwise(self.conv2, latents_BTHWC * self.std + self.mean)
        if not state.started:
            first = self._unfold(self.decoder(z[:, :1], state))
            state.started = True
            if z.shape[1] == 1:
                return first
            return torch.cat([first, self._unfold(self.decoder(z[:, 1:], state))], dim=1)
        return self._unfold(self.decoder(z, state))

    def encode(self, frames_BTHWC: Tensor, state: StreamState) -> Tensor:
        """Frames (B, F, H, W, 3) from -1 to 1 -> normalised latents, the mean of the posterior.

        F is a multiple of 4, or 1 + a multiple of 4 at the start of a stream.
        """
        alone = [] if state.started else [1]
        fours, left = divmod(frames_BTHWC.shape[1] - len(alone), FRAMES_PER_LATENT)
        if left:
            raise ValueError(
                f"{frames_BTHWC.shape[1]} frames are not {len(alone)} and a multiple of "
                f"{FRAMES_PER_LATENT}"
            )
        chunks = torch.split(self._fold(frames_BTHWC), alone + [FRAMES_PER_LATENT] * fours, dim=1)
        moments = []
        for chunk in chunks:
            moments.append(self.encoder(chunk, state))
            state.started = True
        mean, _log_variance = pointwise(self.conv1, torch.cat(moments, dim=1)).chunk(2, dim=-1)
        return (mean - self.mean) / self.std

    def _fold(self, frames_BTHWC: Tensor) -> Tensor:
        """Pixels into channels, (colour, column, row) from slowest to fastest."""
        patches = as_patches(frames_BTHWC, self.patch)
        return patches.permute(0, 1, 2, 4, 6, 5, 3).flatten(-3)

    def _unfold(self, x_BTHWC: Tensor) -> Tensor:
        h = torch.unflatten(x_BTHWC, -1, (3, self.patch, self.patch))
        return h.permute(0, 1, 2, 6, 3, 5, 4).flatten(4, 5).flatten(2, 3)
