"""The reference image as identity tokens: the part of the prefix that says who the character is.

In: image (B, 3, height, width) in [0, 1]. Out: (B, reference_tokens, dim).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig

_FIRST_STRIDE = 4
_WIDEST = 192


class ResidualBlock(nn.Module):
    """Channel RMS norm and two 3x3 convolutions around a skip. (B, C, H, W) -> same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(channels))
        self.conv_in = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv_out = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.normal_(self.conv_out.weight, std=0.1 * (9 * channels) ** -0.5)
        nn.init.zeros_(self.conv_out.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.float().square().mean(1, keepdim=True)
        scale = torch.rsqrt(mean_square + 1e-5).to(x.dtype) * self.norm[:, None, None].to(x.dtype)
        out: Tensor = x + self.conv_out(functional.silu(self.conv_in(x * scale)))
        return out


class ImageEncoder(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        channels = 32
        layers: list[nn.Module] = [
            nn.PixelUnshuffle(_FIRST_STRIDE),
            nn.Conv2d(3 * _FIRST_STRIDE**2, channels, 3, padding=1),
            ResidualBlock(channels),
        ]
        stride = _FIRST_STRIDE
        while stride < model.reference_stride:
            wider = min(channels * 2, _WIDEST)
            layers += [nn.Conv2d(channels, wider, 4, stride=2, padding=1), ResidualBlock(wider)]
            channels, stride = wider, stride * 2
        layers += [nn.SiLU(), nn.Conv2d(channels, model.dim, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        tokens: Tensor = self.layers(image * 2 - 1)
        return tokens.flatten(2).transpose(1, 2)
