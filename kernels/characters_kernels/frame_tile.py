"""Causal convolutions over time with fewer products: all that lies between the products.

Three taps over T new frames and the two before them are 3 T products of a frame and a tap. By
Winograd's minimal filtering (arXiv 1509.09308), along time only, T + 2 do: sums of the frames are
convolved with sums of the taps, and the sums of the products are the frames: 4 products for 6 at
T = 2, 6 for 12 at T = 4. Equal in real arithmetic. The points at T = 4 are 0, +-3/4, +-3/2 and
infinity: of those tried they lose least in rounding, and 0, +-1, +-2 lose 1.4 times as much.

T new frames of a tile: 1, 2 or 4. C channels.

    frames     T x (H, W, C)      bf16 or float32, each contiguous: what a norm reads; or instead
    products   T + 2 x (H, W, C)  of the convolution before, not yet joined
    bias       (C,)               of that convolution, added when its products are joined
    gamma      (C,)               gain of the norm x / |x| sqrt(C) over a position's channels
    past       (2, H, W, C)       the frames before, after norm and SiLU; written: the last two
    tile       (T + 2, H, W, C)   written: what the next convolution's products read. At T = 1,
                                  which saves nothing: past, then the new frame
    residual   (T, H, W, C)       added to the joined frames
    out        (T, H, W, C)       written

Sums of bf16 frames are kept in float16, 8 times as fine: what the transform loses is then less than
what bf16 has lost already. Products are PRODUCT_SCALE times as large as they are, so that frames up
to some 500,000 do not leave float16's range.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from characters_kernels.triton_jit import jit, next_power_of_two, tl

POINTS = {1: (), 2: (0.0, 1.0, -1.0), 4: (0.0, 0.75, -0.75, 1.5, -1.5)}
PRODUCT_SCALE = 1 / 16
_TAPS = 3
_SHORTEST = 1e-12
_VALUES_PER_PROGRAM = 1024


@functools.cache
def transforms(num_frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """(taps, frames, products): of T + 2 taps, T + 2 frames and T joined frames, in float64.

    Evaluation at points, and the transposed interpolation; numerators of the latter go to the taps.
    """
    size = num_frames + _TAPS - 1
    points = torch.tensor(POINTS[num_frames], dtype=torch.float64)
    infinity = torch.zeros(1, size, dtype=torch.float64)
    infinity[0, -1] = 1
    values = torch.cat([points[:, None] ** torch.arange(size), infinity])
    apart = points[:, None] - points
    apart.fill_diagonal_(1)
    scale = torch.cat([apart.prod(1), torch.ones(1, dtype=torch.float64)])[:, None]
    joined = values[:, :num_frames].clone()
    joined[-1] = 0
    joined[-1, -1] = 1
    taps = values[:, :_TAPS].clone()
    taps[-1] = 0
    taps[-1, -1] = 1
    return taps / scale, torch.linalg.inv(values).T * scale, joined.T


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of tiles, of the taps' sums and of products, where frames are `dtype`."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


def tap_sums(weight: Tensor, num_frames: int) -> list[Tensor]:
    """(N, C, 3, h, w) of a convolution over time -> the T + 2 kernels (N, C, h, w) of its tile."""
    taps = transforms(num_frames)[0].to(weight.device) * PRODUCT_SCALE
    sums = torch.einsum("jt,ncthw->jnchw", taps, weight.double())
    return [kernel.to(product_dtype(weight.dtype)) for kernel in sums]


def _joined(products: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    num_frames = len(products) - _TAPS + 1
    join = (transforms(num_frames)[2] / PRODUCT_SCALE).to(products[0].device, torch.float32)
    frames: Tensor = torch.tensordot(join, torch.stack(list(products)).float(), 1)
    return frames if bias is None else frames + bias.float()


def norm_silu_tile_reference(
    sources: list[Tensor], bias: Tensor | None, gamma: Tensor, past: Tensor, tile: Tensor
) -> None:
    num_frames = tile.shape[0] - _TAPS + 1
    made = len(sources) == num_frames
    frames = torch.stack(sources).float() if made else _joined(sources, bias)
    length = torch.linalg.vector_norm(frames, dim=-1, keepdim=True).clamp_min(_SHORTEST)
    normed = frames * (frames.shape[-1] ** 0.5 / length) * gamma.float()
    seen = torch.cat([past, functional.silu(normed).to(past.dtype)])
    past.copy_(seen[-past.shape[0] :])
    if num_frames == 1:
        tile.copy_(seen)
    else:
        frames_in = transforms(num_frames)[1].to(seen.device, torch.float32)
        tile.copy_(torch.tensordot(frames_in, seen.float(), 1))


def join_tile_reference(
    products: list[Tensor], bias: Tensor, residual: Tensor | None, out: Tensor
) -> None:
    frames = _joined(products, bias)
    out.copy_(frames if residual is None else frames + residual.float())


@jit
def _share(positions, channels, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's values within a frame: their offsets, which of them there are, their channels."""
    rows = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    lanes = tl.arange(0, COLUMNS)[None, :]
    valid = (rows < positions) & (lanes < channels)
    at = rows * channels + lanes
    return at, valid, lanes


