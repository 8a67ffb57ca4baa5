"""FP8 e4m3 as every op here uses it: value = byte x scale, nearest even, clamped to +-448.

Scales are float32 on the device and never read by the host. Values beyond the range are clamped
and counted in a device counter (int32, one element), so that a scale that has become too small
shows as a number and not as a picture that is slightly wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from characters_kernels.triton_jit import INSTALLED, INTERPRETED, jit, tl

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
CAPABILITY = (8, 9)
"""The least compute capability of a GPU that multiplies e4m3."""

HEADROOM = 4.0
"""Largest value that a scale leaves room for, over the largest seen in calibration: a session's
first forward pass sees its prefix only. e4m3 keeps three bits of mantissa over 15 octaves, so that
is cheap: what lies 13 octaves below the largest is still a normal number."""


def computes_in_fp8(device: torch.device) -> bool:
    """GPUs that multiply e4m3, and CPUs through the references."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= CAPABILITY
    return device.type == "cpu"


def scale_for(largest: Tensor) -> Tensor:
    """Largest absolute values -> float32 scales that leave HEADROOM; 1 where nothing was seen."""
    scale = largest.float() * (HEADROOM / E4M3_MAX)
    return torch.where(scale > 0, scale, 1.0)


def quantise(x: Tensor, scale: Tensor, saturated: Tensor) -> Tensor:
    """x / scale as e4m3, in torch ops. scale broadcasts against x; saturated counts in place."""
    return to_e4m3(x.float() * (1.0 / scale), saturated)


def dequantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * scale).to(dtype)


def to_e4m3(x: Tensor, saturated: Tensor) -> Tensor:
    """float32 -> e4m3, clamped; what lies beyond the range is counted."""
    saturated += (x.abs() > E4M3_MAX).sum()
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def store_as(x: Tensor, scale: Tensor, out: Tensor, saturated: Tensor) -> None:
    """What every kernel's reference ends with: x into `out`, as FP8 over `scale` or as it is."""
    out.copy_(quantise(x, scale, saturated) if out.dtype == E4M3 else x)


# Triton 3.6's interpreter loses a rounding that carries into the exponent (127.9 becomes 64), so
# there the value is rounded to the grid before it is converted. Compiled code needs no help.
_INTERPRETED: Any = tl.constexpr(INTERPRETED) if INSTALLED else None
_num_threads: Any = tl.extra.cuda.num_threads if INSTALLED else None
_MAX: Any = tl.constexpr(E4M3_MAX) if INSTALLED else None


@jit
def store_block(x, scale, pointers, valid, saturated, FP8: tl.constexpr):
    """Stores a float32 block: as FP8 over `scale`, counting what is clamped, or as it is."""
    if FP8:
        x = tl.where(valid, x * (1.0 / scale), 0.0)
        _count_beyond(x, saturated)
        tl.store(pointers, as_e4m3(tl.minimum(tl.maximum(x, -_MAX), _MAX)), mask=valid)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=valid)


@jit
def _count_beyond(x, saturated):
    """Adds to `saturated` how many of x lie beyond +-448.

    Each thread looks at four values and jumps over the rest unless one is beyond. A sum over the
    block, which waits for all its warps, took 3.6 of 15.8 us of `residual_norm`, 1.3 of 9.6 of
    `gelu_quant` and 2.4 of 7.1 of `ring_store` on an H200; this takes 0.5 of each. Where threads
    hold fewer than four they may hold the same ones, and the interpreter knows no assembly.
    """
    if _INTERPRETED or x.numel < 4 * _num_threads():
        _add_sum(x, saturated)
    else:
        tl.inline_asm_elementwise(
            """
            {
                .reg .f32 a0, a1, a2, a3, largest, other;
                .reg .pred beyond;
                .reg .u32 one, count;
                abs.f32 a0, $4; abs.f32 a1, $5; abs.f32 a2, $6; abs.f32 a3, $7;
                max.f32 largest, a0, a1; max.f32 other, a2, a3;
                max.f32 largest, largest, other;
                setp.gt.f32 beyond, largest, 0f43E00000;
                mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
                @!beyond bra DONE;
                setp.gt.f32 beyond, a0, 0f43E00000; selp.u32 count, 1, 0, beyond;
                setp.gt.f32 beyond, a1, 0f43E00000; selp.u32 one, 1, 0, beyond;
                add.u32 count, count, one;
                setp.gt.f32 beyond, a2, 0f43E00000; selp.u32 one, 1, 0, beyond;
                add.u32 count, count, one;
                setp.gt.f32 beyond, a3, 0f43E00000; selp.u32 one, 1, 0, beyond;
                add.u32 count, count, one;
                red.global.add.u32 [$8], count;
            DONE:
            }
            """,
            "=r,=r,=r,=r,f,f,f,f,l,l,l,l",
            [x, saturated.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=4,
        )


@jit
def _add_sum(x, saturated):
    count = tl.sum(tl.ravel(tl.where(tl.abs(x) > _MAX, 1, 0)))
    tl.atomic_add(saturated, count, mask=count > 0)


@jit
def as_e4m3(x):
    """A float32 block within +-448 as e4m3."""
    if _INTERPRETED:
        x = _round_to_e4m3(x)
    return x.to(tl.float8e4nv)


@jit
def _round_to_e4m3(x):
    """Nearest even: 3 bits of mantissa, and steps of 2^-9 below 2^-6."""
    bits = x.to(tl.int32, bitcast=True)
    kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + 24576.0) - 24576.0  # 1.5 x 2^14: float32 there has steps of 2^-9
    return tl.where(tl.abs(x) < 0.015625, small, kept.to(tl.float32, bitcast=True))
