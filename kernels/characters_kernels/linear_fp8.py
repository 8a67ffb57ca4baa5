"""FP8 matmul of the projections, per-tensor scales, float32 accumulation.

    x        (M, K)  e4m3, row-major
    weight   (N, K)  e4m3, row-major (Hopper multiplies FP8 with both operands contiguous in K)
    x_scale, weight_scale    one float32 element each
    bias     (N,)    or None, in the format of what is returned; added before that is rounded
    returns  (M, N)  bf16 or float32

`linear_fp8` is the library's matmul (cuBLASLt through torch, fast accumulation: 1.2 to 1.3
PFLOP/s on an H200 at 757 rows). `linear_fp8_tiled` is a Triton tile of its own, to be chosen by
name where it measures faster. K and N must be multiples of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from characters_kernels.fp8 import E4M3
from characters_kernels.triton_jit import jit, tl

_ROWS, _COLUMNS, _DEPTH, _GROUP = 128, 256, 128, 8


def linear_fp8_reference(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    product = (x.float() @ weight.float().T) * (x_scale * weight_scale)
    return (product if bias is None else product + bias.float()).to(dtype)


@torch.library.custom_op("characters::linear_fp8", mutates_args=(), device_types="cuda")
def linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    # The library adds a bias to half-width outputs only.
    within = None if dtype == torch.float32 else bias
    product = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale,
        scale_b=weight_scale,
        bias=within,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return product if within is bias or bias is None else product.add_(bias)


linear_fp8.register_kernel("cpu")(linear_fp8_reference)


@linear_fp8.register_fake
def _(x, weight, x_scale, weight_scale, dtype, bias=None):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@jit
def _linear_kernel(
    x,
    weight,
    x_scale,
    weight_scale,
    out,
    rows,
    columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: one output tile. Tiles go down GROUP row blocks first, to share weights."""
    row_tiles = tl.cdiv(rows, ROWS)
    per_group = GROUP * tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0) // per_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + tl.program_id(0) % per_group % height
    column_tile = tl.program_id(0) % per_group // height
    m = row_tile * ROWS + tl.arange(0, ROWS)
    n = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_pointers = x + m[:, None] * depth + k[None, :]
    w_pointers = weight + n[None, :].to(tl.int64) * depth + k[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        within = start + k < depth
        a = tl.load(x_pointers + start, mask=(m < rows)[:, None] & within[None, :], other=0.0)
        b = tl.load(w_pointers + start, mask=(n < columns)[None, :] & within[:, None], other=0.0)
        total = tl.dot(a, b, total)
    total *= tl.load(x_scale) * tl.load(weight_scale)
    pointers = out + m[:, None] * columns + n[None, :]
    valid = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=valid)


def linear_fp8_triton(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    tile: tuple[int, int, int] = (_ROWS, _COLUMNS, _DEPTH),
    *,
    num_warps: int = 8,
    num_stages: int = 3,
) -> Tensor:
    (rows, depth), columns = x.shape, weight.shape[0]
    if x.dtype != E4M3 or weight.dtype != E4M3 or weight.shape[1] != depth:
        raise ValueError("x (M, K) and weight (N, K) must be e4m3")
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError("x and weight must be contiguous")
    out = torch.empty((rows, columns), device=x.device, dtype=dtype)
    grid = (-(-rows // tile[0]) * -(-columns // tile[1]),)
    _linear_kernel[grid](
        x,
        weight,
        x_scale,
        weight_scale,
        out,
        rows,
        columns,
        depth,
        ROWS=tile[0],
        COLUMNS=tile[1],
        DEPTH=tile[2],
        GROUP=_GROUP,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


@torch.library.custom_op("characters::linear_fp8_tiled", mutates_args=(), device_types="cuda")
def linear_fp8_tiled(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    return linear_fp8_triton(x, weight, x_scale, weight_scale, dtype)


linear_fp8_tiled.register_kernel("cpu")(linear_fp8_reference)


@linear_fp8_tiled.register_fake
def _(x, weight, x_scale, weight_scale, dtype):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)
