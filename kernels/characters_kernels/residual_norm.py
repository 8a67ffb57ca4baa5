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

_WARPS = 16


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
    COLUMNS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program: one token."""
    columns = tl.arange(0, COLUMNS)
    valid = columns < dim
    row = tl.program_id(0) * dim + columns
    total = tl.load(x + row, mask=valid, other=0.0).to(tl.float32)
    if RESIDUAL:
        added = tl.load(branch + row, mask=valid, other=0.0).to(tl.float32)
        total += tl.load(gate + columns, mask=valid, other=0.0).to(tl.float32) * added
        tl.store(x + row, total.to(x.dtype.element_ty), mask=valid)
    centred = tl.where(valid, total - tl.sum(total, 0) / dim, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / dim + eps)
    normed = normed * tl.load(scale + columns, mask=valid, other=0.0).to(tl.float32)
    normed += tl.load(shift + columns, mask=valid, other=0.0).to(tl.float32)
    store_block(normed, tl.load(out_scale), out + row, valid, saturated, FP8)


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
        COLUMNS=next_power_of_two(dim),
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
