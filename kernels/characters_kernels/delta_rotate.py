"""Moves every cached key of the window in time: one pass over all caches, at each position reset.

    keys       (N, L, H, D)  written: N caches of L slots, e4m3 or a float format, contiguous
    cos, sin   (P,)          float32, P <= D/2: dim i < P turns with dim i + D/2; the others stay
    first_slot int           slots from here on are turned; the prefix before them is untouched
    saturated  (1,)          int32, counts values clamped to e4m3's range

A rotation commutes with the per-head scale, so e4m3 keys are turned as they lie: dequantise,
rotate and requantise without reading a scale. The planes past P are left out: 64 of 128 bytes of
a key are read and written in the 57B geometry. A key lives for `window_chunks` steps and resets
are further apart, so it is rounded again at most once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from characters_kernels.fp8 import E4M3, store_as, store_block
from characters_kernels.triton_jit import jit, next_power_of_two, tl

_KEYS_PER_PROGRAM = 64


def delta_rotate_reference(
    keys: Tensor, cos: Tensor, sin: Tensor, first_slot: int, saturated: Tensor
) -> None:
    _check(keys, cos, sin)
    planes, half = cos.shape[0], keys.shape[-1] // 2
    one = torch.ones((), device=keys.device)
    for cache in keys:  # one cache at a time: the window of all in float32 would not fit
        first = cache[first_slot:, :, :planes]
        second = cache[first_slot:, :, half : half + planes]
        a, b = first.float(), second.float()
        turned = a * cos - b * sin, a * sin + b * cos
        store_as(turned[0], one, first, saturated)
        store_as(turned[1], one, second, saturated)


def _check(keys: Tensor, cos: Tensor, sin: Tensor) -> None:
    if not keys.is_contiguous():
        raise ValueError("keys must be contiguous")
    largest = keys.shape[-1] // 2
    if not 0 < cos.shape[0] <= largest or sin.shape != cos.shape:
        raise ValueError(f"cos and sin must have 1 to {largest} planes, not {cos.shape[0]}")
    if not cos.dtype == sin.dtype == torch.float32:  # the kernel would compute in theirs
        raise ValueError(f"cos and sin must be float32, not {cos.dtype} and {sin.dtype}")


@jit
def _delta_rotate_kernel(
    keys,
    cos,
    sin,
    saturated,
    cache_stride,
    first_element,
    num_keys,
    PLANES: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    KEYS: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program: KEYS keys (a slot's head each) of one cache."""
    rows = tl.program_id(0) * KEYS + tl.arange(0, KEYS)[:, None]
    lanes = tl.arange(0, PADDED)[None, :]
    valid = (rows < num_keys) & (lanes < PADDED)
    # All caches together have more than 2^31 elements.
    base = keys + tl.program_id(1).to(tl.int64) * cache_stride + first_element
    pointers = base + rows * (2 * HALF) + lanes
    # Lanes past PLANES turn by nothing, which keeps their values: so whole vectors can be moved.
    c = tl.load(cos + lanes, mask=lanes < PLANES, other=1.0)
    s = tl.load(sin + lanes, mask=lanes < PLANES, other=0.0)
    first = tl.load(pointers, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=valid, other=0.0).to(tl.float32)
    store_block(first * c - second * s, 1.0, pointers, valid, saturated, FP8)
    store_block(first * s + second * c, 1.0, pointers + HALF, valid, saturated, FP8)


def delta_rotate_triton(
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    first_slot: int,
    saturated: Tensor,
    *,
    keys_per_program: int = _KEYS_PER_PROGRAM,
) -> None:
    _check(keys, cos, sin)
    caches, slots, heads, head_dim = keys.shape
    planes = cos.shape[0]
    num_keys = (slots - first_slot) * heads
    _delta_rotate_kernel[(-(-num_keys // keys_per_program), caches)](
        keys,
        cos,
        sin,
        saturated,
        keys.stride(0),
        first_slot * heads * head_dim,
        num_keys,
        PLANES=planes,
        PADDED=next_power_of_two(planes),
        HALF=head_dim // 2,
        KEYS=keys_per_program,
        FP8=keys.dtype == E4M3,
    )


@torch.library.custom_op(
    "characters::delta_rotate", mutates_args=("keys", "saturated"), device_types="cuda"
)
def delta_rotate(
    keys: Tensor, cos: Tensor, sin: Tensor, first_slot: int, saturated: Tensor
) -> None:
    delta_rotate_triton(keys, cos, sin, first_slot, saturated)


delta_rotate.register_kernel("cpu")(delta_rotate_reference)


@delta_rotate.register_fake
def _(keys, cos, sin, first_slot, saturated):
    return None
