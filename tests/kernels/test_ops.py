"""The custom ops: they say truly what they write, and each device has one implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from characters_kernels import attention
from characters_kernels.delta_rotate import delta_rotate, delta_rotate_triton
from characters_kernels.fp8 import E4M3, HEADROOM, dequantise, quantise, scale_for, to_e4m3
from characters_kernels.frame_tile import (
    join_tile,
    norm_silu_tile,
    norm_silu_tile_triton,
    tap_sums,
    transforms,
)
from characters_kernels.gelu_quant import gelu_quant
from characters_kernels.linear_fp8 import linear_fp8, linear_fp8_tiled
from characters_kernels.residual_norm import residual_norm
from characters_kernels.ring_store import ring_store
from characters_kernels.saturation import SaturationMonitor
from characters_kernels.square_sums import square_sums

TOKENS, HEADS, HEAD_DIM, SLOTS, DIM = 5, 2, 16, 12, 32
INNER = HEADS * HEAD_DIM


def counter() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def arguments() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    scale = torch.full((HEADS,), 0.01)
    angles = torch.randn(TOKENS, HEAD_DIM // 2)
    caches = [torch.zeros(n, HEADS, HEAD_DIM) for n in (TOKENS, SLOTS, SLOTS)]
    x8, w8 = (to_e4m3(torch.randn(n, 32), counter()) for n in (TOKENS, 48))
    one = torch.ones(1)
    return {
        "ring_store": (
            ring_store,
            (
                torch.randn(TOKENS, 3 * INNER),
                *torch.ones(2, HEAD_DIM),
                angles.cos(),
                angles.sin(),
                torch.tensor(3),
                scale,
                scale,
                scale,
                1e-6,
                *caches,
                counter(),
            ),
        ),
        "square_sums": (
            square_sums,
            (torch.randn(TOKENS, 3 * INNER), INNER, torch.zeros(TOKENS, 2)),
        ),
        "delta_rotate": (
            delta_rotate,
            (torch.randn(2, SLOTS, HEADS, HEAD_DIM), *torch.rand(2, 3), 4, counter()),
        ),
        "residual_norm": (
            residual_norm,
            (
                torch.randn(TOKENS, DIM),
                torch.randn(TOKENS, DIM),
                *torch.randn(3, DIM),
                1e-6,
                one,
                torch.zeros(TOKENS, DIM),
                counter(),
            ),
        ),
        "gelu_quant": (
            gelu_quant,
            (
                torch.randn(TOKENS, INNER),
                torch.randn(TOKENS, DIM),
                one,
                torch.zeros(TOKENS, INNER + DIM),
                counter(),
            ),
        ),
        "norm_silu_tile": (
            norm_silu_tile,
            (
                list(torch.randn(4, 3, 2, DIM)),
                None,
                torch.ones(DIM),
                torch.randn(2, 3, 2, DIM),
                torch.zeros(6, 3, 2, DIM),
            ),
        ),
        "join_tile": (
            join_tile,
            (
                list(torch.randn(6, 3, 2, DIM)),
                torch.ones(DIM),
                torch.randn(4, 3, 2, DIM),
                torch.zeros(4, 3, 2, DIM),
            ),
        ),
        "linear_fp8": (linear_fp8, (x8, w8, one, one, torch.float32)),
        "linear_fp8_tiled": (linear_fp8_tiled, (x8, w8, one, one, torch.float32)),
    }


@pytest.mark.parametrize("name", arguments())
def test_an_op_says_truly_what_it_writes_and_what_it_returns(name: str) -> None:
    torch.manual_seed(0)
    op, inputs = arguments()[name]
    # The schema test scales its inputs, which torch cannot do to e4m3 on CPU.
    schema = () if name.startswith("linear_fp8") else ("test_schema",)
    torch.library.opcheck(op, inputs, test_utils=(*schema, "test_faketensor"))


def test_fp8_matmul_adds_its_bias_before_it_rounds() -> None:
    x, weight = (to_e4m3(torch.randn(n, 32), counter()) for n in (TOKENS, 48))
    bias, one = torch.randn(48, dtype=torch.bfloat16), torch.ones(1)
    found = linear_fp8(x, weight, one, one, torch.bfloat16, bias)
    exact = x.float() @ weight.float().T + bias.float()
    assert torch.equal(found, exact.to(torch.bfloat16))


def test_a_scale_leaves_headroom_and_an_unseen_value_has_scale_one() -> None:
    scale = scale_for(torch.tensor([3.0, 0.0]))
    clamped = counter()
    largest = quantise(torch.tensor([HEADROOM * 3.0, 0.5]), scale, clamped)
    assert largest.float().tolist() == [448.0, 0.5] and not int(clamped)
    quantise(torch.tensor([HEADROOM * 3.1, -500.0]), scale, clamped)
    assert int(clamped) == 2
    assert dequantise(largest, scale, torch.float32)[0] == pytest.approx(HEADROOM * 3.0)


def test_attention_backends_are_chosen_by_device_and_never_silently() -> None:
    assert attention.backend(torch.device("cpu")) == "reference"
    with pytest.raises(ValueError, match="computes in FP8"):
        attention.backend(torch.device("meta"))


def test_an_op_has_no_implementation_for_a_device_that_cannot_run_it() -> None:
    one = torch.ones(1)
    for call in (attention.fp8_attention_fa3, attention.fp8_attention_triton):
        x = torch.zeros(2, 1, 16, dtype=E4M3)
        with pytest.raises(NotImplementedError):
            call(x, x, x, one, one, one)


@pytest.mark.parametrize(
    ("heads", "parts"),
    [(9, ((9, 2),)), (18, ((18, 1),)), (24, ((22, 1), (2, 10))), (36, ((36, 1),))],
)
def test_heads_and_keys_are_cut_as_measured_fastest(
    heads: int, parts: tuple[tuple[int, int], ...]
) -> None:
    assert attention.parts_for(heads, 757) == parts


def test_the_monitor_reads_the_count_of_the_last_request() -> None:
    monitor = SaturationMonitor(torch.device("cpu"))
    monitor.counter += 3
    assert monitor.read() == 0
    monitor.request()
    assert monitor.read() == 3
    monitor.reset()
    assert monitor.read() == 0, "the old session's count is not the new one's"
    monitor.request()
    assert monitor.read() == 0


@pytest.mark.parametrize("frames", [2, 4])
def test_fewer_products_of_a_tile_are_the_convolution(frames: int) -> None:
    """In float64, where nothing but the arithmetic can differ."""
    random = torch.Generator().manual_seed(frames)
    taps, frames_in, join = transforms(frames)
    weight = torch.randn(3, generator=random, dtype=torch.float64)
    seen = torch.randn(frames + 2, generator=random, dtype=torch.float64)
    joined = join @ ((taps @ weight) * (frames_in @ seen))
    torch.testing.assert_close(joined, seen.unfold(0, 3, 1) @ weight, rtol=0, atol=1e-13)


def test_tiles_of_bf16_have_taps_in_float16_and_tiles_of_float32_in_their_own() -> None:
    weight = torch.randn(8, 4, 3, 3, 3)
    assert {taps.dtype for taps in tap_sums(weight, 4)} == {torch.float32}
    kernels = tap_sums(weight.bfloat16(), 2)
    assert [(taps.shape, taps.dtype) for taps in kernels] == [((8, 4, 3, 3), torch.float16)] * 4


@pytest.mark.parametrize("rotate", [delta_rotate, delta_rotate_triton])
@pytest.mark.parametrize(
    ("width", "planes", "dtype", "says"),
    [
        (HEAD_DIM + 1, 3, torch.float32, "contiguous"),
        (HEAD_DIM, HEAD_DIM, torch.float32, "1 to 8 planes"),
        (HEAD_DIM, 3, torch.float64, "must be float32"),
    ],
)
def test_other_keys_and_angles_are_refused(
    rotate: Any, width: int, planes: int, dtype: torch.dtype, says: str
) -> None:
    keys = torch.zeros(2, SLOTS, HEADS, width)[..., :HEAD_DIM]
    with pytest.raises(ValueError, match=says):
        rotate(keys, *torch.zeros(2, planes, dtype=dtype), 0, counter())


@pytest.mark.parametrize(
    ("sources", "frames", "says"),
    [(3, 3, "1, 2 or 4"), (5, 4, "neither frames nor products"), (6, 4, "bias")],
)
def test_other_tiles_are_refused(sources: int, frames: int, says: str) -> None:
    given = list(torch.zeros(sources, 2, 2, 8))
    tile = torch.zeros(frames + 2, 2, 2, 8)
    with pytest.raises(ValueError, match=says):
        norm_silu_tile_triton(given, None, torch.ones(8), torch.zeros(2, 2, 2, 8), tile)
