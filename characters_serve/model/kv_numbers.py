"""The number format of cached keys and values, and the attention that reads it.

In: q, k, v of a block in the model's format. Out: the same packed, and attention over packed ones.
Knows nothing of slots, positions or sessions.

Letters: B batch, S tokens, H heads, D head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from characters_kernels.attention import backend, fp8_attention
from characters_kernels.fp8 import E4M3, dequantise, quantise, scale_for
from characters_serve.config import ConfigError, ModelConfig, Optimizations
from characters_serve.model.attention import attention


class Numbers(Protocol):
    """dtype: of what is cached; model_dtype: of what comes in and goes out."""

    dtype: torch.dtype
    model_dtype: torch.dtype
    scales_QKV: Tensor
    """(3, blocks, H) float32: of q, k and v. Ones where the format needs none."""

    def calibrate(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Takes the scales of one block from its q, k, v (B, S, H, D)."""

    def pack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        """From the model's format to the cache's."""

    def unpack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        """And back."""

    def attend(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All packed, (B, S, H, D) -> (B, S, H x D) in the model's format."""


class FloatNumbers:
    def __init__(self, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = self.model_dtype = dtype
        self.scales_QKV = torch.ones(3, model.num_blocks, model.num_heads, device=device)

    def calibrate(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        pass

    def pack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        return x_BSHD

    def unpack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        return x_BSHD

    def attend(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)


class Fp8Numbers:
    """e4m3 with one scale a head for each of q, k and v, set once a session.

    A rotation may lengthen a component by up to the square root of two, within the headroom.
    """

    dtype = E4M3

    def __init__(
        self, model: ModelConfig, device: torch.device, dtype: torch.dtype, saturated: Tensor
    ) -> None:
        self.scales_QKV = torch.ones(3, model.num_blocks, model.num_heads, device=device)
        try:
            self.attention_backend = backend(device)
        except ValueError as error:
            raise ConfigError(f"optimizations.fp8_kv_cache: {error}") from None
        self._attention = fp8_attention(self.attention_backend)
        self.model_dtype = dtype
        self._saturated = saturated

    def calibrate(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        for scales, x in zip(self.scales_QKV[:, block], (q, k, v), strict=True):
            scales.copy_(scale_for(x.abs().amax((0, 1, 3))))

    def pack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        return quantise(x_BSHD, scale_H[:, None], self._saturated)

    def unpack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        return dequantise(x_BSHD, scale_H[:, None], self.model_dtype)

    def attend(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scales = self.scales_QKV[:, block]
        sessions = [self._attention(*qkv, *scales) for qkv in zip(q, k, v, strict=True)]
        # One session, as in serving, is not copied.
        attended = sessions[0][None] if len(sessions) == 1 else torch.stack(sessions)
        return attended.flatten(-2).to(self.model_dtype)


def make_numbers(
    model: ModelConfig,
    optimizations: Optimizations,
    device: torch.device,
    dtype: torch.dtype,
    saturated: Tensor,
) -> Numbers:
    if optimizations.fp8_kv_cache:
        return Fp8Numbers(model, device, dtype, saturated)
    return FloatNumbers(model, device, dtype)