@jit
def _read(source, at, valid):
    return tl.load(source + at, mask=valid, other=0.0).to(tl.float32)


@jit
def _write(into, at, valid, values):
    tl.store(into + at, values.to(into.dtype.element_ty), mask=valid)


@jit
def _join_2(p0, p1, p2, p3):
    return 16.0 * (p0 + p1 + p2), 16.0 * (p1 - p2 + p3)


@jit
def _join_4(p0, p1, p2, p3, p4, p5):
    """Powers of the points 3/4 and 3/2, of even and odd degree."""
    even_a, odd_a, even_b, odd_b = p1 + p2, p1 - p2, p3 + p4, p3 - p4
    return (
        16.0 * (p0 + even_a + even_b),
        16.0 * (0.75 * odd_a + 1.5 * odd_b),
        16.0 * (0.5625 * even_a + 2.25 * even_b),
        16.0 * (0.421875 * odd_a + 3.375 * odd_b + p5),
    )


@jit
def _norm_silu(x, gain, root, past):
    """Rounded as the past is, which it becomes."""
    length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)
    normed = x * (root / length)[:, None] * gain
    return (normed * tl.sigmoid(normed)).to(past.dtype.element_ty).to(tl.float32)


@jit
def _norm_silu_tile_kernel(
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    bias,
    gamma,
    past,
    tile,
    positions,
    channels,
    frame,
    root,
    FRAMES: tl.constexpr,
    PRODUCTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: POSITIONS positions of all frames. `frame` is the size of one, in values."""
    at, valid, lanes = _share(positions, channels, POSITIONS, COLUMNS)
    gain = _read(gamma, lanes, lanes < channels)
    d0 = _read(past, at, valid)
    d1 = _read(past + frame, at, valid)
    if PRODUCTS:
        # What is masked must stay zero: the norm sums over it.
        added = tl.where(valid, _read(bias, lanes, lanes < channels), 0.0)
    if FRAMES == 4:
        f0 = _read(s0, at, valid)
        f1 = _read(s1, at, valid)
        f2 = _read(s2, at, valid)
        f3 = _read(s3, at, valid)
        if PRODUCTS:
            f0, f1, f2, f3 = _join_4(f0, f1, f2, f3, _read(s4, at, valid), _read(s5, at, valid))
            f0 += added
            f1 += added
            f2 += added
            f3 += added
        d2 = _norm_silu(f0, gain, root, past)
        d3 = _norm_silu(f1, gain, root, past)
        d4 = _norm_silu(f2, gain, root, past)
        d5 = _norm_silu(f3, gain, root, past)
        _write(past, at, valid, d4)
        _write(past + frame, at, valid, d5)
        even_a, odd_a = d4 - 2.25 * d2, 0.75 * (d3 - 2.25 * d1)
        even_b, odd_b = d4 - 0.5625 * d2, 1.5 * (d3 - 0.5625 * d1)
        _write(tile, at, valid, 1.265625 * d0 - 2.8125 * d2 + d4)
        _write(tile + frame, at, valid, even_a + odd_a)
        _write(tile + 2 * frame, at, valid, even_a - odd_a)
        _write(tile + 3 * frame, at, valid, even_b + odd_b)
        _write(tile + 4 * frame, at, valid, even_b - odd_b)
        _write(tile + 5 * frame, at, valid, 1.265625 * d1 - 2.8125 * d3 + d5)
    elif FRAMES == 2:
        f0 = _read(s0, at, valid)
        f1 = _read(s1, at, valid)
        if PRODUCTS:
            f0, f1 = _join_2(f0, f1, _read(s2, at, valid), _read(s3, at, valid))
            f0 += added
            f1 += added
        d2 = _norm_silu(f0, gain, root, past)
        d3 = _norm_silu(f1, gain, root, past)
        _write(past, at, valid, d2)
        _write(past + frame, at, valid, d3)
        _write(tile, at, valid, d2 - d0)
        _write(tile + frame, at, valid, d2 + d1)
        _write(tile + 2 * frame, at, valid, d2 - d1)
        _write(tile + 3 * frame, at, valid, d3 - d1)
    else:
        d2 = _norm_silu(_read(s0, at, valid), gain, root, past)
        _write(past, at, valid, d1)
        _write(past + frame, at, valid, d2)
        _write(tile, at, valid, d0)
        _write(tile + frame, at, valid, d1)
        _write(tile + 2 * frame, at, valid, d2)


@jit
def _join_tile_kernel(
    s0,
    s1,
    s2,
    s3,
    s4,
    s5,
    bias,
    residual,
    out,
    positions,
    channels,
    frame,
    FRAMES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: POSITIONS positions of all frames."""
    at, valid, lanes = _share(positions, channels, POSITIONS, COLUMNS)
    added = _read(bias, lanes, lanes < channels)
    p0 = _read(s0, at, valid)
    p1 = _read(s1, at, valid)
    p2 = _read(s2, at, valid)
    p3 = _read(s3, at, valid)
    if FRAMES == 4:
        f0, f1, f2, f3 = _join_4(p0, p1, p2, p3, _read(s4, at, valid), _read(s5, at, valid))
        if RESIDUAL:
            f2 += _read(residual + 2 * frame, at, valid)
            f3 += _read(residual + 3 * frame, at, valid)
        _write(out + 2 * frame, at, valid, f2 + added)
        _write(out + 3 * frame, at, valid, f3 + added)
    else:
        f0, f1 = _join_2(p0, p1, p2, p3)
    if RESIDUAL:
        f0 += _read(residual, at, valid)
        f1 += _read(residual + frame, at, valid)
    _write(out, at, valid, f0 + added)
    _write(out + frame, at, valid, f1 + added)


def norm_silu_tile_triton(
    sources: list[Tensor], bias: Tensor | None, gamma: Tensor, past: Tensor, tile: Tensor
) -> None:
    num_frames, products = _checked(sources, tile.shape[0] - _TAPS + 1, past, tile)
    if products and bias is None:
        raise ValueError("products are joined with their convolution's bias")
    positions, channels, shape = _shape_of(sources[0])
    _norm_silu_tile_kernel[(-(-positions // shape[0]),)](
        *_six(sources),
        gamma if bias is None else bias,
        gamma,
        past,
        tile,
        positions,
        channels,
        positions * channels,
        channels**0.5,
        FRAMES=num_frames,
        PRODUCTS=products,
        POSITIONS=shape[0],
        COLUMNS=shape[1],
    )


def join_tile_triton(
    products: list[Tensor], bias: Tensor, residual: Tensor | None, out: Tensor
) -> None:
    num_frames, joins = _checked(products, out.shape[0], out, residual)
    if not joins or num_frames == 1:
        raise ValueError(f"{len(products)} products are not those of {num_frames} frames")
    positions, channels, shape = _shape_of(products[0])
    _join_tile_kernel[(-(-positions // shape[0]),)](
        *_six(products),
        bias,
        out if residual is None else residual,
        out,
        positions,
        channels,
        positions * channels,
        FRAMES=num_frames,
        RESIDUAL=residual is not None,
        POSITIONS=shape[0],
        COLUMNS=shape[1],
    )


def _checked(sources: list[Tensor], num_frames: int, *others: Tensor | None) -> tuple[int, bool]:
    """T, and whether the sources are products."""
    if num_frames not in POINTS:
        raise ValueError(f"a tile has 1, 2 or 4 new frames, not {num_frames}")
    if len(sources) not in (num_frames, num_frames + _TAPS - 1):
        raise ValueError(f"{len(sources)} sources are neither frames nor products of {num_frames}")
    for tensor in (*sources, *others):
        if tensor is not None and (
            not tensor.is_contiguous() or tensor.shape[-3:] != sources[0].shape[-3:]
        ):
            raise ValueError("frames and products must be contiguous and of one size")
        if tensor is not None and tensor.numel() >= 1 << 31:
            raise ValueError("offsets are of 32 bits")
    return num_frames, len(sources) != num_frames


def _shape_of(frame: Tensor) -> tuple[int, int, tuple[int, int]]:
    """Positions, channels, and a program's share of both."""
    channels = frame.shape[-1]
    columns = next_power_of_two(channels)
    return frame.numel() // channels, channels, (max(1, _VALUES_PER_PROGRAM // columns), columns)


def _six(sources: list[Tensor]) -> list[Tensor]:
    """As many as the kernels have arguments; what a smaller tile lacks is not read."""
    return [*sources, *[sources[0]] * (6 - len(sources))]


@torch.library.custom_op(
    "characters::norm_silu_tile", mutates_args=("past", "tile"), device_types="cuda"
)
def norm_silu_tile(
    sources: list[Tensor], bias: Tensor | None, gamma: Tensor, past: Tensor, tile: Tensor
) -> None:
    norm_silu_tile_triton(sources, bias, gamma, past, tile)


@torch.library.custom_op("characters::join_tile", mutates_args=("out",), device_types="cuda")
def join_tile(products: list[Tensor], bias: Tensor, residual: Tensor | None, out: Tensor) -> None:
    join_tile_triton(products, bias, residual, out)


norm_silu_tile.register_kernel("cpu")(norm_silu_tile_reference)
join_tile.register_kernel("cpu")(join_tile_reference)


@norm_silu_tile.register_fake
def _(sources, bias, gamma, past, tile):
    return None


@join_tile.register_fake
def _(products, bias, residual, out):
    return None
