"""A chunk's q, k, v on their way from the in-projection: norm, rotate, convert, store in the ring.

Letters: S tokens of a chunk, H heads, D head dim, L slots of a cache.

    projected  (S, >= 3 H D)   bf16 or float32, columns | q | k | v | ...; rows at any stride
    q_weight, k_weight  (D,)   weights of the per-head RMS norms; (H D,) where square_sums is given
    cos, sin   (S, D/2)        float32, of the chunk's rotary angles; dim i turns with i + D/2
    slot       ()              int64, the chunk's first slot
    q_scale, k_scale, v_scale  (H,) float32; unused where the output is not e4m3
    q_out      (S, H, D)       written: the rotated queries
    k_cache, v_cache (L, H, D) written: slots slot .. slot + S; e4m3 or a float format, as q_out
    saturated  (1,)            int32, counts values clamped to e4m3's range
    square_sums (S, 2)         float32 or None: of each token's whole q and k, over all heads (and
                               all tensor-parallel ranks), where the norm is over the whole width
    width      int             of which that many elements were summed

Slot and angles are device tensors, so one captured graph serves every step. Keys are rotated at
write, so slots may lie in any order: softmax attention sums over keys in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from characters_kernels.fp8 import E4M3, store_as, store_block
from characters_kernels.triton_jit import jit, tl

_TOKENS_PER_PROGRAM = 16


def ring_store_reference(
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    eps: float,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    saturated: Tensor,
    square_sums: Tensor | None = None,
    width: int = 0,
) -> None:
    tokens, heads, head_dim = q_out.shape
    inner = heads * head_dim
    q, k, v = (
        part.float().unflatten(-1, (heads, head_dim))
        for part in projected[:tokens, : 3 * inner].split(inner, dim=-1)
    )

    def normalised_and_rotated(x: Tensor, weight: Tensor, which: int) -> Tensor:
        if square_sums is None:
            mean_square = x.square().mean(-1, keepdim=True)
        else:
            mean_square = square_sums[:, which, None, None] / width
        x = x * torch.rsqrt(mean_square + eps) * weight.float().view(-1, head_dim)
        first, second = x.chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([first * c - second * s, first * s + second * c], -1)

    slots = slice(int(slot), int(slot) + tokens)
    store_as(normalised_and_rotated(q, q_weight, 0), q_scale[:, None], q_out, saturated)
    store_as(normalised_and_rotated(k, k_weight, 1), k_scale[:, None], k_cache[slots], saturated)
    store_as(v, v_scale[:, None], v_cache[slots], saturated)


@jit
def _ring_store_kernel(
    projected,
    q_weight,
    k_weight,
    cos,
    sin,
    slot,
    q_scale,
    k_scale,
    v_scale,
    q_out,
    k_cache,
    v_cache,
    saturated,
    square_sums,
    tokens,
    heads,
    row_stride,
    width,
    eps,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program: TOKENS tokens of one head. WIDE: normed over `width`, not over the head."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    lanes = tl.arange(0, HALF)[None, :]
    valid = (rows < tokens) & (lanes < HALF)
    inner = heads * 2 * HALF
    source = projected + rows * row_stride + head * 2 * HALF + lanes
    c = tl.load(cos + rows * HALF + lanes, mask=valid, other=0.0)
    s = tl.load(sin + rows * HALF + lanes, mask=valid, other=0.0)
    into = (rows * heads + head) * 2 * HALF + lanes
    ring = tl.load(slot) * inner + into

    first = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=valid, other=0.0).to(tl.float32)
    if WIDE:
        q_weight += head * 2 * HALF
        k_weight += head * 2 * HALF
        mean_square = tl.load(square_sums + rows * 2, mask=rows < tokens, other=1.0) / width
    else:
        mean_square = _mean_square(first, second, HALF)
    first, second = _norm_and_rotate(first, second, mean_square, q_weight, lanes, c, s, eps, HALF)
    scale = tl.load(q_scale + head)
    store_block(first, scale, q_out + into, valid, saturated, FP8)
    store_block(second, scale, q_out + into + HALF, valid, saturated, FP8)

    first = tl.load(source + inner, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(source + inner + HALF, mask=valid, other=0.0).to(tl.float32)
    if WIDE:
        mean_square = tl.load(square_sums + rows * 2 + 1, mask=rows < tokens, other=1.0) / width
    else:
        mean_square = _mean_square(first, second, HALF)
    first, second = _norm_and_rotate(first, second, mean_square, k_weight, lanes, c, s, eps, HALF)
    scale = tl.load(k_scale + head)
    store_block(first, scale, k_cache + ring, valid, saturated, FP8)
    store_block(second, scale, k_cache + ring + HALF, valid, saturated, FP8)

    first = tl.load(source + 2 * inner, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(source + 2 * inner + HALF, mask=valid, other=0.0).to(tl.float32)
    scale = tl.load(v_scale + head)
    store_block(first, scale, v_cache + ring, valid, saturated, FP8)
    store_block(second, scale, v_cache + ring + HALF, valid, saturated, FP8)


@jit
def _mean_square(first, second, HALF: tl.constexpr):
    return ((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF))[:, None]


@jit
def _norm_and_rotate(first, second, mean_square, weight, lanes, c, s, eps, HALF: tl.constexpr):
    norm = tl.rsqrt(mean_square + eps)
    first = first * norm * tl.load(weight + lanes).to(tl.float32)
    second = second * norm * tl.load(weight + HALF + lanes).to(tl.float32)
    return first * c - second * s, first * s + second * c


def ring_store_triton(
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    eps: float,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    saturated: Tensor,
    square_sums: Tensor | None = None,
    width: int = 0,
    *,
    tokens_per_program: int = _TOKENS_PER_PROGRAM,
) -> None:
    tokens, heads, head_dim = q_out.shape
    _check(projected, q_out, k_cache, v_cache)
    if square_sums is not None and (
        square_sums.shape != (tokens, 2) or not square_sums.is_contiguous()
    ):
        raise ValueError(f"square_sums must be ({tokens}, 2), not {tuple(square_sums.shape)}")
    _ring_store_kernel[(-(-tokens // tokens_per_program), heads)](
        projected,
        q_weight,
        k_weight,
        cos,
        sin,
        slot,
        q_scale,
        k_scale,
        v_scale,
        q_out,
        k_cache,
        v_cache,
        saturated,
        cos if square_sums is None else square_sums,
        tokens,
        heads,
        projected.stride(0),
        width,
        eps,
        HALF=head_dim // 2,
        TOKENS=tokens_per_program,
        FP8=q_out.dtype == E4M3,
        WIDE=square_sums is not None,
    )


def _check(projected: Tensor, q_out: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    tokens, heads, head_dim = q_out.shape
    if head_dim & (head_dim - 1):
        raise ValueError(f"head_dim must be a power of two, not {head_dim}")
    if projected.shape[0] < tokens or projected.shape[1] < 3 * heads * head_dim:
        raise ValueError(f"projected {tuple(projected.shape)} is too small for {q_out.shape}")
    if projected.stride(1) != 1:
        raise ValueError("projected must be contiguous along its columns")
    for name, tensor in (("q_out", q_out), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not tensor.is_contiguous() or tensor.dtype != q_out.dtype:
            raise ValueError(f"{name} must be contiguous and of q_out's dtype")


@torch.library.custom_op(
    "characters::ring_store",
    mutates_args=("q_out", "k_cache", "v_cache", "saturated"),
    device_types="cuda",
)
def ring_store(
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    eps: float,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    saturated: Tensor,
    square_sums: Tensor | None = None,
    width: int = 0,
) -> None:
    ring_store_triton(
        projected, q_weight, k_weight, cos, sin, slot, q_scale, k_scale, v_scale, eps,
        q_out, k_cache, v_cache, saturated, square_sums, width,
    )  # fmt: skip


ring_store.register_kernel("cpu")(ring_store_reference)


@ring_store.register_fake
def _(projected, q_weight, k_weight, cos, sin, slot, q_scale, k_scale, v_scale, eps, q_out,
      k_cache, v_cache, saturated, square_sums=None, width=0):  # fmt: skip
    return None
