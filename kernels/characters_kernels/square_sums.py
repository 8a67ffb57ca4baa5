"""Sums of squares of a chunk's whole q and k, for norms over the model's width.

    projected  (>= S, >= 2 W)  bf16 or float32, columns | q | k | ...; rows at any stride
    width      int             W, columns of q, and of k
    out        (S, 2)          float32, written: of q, of k

What a tensor-parallel rank finds is a partial sum: it has some of the heads. `ring_store` norms
with the sum over all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from characters_kernels.triton_jit import jit, next_power_of_two, tl

_WARPS = 8


def square_sums_reference(projected: Tensor, width: int, out: Tensor) -> None:
    q_and_k = projected[: len(out), : 2 * width].float().unflatten(-1, (2, width))
    out.copy_(q_and_k.square().sum(-1))


@jit
def _square_sums_kernel(projected, out, row_stride, width, COLUMNS: tl.constexpr):
    """One program: q or k of one token."""
    row, which = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    source = projected + row * row_stride + which * width + columns
    x = tl.load(source, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(out + row * 2 + which, tl.sum(x * x, 0))


def square_sums_triton(projected: Tensor, width: int, out: Tensor) -> None:
    tokens = len(out)
    if projected.shape[0] < tokens or projected.shape[1] < 2 * width or projected.stride(1) != 1:
        raise ValueError(f"projected {tuple(projected.shape)} does not hold {tokens} x 2 x {width}")
    if out.shape != (tokens, 2) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out must be float32 (S, 2), contiguous, not {tuple(out.shape)}")
    _square_sums_kernel[(tokens, 2)](
        projected,
        out,
        projected.stride(0),
        width,
        COLUMNS=next_power_of_two(width),
        num_warps=_WARPS,
    )


@torch.library.custom_op("characters::square_sums", mutates_args=("out",), device_types="cuda")
def square_sums(projected: Tensor, width: int, out: Tensor) -> None:
    square_sums_triton(projected, width, out)


square_sums.register_kernel("cpu")(square_sums_reference)


@square_sums.register_fake
def _(projected, width, out):
    return None
