"""FP8 attention of a chunk's queries over cached keys, in any order of slots, no mask.

Letters: S queries, L keys, H heads, D head dim.

    q        (S, H, D)  e4m3
    k, v     (L, H, D)  e4m3: a run of a cache's slots, as a view; heads and dims contiguous
    q_scale, k_scale, v_scale  (H,) float32
    returns  (S, H, D)  bf16 on GPUs, float32 from the reference

On Hopper GPUs with the `fa3-fwd` package, FlashAttention-3; on other FP8 GPUs a Triton kernel; on
CPUs the reference. `backend()` says which, once, so that the choice can be logged.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from characters_kernels.fp8 import as_e4m3, computes_in_fp8
from characters_kernels.triton_jit import INSTALLED, jit, tl

Backend = Literal["fa3", "triton", "reference"]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_QUERIES, _KEYS = 128, 128
_SMS = 132
_SPLIT_COST = 0.12
"""Waves that each further split costs for each wave of blocks: its partial results are written,
read and combined."""
_CALL_COST = 0.2
"""Waves that a second call costs. Both were chosen so that what measured fastest on an H200 wins,
757 queries and 5,788 keys: 9 heads in 2 splits; 18 whole; 24 as 22 whole and 2 in 8 to 11 splits
(75 us; in 3 splits 100 us); 36 whole (112 us; as 22 and 14 in 3 splits 116):
scripts/measurements/kernel_variants_h200.json."""


def backend(device: torch.device) -> Backend:
    """What runs on a device; an error where nothing can."""
    if device.type == "cpu":
        return "reference"
    if not computes_in_fp8(device):
        raise ValueError(f"FP8 attention needs a GPU that computes in FP8, not {device}")
    if torch.cuda.get_device_capability(device)[0] == 9 and importlib.util.find_spec(
        "fa3_fwd_interface"
    ):
        return "fa3"
    if not INSTALLED:
        raise ValueError("FP8 attention needs fa3-fwd or Triton: install the extra `gpu`")
    return "triton"


def fp8_attention(kind: Backend) -> Attention:
    kinds: dict[Backend, Attention] = {
        "fa3": fp8_attention_fa3,
        "triton": fp8_attention_triton,
        "reference": fp8_attention_reference,
    }
    return kinds[kind]


def fp8_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor
) -> Tensor:
    q, k, v = (
        (x.float() * scale[:, None]).transpose(0, 1)[None]
        for x, scale in ((q, q_scale), (k, k_scale), (v, v_scale))
    )
    return functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


@functools.cache
def parts_for(heads: int, queries: int) -> tuple[tuple[int, int], ...]:
    """(heads, parts their keys are cut into) of one or two calls whose blocks fill whole waves of
    the multiprocessors: one block has 128 queries of a head."""
    blocks = -(-queries // _QUERIES)

    def waves(heads: int, splits: int) -> float:
        combined = _SPLIT_COST * (splits - 1) * heads * blocks / _SMS
        return -(-heads * blocks * splits // _SMS) / splits + combined

    def cost(parts: tuple[tuple[int, int], ...]) -> float:
        return _CALL_COST * (len(parts) - 1) + sum(waves(*part) for part in parts)

    one_call = [((heads, splits),) for splits in range(1, 5)]
    two_calls = [
        ((whole, 1), (heads - whole, splits))
        for whole in range(1, heads)
        for splits in range(1, 13)
    ]
    return min((*one_call, *two_calls), key=cost)


@torch.library.custom_op("characters::fp8_attention_fa3", mutates_args=(), device_types="cuda")
def fp8_attention_fa3(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor
) -> Tensor:
    import fa3_fwd_interface  # noqa: F401  registers torch.ops.fa3_fwd

    out = torch.empty_like(q, dtype=torch.bfloat16)
    first = 0
    for heads, splits in parts_for(q.shape[1], q.shape[0]):
        part = slice(first, first + heads)
        # `flash_attn_func` cannot write into a given tensor.
        torch.ops.fa3_fwd.fwd(
            q[None, :, part],
            k[None, :, part],
            v[None, :, part],
            out=out[None, :, part],
            q_descale=q_scale[None, part],
            k_descale=k_scale[None, part],
            v_descale=v_scale[None, part],
            softmax_scale=q.shape[2] ** -0.5,
            num_splits=splits,
        )
        first += heads
    return out


@fp8_attention_fa3.register_fake
def _(q, k, v, q_scale, k_scale, v_scale):
    return torch.empty_like(q, dtype=torch.bfloat16)


@jit
def _attention_kernel(
    q,
    k,
    v,
    q_scale,
    k_scale,
    v_scale,
    out,
    num_queries,
    num_keys,
    heads,
    softmax_scale,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: QUERIES queries of one head over all keys, softmax online in base 2."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, D)
    lanes = tl.arange(0, KEYS)
    stride = heads * D
    at = rows[:, None] * stride + head * D + dims[None, :]
    queries = tl.load(q + at, mask=(rows < num_queries)[:, None], other=0.0)
    log2_scale = tl.load(q_scale + head) * tl.load(k_scale + head) * softmax_scale * 1.44269504
    largest = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((QUERIES,), dtype=tl.float32)
    total = tl.zeros((QUERIES, D), dtype=tl.float32)
    for start in range(0, num_keys, KEYS):
        slots = start + lanes
        k_at = slots[None, :] * stride + head * D + dims[:, None]
        keys = tl.load(k + k_at, mask=(slots < num_keys)[None, :], other=0.0)
        scores = tl.dot(queries, keys) * log2_scale
        scores = tl.where((slots < num_keys)[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        # Weights are scaled by 2^8, so that small ones are not below e4m3's smallest steps.
        p = tl.exp2(scores - higher[:, None] + 8.0)
        fade = tl.exp2(largest - higher)
        weight = weight * fade + tl.sum(p, 1)
        v_at = slots[:, None] * stride + head * D + dims[None, :]
        values = tl.load(v + v_at, mask=(slots < num_keys)[:, None], other=0.0)
        total = tl.dot(as_e4m3(p), values, total * fade[:, None])
        largest = higher
    total = total / weight[:, None] * tl.load(v_scale + head)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(rows < num_queries)[:, None])


def launch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    queries_per_program: int = _QUERIES,
    keys_at_once: int = _KEYS,
    num_warps: int = 8,
    num_stages: int = 3,
) -> Tensor:
    num_queries, heads, head_dim = q.shape
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride() != (heads * head_dim, head_dim, 1):
            raise ValueError(f"{name} must have rows of {heads} x {head_dim} contiguous elements")
    out = torch.empty_like(q, dtype=torch.bfloat16)
    _attention_kernel[(-(-num_queries // queries_per_program), heads)](
        q,
        k,
        v,
        q_scale,
        k_scale,
        v_scale,
        out,
        num_queries,
        k.shape[0],
        heads,
        head_dim**-0.5,
        D=head_dim,
        QUERIES=queries_per_program,
        KEYS=keys_at_once,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


@torch.library.custom_op("characters::fp8_attention_triton", mutates_args=(), device_types="cuda")
def fp8_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor
) -> Tensor:
    return launch_attention(q, k, v, q_scale, k_scale, v_scale)


@fp8_attention_triton.register_fake
def _(q, k, v, q_scale, k_scale, v_scale):
    return torch.empty_like(q, dtype=torch.bfloat16)
