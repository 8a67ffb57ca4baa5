"""Attention's output and the MLP's half, side by side in the out-projection's input.

attended   (S, A)         bf16 or float32, rows at any stride
mlp        (>= S, M)      the in-projection's last columns, rows at any stride; GELU (tanh form)
out        (>= S, A + M)  written: rows 0..S of [attended | gelu(mlp)], e4m3 over out_scale
                          (one float32 element: the two halves share one matmul), or a float
saturated  (1,)           int32, counts values clamped to e4m3's range
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from characters_kernels.fp8 import E4M3, store_as, store_block
from characters_kernels.triton_jit import jit, tl

_COLUMNS_PER_PROGRAM = 2048


def gelu_quant_reference(
    attended: Tensor, mlp: Tensor, out_scale: Tensor, out: Tensor, saturated: Tensor
) -> None:
    tokens = attended.shape[0]
    activated = functional.gelu(mlp[:tokens].float(), approximate="tanh")
    joined = torch.cat([attended.float(), activated], -1)
    store_as(joined, out_scale, out[:tokens], saturated)


@jit
def _gelu_quant_kernel(
    attended,
    mlp,
    out_scale,
    out,
    saturated,
    attended_stride,
    mlp_stride,
    inner,
    total,
    COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program: COLUMNS columns of one token. A masked load moves nothing."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = columns < total
    from_attention = columns < inner
    x = tl.load(attended + row * attended_stride + columns, mask=from_attention, other=0.0)
    source = mlp + row * mlp_stride + (columns - inner)
    u = tl.load(source, mask=valid & (columns >= inner), other=0.0).to(tl.float32)
    # 0.5 u (1 + tanh(z)) = u sigmoid(2 z), z = sqrt(2 / pi) (u + 0.044715 u^3)
    activated = u * tl.sigmoid(1.5957691216057308 * (u + 0.044715 * u * u * u))
    joined = tl.where(from_attention, x.to(tl.float32), activated)
    store_block(joined, tl.load(out_scale), out + row * total + columns, valid, saturated, FP8)


def gelu_quant_triton(
    attended: Tensor,
    mlp: Tensor,
    out_scale: Tensor,
    out: Tensor,
    saturated: Tensor,
    *,
    columns_per_program: int = _COLUMNS_PER_PROGRAM,
) -> None:
    tokens, inner = attended.shape
    total = inner + mlp.shape[1]
    if mlp.shape[0] < tokens or out.shape[0] < tokens or out.shape[1] != total:
        raise ValueError(f"out {tuple(out.shape)} does not fit {tokens} rows of {total} columns")
    if attended.stride(1) != 1 or mlp.stride(1) != 1 or not out.is_contiguous():
        raise ValueError("attended and mlp must be contiguous along their columns, out throughout")
    _gelu_quant_kernel[(tokens, -(-total // columns_per_program))](
        attended,
        mlp,
        out_scale,
        out,
        saturated,
        attended.stride(0),
        mlp.stride(0),
        inner,
        total,
        COLUMNS=columns_per_program,
        FP8=out.dtype == E4M3,
    )


@torch.library.custom_op(
    "characters::gelu_quant", mutates_args=("out", "saturated"), device_types="cuda"
)
def gelu_quant(
    attended: Tensor, mlp: Tensor, out_scale: Tensor, out: Tensor, saturated: Tensor
) -> None:
    gelu_quant_triton(attended, mlp, out_scale, out, saturated)


gelu_quant.register_kernel("cpu")(gelu_quant_reference)


@gelu_quant.register_fake
def _(attended, mlp, out_scale, out, saturated):
    return None
