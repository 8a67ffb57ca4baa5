"""Residual + gate, LayerNorm, modulate and convert: what lies between two blocks' matmuls.

    x          (S, D)       bf16 or float32, written: x + gate * branch, if there is a branch
    branch     (>= S, D)    the block's out-projection, or None; rows past S are padding
    gate, scale, shift (D,) adaLN of the block that ends (gate) and of the one that begins
    out        (>= S, D)    written: rows 0..S of LayerNorm(x) * scale + shift, as its dtype says;
                            e4m3 over out_scale (one float32 element), or a float format
    saturated  (1,)         int32, counts values clamped to e4m3's range

The norm is taken of the float32 sum, before it is rounded into x.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from characters_kernels.fp8 import E4M3, store_as, store_block
from characters_kernels.triton_jit import jit, next_power_of_two, tl

_WARPS = 8


def residual_norm_reference(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    out_scale: Tensor,
    out: Tensor,
    saturated: Tensor,
) -> None:
    tokens, dim = x.shape
    total = x.float()
    if branch is not None and gate is not None:
        total = total + gate.float() * branch[:tokens].float()
        x.copy_(total)
    normed = functional.layer_norm(total, (dim,), eps=eps)
    store_as(normed * scale.float() + shift.float(), out_scale, out[:tokens], saturated)


@jit
def _residual_norm_kernel(
    x,
    branch,
    gate,
    scale,
    shift,
    out_scale,
    out,
    saturated,
    dim,
    eps,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program: one token, as its first HEAD columns and the rest (TAIL and more would fit)."""
    row = tl.program_id(0) * dim
    head = tl.arange(0, HEAD)
    tail = HEAD + tl.arange(0, TAIL)
    in_head, in_tail = head < dim, tail < dim
    first = _residual(x + row, branch + row, gate, head, in_head, RESIDUAL)
    rest = _residual(x + row, branch + row, gate, tail, in_tail, RESIDUAL)
    mean = (tl.sum(first, 0) + tl.sum(rest, 0)) / dim
    first = tl.where(in_head, first - mean, 0.0)
    rest = tl.where(in_tail, rest - mean, 0.0)
    variance = (tl.sum(first * first, 0) + tl.sum(rest * rest, 0)) / dim
    inverse = tl.rsqrt(variance + eps)
    first = _modulate(first * inverse, scale, shift, head, in_head)
    rest = _modulate(rest * inverse, scale, shift, tail, in_tail)
    over = tl.load(out_scale)
    store_block(first, over, out + row + head, in_head, saturated, FP8)
    store_block(rest, over, out + row + tail, in_tail, saturated, FP8)


@jit
def _residual(x, branch, gate, columns, valid, RESIDUAL: tl.constexpr):
    """x + gate * branch, stored into x and returned in float32; x without a branch."""
    total = tl.load(x + columns, mask=valid, other=0.0).to(tl.float32)
    if RESIDUAL:
        added = tl.load(branch + columns, mask=valid, other=0.0).to(tl.float32)
        total += tl.load(gate + columns, mask=valid, other=0.0).to(tl.float32) * added
        tl.store(x + columns, total.to(x.dtype.element_ty), mask=valid)
    return total


@jit
def _modulate(normed, scale, shift, columns, valid):
    scaled = normed * tl.load(scale + columns, mask=valid, other=0.0).to(tl.float32)
    return scaled + tl.load(shift + columns, mask=valid, other=0.0).to(tl.float32)


def residual_norm_triton(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    out_scale: Tensor,
    out: Tensor,
    saturated: Tensor,
    *,
    num_warps: int = _WARPS,
) -> None:
    tokens, dim = x.shape
    for name, tensor in (("x", x), ("branch", branch), ("out", out)):
        if tensor is not None and (not tensor.is_contiguous() or tensor.shape[1] != dim):
            raise ValueError(f"{name} must be contiguous, with {dim} columns")
    if out.shape[0] < tokens or (branch is not None and branch.shape[0] < tokens):
        raise ValueError(f"branch and out must have at least x's {tokens} rows")
    if (branch is None) != (gate is None):
        raise ValueError("branch and gate are given together")
    for vector in (gate, scale, shift):
        if vector is not None and vector.shape != (dim,):
            raise ValueError(f"gate, scale and shift must be ({dim},), not {tuple(vector.shape)}")
    # Blocks have powers of two of elements. A width is seldom one, but often the sum of two: 9,216
    # columns in one block of 16,384 took 29.2 us a call on an H200, as 8,192 and 1,024 20.4.
    head = 1 << dim.bit_length() - 1
    _residual_norm_kernel[(tokens,)](
        x,
        x if branch is None else branch,
        scale if gate is None else gate,
        scale,
        shift,
        out_scale,
        out,
        saturated,
        dim,
        eps,
        HEAD=head,
        TAIL=next_power_of_two(max(1, dim - head)),
        RESIDUAL=branch is not None,
        FP8=out.dtype == E4M3,
        num_warps=num_warps,
    )


@torch.library.custom_op(
    "characters::residual_norm", mutates_args=("x", "out", "saturated"), device_types="cuda"
)
def residual_norm(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    out_scale: Tensor,
    out: Tensor,
    saturated: Tensor,
) -> None:
    residual_norm_triton(x, branch, gate, scale, shift, eps, out_scale, out, saturated)


residual_norm.register_kernel("cpu")(residual_norm_reference)


@residual_norm.register_fake
def _(x, branch, gate, scale, shift, eps, out_scale, out, saturated):
    return None
