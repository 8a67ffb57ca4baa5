"""Every Triton kernel against its reference, on CPU, in Triton's interpreter.

Data movement and bytes of e4m3 must agree exactly, but for values so near the edge of two steps
that another order of float32 arithmetic rounds them to the other. Attention, which rounds inside,
is held to the rule that its error is at most twice that of plain arithmetic with the same rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from characters_kernels import attention, delta_rotate, frame_tile, gelu_quant, linear_fp8
from characters_kernels import residual_norm as norm
from characters_kernels import ring_store as store
from characters_kernels import square_sums as squares
from characters_kernels.fp8 import E4M3, E4M3_MAX, quantise, scale_for, to_e4m3
from characters_kernels.triton_jit import INSTALLED, INTERPRETED

pytestmark = pytest.mark.skipif(
    not (INSTALLED and INTERPRETED), reason="needs Triton's interpreter (TRITON_INTERPRET=1)"
)

TOKENS, HEADS, HEAD_DIM, SLOTS = 13, 2, 32, 40
INNER, MLP, DIM = HEADS * HEAD_DIM, 96, 80
FORMATS = pytest.mark.parametrize("dtype", [E4M3, torch.float32], ids=["e4m3", "float32"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def counter() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def agree(found: Tensor, expected: Tensor, on_the_edge: float = 0.0) -> None:
    """on_the_edge: share of e4m3 values that two orders of float32 arithmetic may round apart."""
    if found.dtype == E4M3:
        differ = found.float() != expected.float()
        assert differ.float().mean() <= on_the_edge
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.126, atol=2**-9)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def run_both(
    kernel: Callable[..., None], reference: Callable[..., None], *inputs: object
) -> list[tuple[Tensor, Tensor]]:
    """Runs both on copies of the inputs; returns all tensors afterwards, pair by pair."""

    def run(call: Callable[..., None]) -> list[Tensor]:
        copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        call(*copies)
        return [x for x in copies if isinstance(x, Tensor)]

    return list(zip(run(kernel), run(reference), strict=True))


@FORMATS
@pytest.mark.parametrize("slot", [0, 27])
@pytest.mark.parametrize("wide", [False, True], ids=["each head", "whole width"])
def test_ring_store(dtype: torch.dtype, slot: int, wide: bool) -> None:
    """Over the whole width there are 3 x INNER columns on all ranks, and INNER of them here."""
    base = torch.bfloat16 if dtype == E4M3 else dtype
    angles = random(TOKENS, HEAD_DIM // 2)
    empty = [torch.zeros(n, HEADS, HEAD_DIM).to(dtype) for n in (TOKENS, SLOTS, SLOTS)]
    sums = 3 * INNER * (0.5 + random(TOKENS, 2, seed=4).square())
    for found, expected in run_both(
        store.ring_store_triton,
        store.ring_store_reference,
        random(16, 3 * INNER + MLP).to(base),
        *(1 + 0.2 * random(2, INNER if wide else HEAD_DIM, seed=1)),
        angles.cos(),
        angles.sin(),
        torch.tensor(slot),
        *(0.002 + 0.02 * random(3, HEADS, seed=2).abs()),
        1e-6,
        *empty,
        counter(),
        sums if wide else None,
        3 * INNER if wide else 0,
    ):
        agree(found, expected)


def test_ring_store_over_the_width_is_the_norm_of_all_heads() -> None:
    """Against torch's own norm; a norm of each head would differ."""
    projected, weight = random(TOKENS, 3 * INNER), 1 + 0.2 * random(INNER, seed=1)
    projected[:, :HEAD_DIM] *= 5
    q, k, v = (torch.zeros(n, HEADS, HEAD_DIM) for n in (TOKENS, SLOTS, SLOTS))
    still = torch.ones(TOKENS, HEAD_DIM // 2), torch.zeros(TOKENS, HEAD_DIM // 2)
    sums, scale = torch.empty(TOKENS, 2), torch.ones(HEADS)
    squares.square_sums_triton(projected, INNER, sums)
    store.ring_store_triton(
        projected, weight, weight, *still, torch.tensor(0), scale, scale, scale, 1e-6,
        q, k, v, counter(), sums, INNER,
    )  # fmt: skip
    for found, columns in ((q, projected[:, :INNER]), (k, projected[:, INNER : 2 * INNER])):
        expected = torch.nn.functional.rms_norm(columns, (INNER,), weight, 1e-6)
        torch.testing.assert_close(found[:TOKENS].flatten(1), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(v[:TOKENS].flatten(1), projected[:, 2 * INNER :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_square_sums(dtype: torch.dtype) -> None:
    projected = random(16, 3 * INNER + 7).to(dtype)[:, : 3 * INNER]
    inputs = (projected, INNER - 5, torch.full((TOKENS, 2), torch.nan))
    for found, expected in run_both(
        squares.square_sums_triton, squares.square_sums_reference, *inputs
    ):
        agree(found, expected)


def test_ring_store_touches_only_its_slots_and_counts_what_it_clamps() -> None:
    angles = torch.zeros(TOKENS, HEAD_DIM // 2)
    q, k, v = (torch.full((n, HEADS, HEAD_DIM), 7.0).to(E4M3) for n in (TOKENS, SLOTS, SLOTS))
    clamped = counter()
    ones = torch.ones(HEAD_DIM)
    scale = torch.ones(HEADS)
    projected = torch.ones(TOKENS, 3 * INNER)
    projected[2, 2 * INNER + 5] = 449.0
    store.ring_store_triton(
        projected, ones, ones, angles.cos(), angles.sin(), torch.tensor(20),
        scale, scale, scale, 1e-6, q, k, v, clamped,
    )  # fmt: skip
    for cache in (k, v):
        assert (cache[:20].float() == 7).all() and (cache[33:].float() == 7).all()
        assert not (cache[20:33].float() == 7).any()
    assert float(v[22].float().max()) == E4M3_MAX
    assert int(clamped) == 1


@FORMATS
def test_delta_rotate(dtype: torch.dtype) -> None:
    angles = 0.3 * torch.arange(6)
    keys = (200 * random(3, SLOTS, HEADS, HEAD_DIM)).clamp(-E4M3_MAX, E4M3_MAX).to(dtype)
    inputs = (keys, angles.cos(), angles.sin(), 10, counter())
    pairs = run_both(delta_rotate.delta_rotate_triton, delta_rotate.delta_rotate_reference, *inputs)
    for found, expected in pairs:
        agree(found, expected)
    moved, before = pairs[0][0].float(), keys.float()
    assert torch.equal(moved[:, :10], before[:, :10]), "the prefix must not move"
    still = [*range(6, 16), *range(22, 32)]
    assert torch.equal(moved[..., still], before[..., still])
    assert not torch.equal(moved[:, 10:], before[:, 10:])


@FORMATS
@pytest.mark.parametrize("with_branch", [True, False])
def test_residual_norm(dtype: torch.dtype, with_branch: bool) -> None:
    branch, gate = (random(16, DIM, seed=1), random(DIM, seed=2)) if with_branch else (None, None)
    for found, expected in run_both(
        norm.residual_norm_triton,
        norm.residual_norm_reference,
        3 + random(TOKENS, DIM),
        branch,
        gate,
        *random(2, DIM, seed=3),
        1e-6,
        torch.tensor([0.004]),
        torch.zeros(16, DIM).to(dtype),
        counter(),
    ):
        agree(found, expected, on_the_edge=0.002)


@FORMATS
@pytest.mark.parametrize(("inner", "mlp"), [(INNER, MLP), (INNER, 0), (0, MLP)])
def test_gelu_quant(dtype: torch.dtype, inner: int, mlp: int) -> None:
    """Either half may be empty: blocks whose attention and MLP have matrices of their own."""
    projected = 3 * random(16, 3 * INNER + mlp)
    for found, expected in run_both(
        gelu_quant.gelu_quant_triton,
        gelu_quant.gelu_quant_reference,
        random(TOKENS, INNER, seed=1)[:, :inner],
        projected[:, 3 * INNER :],
        torch.tensor([0.02]),
        torch.zeros(16, inner + mlp).to(dtype),
        counter(),
    ):
        agree(found, expected, on_the_edge=0.002)


def test_linear_fp8_tile() -> None:
    x, weight = (to_e4m3(random(*shape), counter()) for shape in ((29, 48), (80, 48)))
    scales = torch.tensor([0.5]), torch.tensor([0.25])
    tile = (16, 32, 32)
    found = linear_fp8.linear_fp8_triton(x, weight, *scales, torch.float32, tile)
    expected = linear_fp8.linear_fp8_reference(x, weight, *scales, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keys", [5, 150])
def test_fp8_attention(keys: int) -> None:
    """The kernel rounds its weights to e4m3 and its result to bf16; plain FP8 attention is the
    reference with that rounding, and float32 the truth."""
    q, k, v = (random(n, HEADS, HEAD_DIM, seed=n) for n in (TOKENS, keys, keys + 1))
    scales = [scale_for(x.abs().amax((0, 2))) for x in (q, k, v)]
    q8, k8, v8 = (
        quantise(x, s[:, None], counter()) for x, s in zip((q, k, v[:keys]), scales, strict=True)
    )
    truth = attention.fp8_attention_reference(q8, k8, v8, *scales)
    found = attention.launch_attention(q8, k8, v8, *scales).float()
    scores = torch.einsum("shd,lhd->hsl", q8.float(), k8.float())
    scores = scores * (scales[0] * scales[1])[:, None, None] * HEAD_DIM**-0.5
    weights = torch.exp2((scores - scores.amax(-1, keepdim=True)) * 1.442695 + 8)
    rounded = weights.to(E4M3).float() / weights.sum(-1, keepdim=True)
    plain = torch.einsum("hsl,lhd->shd", rounded, v8.float() * scales[2][:, None])
    plain = plain.to(torch.bfloat16).float()

    def error(x: Tensor) -> float:
        return float((x - truth).norm() / truth.norm())

    assert error(found) <= 2 * error(plain) + 1e-3
    assert error(plain) > 1e-4


@pytest.mark.parametrize(
    ("frames", "from_products"), [(1, False), (2, False), (2, True), (4, False), (4, True)]
)
def test_norm_silu_tile(frames: int, from_products: bool) -> None:
    sources = list(random(frames + 2 * from_products, 3, 7, 12))
    bias, gamma = random(2, 12, seed=1)
    past, tile = random(2, 3, 7, 12, seed=2), torch.zeros(frames + 2, 3, 7, 12)
    results = []
    for call in (frame_tile.norm_silu_tile_triton, frame_tile.norm_silu_tile_reference):
        written = past.clone(), tile.clone()
        call(sources, bias if from_products else None, gamma, *written)
        results.append(written)
    for found, expected in zip(*results, strict=True):
        agree(found, expected)


@pytest.mark.parametrize("frames", [2, 4])
@pytest.mark.parametrize("with_residual", [False, True])
def test_join_tile(frames: int, with_residual: bool) -> None:
    products = list(frame_tile.PRODUCT_SCALE * random(frames + 2, 3, 7, 12))
    residual = random(frames, 3, 7, 12, seed=1) if with_residual else None
    found, expected = torch.zeros(2, frames, 3, 7, 12)
    frame_tile.join_tile_triton(products, random(12, seed=2), residual, found)
    frame_tile.join_tile_reference(products, random(12, seed=2), residual, expected)
    agree(found, expected)
