"""The kernels on a GPU, at the shapes of a quarter of the 57B model: eager, compiled, captured.

Tolerance: a kernel's error from float32 is at most twice that of the same arithmetic in torch ops
with the same rounding, plus a little. What only moves data must be exact.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from characters_kernels import attention, delta_rotate, gelu_quant, linear_fp8
from characters_kernels import residual_norm as norm
from characters_kernels import ring_store as store
from characters_kernels.fp8 import E4M3, quantise, scale_for
from characters_serve.bench.rank_step import shard_of
from characters_serve.config import load_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU of Hopper's class"),
]

MODEL = shard_of(
    load_config([Path(__file__).parents[2] / "configs" / "characters-57b.yaml"]).model, 4
)
TOKENS, HEADS, HEAD_DIM = MODEL.tokens_per_chunk, MODEL.num_heads, MODEL.head_dim
SLOTS, DIM, MLP = MODEL.cache_slots, MODEL.dim, MODEL.mlp_dim
INNER = HEADS * HEAD_DIM
FORMATS = pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16], ids=["e4m3", "bf16"])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def counter() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, device="cuda").to(dtype)


def scale(*shape: int) -> Tensor:
    return torch.full(shape, 0.02, device="cuda")


def store_inputs(dtype: torch.dtype, seed: int = 0) -> list[Any]:
    angles = random(TOKENS, HEAD_DIM // 2, seed=1, dtype=torch.float32)
    weights = 1 + 0.1 * random(2, HEAD_DIM, seed=2)
    return [
        random(TOKENS + 11, 3 * INNER + MLP, seed=seed),
        *weights,
        angles.cos(),
        angles.sin(),
        torch.tensor(MODEL.prefix_slots + 2 * TOKENS, device="cuda"),
        *scale(3, HEADS),
        1e-6,
        empty(TOKENS, HEADS, HEAD_DIM, dtype=dtype),
        empty(SLOTS, HEADS, HEAD_DIM, dtype=dtype),
        empty(SLOTS, HEADS, HEAD_DIM, dtype=dtype),
        counter(),
    ]


def rotate_inputs(dtype: torch.dtype, seed: int = 0) -> list[Any]:
    angles = 0.3 * torch.arange(MODEL.rope_split[0] // 2, device="cuda")
    keys = (100 * random(3, SLOTS, HEADS, HEAD_DIM, seed=seed)).clamp(-448, 448).to(dtype)
    return [keys, angles.cos(), angles.sin(), MODEL.prefix_slots, counter()]


def norm_inputs(dtype: torch.dtype, seed: int = 0) -> list[Any]:
    return [
        random(TOKENS, DIM, seed=seed),
        0.1 * random(TOKENS + 11, DIM, seed=seed + 1),
        *random(3, DIM, seed=2),
        1e-6,
        scale(1),
        empty(TOKENS + 11, DIM, dtype=dtype),
        counter(),
    ]


def gelu_inputs(dtype: torch.dtype, seed: int = 0) -> list[Any]:
    return [
        random(TOKENS, INNER, seed=seed),
        random(TOKENS + 11, 3 * INNER + MLP, seed=seed + 1)[:, 3 * INNER :],
        scale(1),
        empty(TOKENS + 11, INNER + MLP, dtype=dtype),
        counter(),
    ]


OPS: dict[str, tuple[Any, Callable[..., None], Callable[..., list[Any]]]] = {
    "ring_store": (store.ring_store, store.ring_store_reference, store_inputs),
    "delta_rotate": (delta_rotate.delta_rotate, delta_rotate.delta_rotate_reference, rotate_inputs),
    "residual_norm": (norm.residual_norm, norm.residual_norm_reference, norm_inputs),
    "gelu_quant": (gelu_quant.gelu_quant, gelu_quant.gelu_quant_reference, gelu_inputs),
}
NAMES = pytest.mark.parametrize("name", OPS)


def copied(inputs: list[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def tensors(inputs: list[Any]) -> list[Tensor]:
    return [x for x in inputs if isinstance(x, Tensor)]


@NAMES
@FORMATS
def test_a_kernel_is_its_reference(name: str, dtype: torch.dtype) -> None:
    """Both round float32 arithmetic once; values on the edge of two steps may go either way."""
    op, reference, make = OPS[name]
    found, expected = make(dtype), make(dtype)
    op(*found)
    reference(*expected)
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        if a.dtype == torch.int32:
            assert abs(int(a) - int(b)) <= 2 + 0.001 * int(b)
            continue
        assert (a.float() != b.float()).float().mean() < 0.01
        step = 0.126 if a.dtype == E4M3 else 0.008
        torch.testing.assert_close(a.float(), b.float(), rtol=step, atol=2e-3)


@pytest.mark.parametrize("dim", [9216, 5120, 1536, 1024, 192, 48])
def test_every_clamped_value_is_counted_once(dim: int) -> None:
    """At all widths: threads hold the same values of a block that has fewer than there are."""
    rows = 10 * random(TOKENS, dim)
    gate, shift = torch.ones(dim, device="cuda"), torch.zeros(dim, device="cuda")
    counted = []
    for normalise in (norm.residual_norm, norm.residual_norm_reference):
        out, saturated = empty(TOKENS, dim, dtype=E4M3), counter()
        normalise(rows.clone(), None, None, gate, shift, 1e-6, scale(1) / 10, out, saturated)
        counted.append(int(saturated))
    for activate in (gelu_quant.gelu_quant, gelu_quant.gelu_quant_reference):
        out, saturated = empty(TOKENS, dim, dtype=E4M3), counter()
        activate(rows[:, : dim // 4], rows[:, dim // 4 :], scale(1), out, saturated)
        counted.append(int(saturated))
    normed, normed_expected, activated, activated_expected = counted
    # A value on the edge may fall to either side.
    assert abs(normed - normed_expected) <= 2 + 0.002 * normed_expected
    assert abs(activated - activated_expected) <= 2 + 0.002 * activated_expected
    assert normed_expected > 100 and activated_expected > 100


def test_what_only_moves_is_exact_and_nothing_else_is_touched() -> None:
    inputs = store_inputs(torch.bfloat16)
    store.ring_store(*inputs)
    projected, values, start = inputs[0], inputs[12], MODEL.prefix_slots + 2 * TOKENS
    stored = values[start : start + TOKENS].flatten(1)
    assert torch.equal(stored, projected[:TOKENS, 2 * INNER : 3 * INNER])
    for cache in inputs[11:13]:
        assert not cache[:start].any() and not cache[start + TOKENS :].any()
    rotated = rotate_inputs(E4M3)
    before = rotated[0].clone()
    delta_rotate.delta_rotate(*rotated)
    prefix, half, planes = MODEL.prefix_slots, HEAD_DIM // 2, MODEL.rope_split[0] // 2
    now, then = rotated[0].view(torch.uint8), before.view(torch.uint8)
    assert torch.equal(now[:, :prefix], then[:, :prefix])
    for part in (slice(planes, half), slice(half + planes, HEAD_DIM)):
        # As numbers: a zero may change its sign.
        assert torch.equal(rotated[0][..., part].float(), before[..., part].float())


@NAMES
def test_an_odd_chain_captured_and_replayed_with_new_inputs(name: str) -> None:
    op, _, make = OPS[name]
    inputs, others = make(E4M3), [make(E4M3, seed=seed) for seed in (7, 8)]

    def chain(arguments: list[Any]) -> None:
        for _ in range(3):
            op(*arguments)

    chain(copied(inputs))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(inputs)
    for other in others:
        expected = copied(other)
        chain(expected)
        for mine, new in zip(tensors(inputs), tensors(other), strict=True):
            mine.copy_(new)
        graph.replay()
        for found, wanted in zip(tensors(inputs), tensors(expected), strict=True):
            assert torch.equal(found.float(), wanted.float())


@NAMES
def test_a_compiled_chain_reads_before_the_next_call_writes(name: str) -> None:
    """The failure of a compiler that moves a read of a shared buffer past the next write to it."""
    op, _, make = OPS[name]
    sets = [make(E4M3, seed=seed) for seed in (3, 4, 5)]
    written = sets[0]

    def chain(*flat: Any) -> list[Tensor]:
        width = len(written)
        reads = []
        for index in range(3):
            call = list(flat[index * width : (index + 1) * width])
            # All three calls write the buffers of the first.
            outputs = _outputs(name)
            for position in outputs:
                call[position] = flat[position]
            op(*call)
            reads += [call[position].float() * 2 for position in outputs]
        return reads

    flat = [x for inputs in sets for x in inputs]
    expected = chain(*copied(flat))
    found = torch.compile(chain, fullgraph=True, dynamic=False)(*copied(flat))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def _outputs(name: str) -> list[int]:
    return {
        "ring_store": [10, 11, 12],
        "delta_rotate": [0],
        "residual_norm": [7],
        "gelu_quant": [3],
    }[name]


@pytest.mark.parametrize("kind", ["fa3", "triton"])
@pytest.mark.parametrize("keys", [SLOTS, SLOTS - 302 + 17, 1246])
def test_fp8_attention(kind: attention.Backend, keys: int) -> None:
    if kind == "fa3" and attention.backend(torch.device("cuda")) != "fa3":
        pytest.skip("needs the fa3-fwd package and a Hopper GPU")
    shapes = (TOKENS, SLOTS, SLOTS)
    floats = [random(n, HEADS, HEAD_DIM, seed=i) for i, n in enumerate(shapes)]
    scales = [scale_for(x.abs().amax((0, 2))) for x in floats]
    q, k, v = (quantise(x, s[:, None], counter()) for x, s in zip(floats, scales, strict=True))
    k, v = k[SLOTS - keys :], v[SLOTS - keys :]
    truth = attention.fp8_attention_reference(q, k, v, *scales)
    found = attention.fp8_attention(kind)(q, k, v, *scales).float()
    plain = _attention_with_rounded_weights(q, k, v, scales)
    assert found.shape == truth.shape and found.isfinite().all()
    assert _error(found, truth) <= 2 * _error(plain, truth) + 1e-3
    one_off = attention.fp8_attention_reference(q, k[1:], v[1:], *scales)
    assert _error(one_off, truth) > 1e-4, "the measure must see a single missing key"


def _attention_with_rounded_weights(
    q: Tensor, k: Tensor, v: Tensor, scales: list[Tensor]
) -> Tensor:
    """Softmax weights over the largest, times 2^8, rounded to e4m3: what FP8 attention cannot do
    without."""
    scores = torch.einsum("shd,lhd->hsl", q.float(), k.float())
    scores = scores * (scales[0] * scales[1])[:, None, None] * HEAD_DIM**-0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * 256
    rounded = weights.to(E4M3).float() / weights.sum(-1, keepdim=True)
    return torch.einsum("hsl,lhd->shd", rounded, v.float() * scales[2][:, None]).bfloat16().float()


@pytest.mark.parametrize("op", [linear_fp8.linear_fp8, linear_fp8.linear_fp8_tiled])
@pytest.mark.parametrize("rows", [TOKENS, 768, 489])
def test_linear_fp8(op: Any, rows: int) -> None:
    """Fast accumulation keeps about 14 bits; at 9,216 terms that is far below bf16's rounding."""
    x, weight = (
        quantise(random(n, DIM, seed=i), scale(1), counter()) for i, n in enumerate((rows, 4096))
    )
    truth = linear_fp8.linear_fp8_reference(x, weight, scale(1), scale(1), torch.float32)
    plain = truth.bfloat16().float()
    found = op(x, weight, scale(1), scale(1), torch.bfloat16).float()
    assert _error(found, truth) <= 2 * _error(plain, truth) + 1e-3


def _error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())
