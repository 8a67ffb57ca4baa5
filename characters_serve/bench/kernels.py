"""Times each kernel of the step by itself, at one rank's shape, against what it cannot go below.

    characters bench kernels --config configs/characters-57b.yaml --shard-of 4 --out kernels.json

Every case is a captured chain of calls over buffers that take turns, so that they do not all stay
in the GPU's cache. `share` is bandwidth over a copy's measured here, or TFLOP/s over FP8's peak.
Cases named `kernel[...]` try other tiles of the same kernel. Needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from characters_kernels import attention, delta_rotate, gelu_quant, linear_fp8, ring_store
from characters_kernels import residual_norm as norm
from characters_kernels.fp8 import E4M3
from characters_serve.bench.origin import device_name, origin, report, save
from characters_serve.bench.rank_step import graph_ms, random_e4m3, shard_of
from characters_serve.config import Config, ModelConfig

_TURNS: Final = 4
_CHAIN: Final = 24
_FP8_PEAK: Final = 1979e12
"""Dense e4m3 of an H100 or H200, by the vendor's data sheet."""
_ROTATED_CACHES: Final = 24
_SECONDS: Final = 0.25


@dataclass(frozen=True)
class Case:
    """calls: one for each turn. moved: bytes that a call must read and write. flops: of a call."""

    name: str
    calls: Sequence[Callable[[], object]]
    moved: float = 0.0
    flops: float = 0.0


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (graph_ms(lambda: target.copy_(source), _SECONDS) / 1000)


def measured(case: Case, bandwidth: float) -> dict[str, Any]:
    def chain() -> None:
        for index in range(_CHAIN):
            case.calls[index % len(case.calls)]()

    call_us = graph_ms(chain, _SECONDS) / _CHAIN * 1000
    result = {"kernel": case.name, "us": round(call_us, 2)}
    if case.moved:
        gigabytes = case.moved / call_us / 1e3
        result |= {"gb_s": round(gigabytes), "share": round(gigabytes * 1e9 / bandwidth, 3)}
    if case.flops:
        rate = case.flops / call_us * 1e6
        result |= {"tflops": round(rate / 1e12), "share": round(rate / _FP8_PEAK, 3)}
    return result


def cases(model: ModelConfig, device: torch.device) -> Iterator[Case]:
    yield from _norm_cases(model, device)
    yield from _store_cases(model, device)
    yield from _gelu_cases(model, device)
    yield from _rotate_cases(model, device)
    yield from _attention_cases(model, device)
    yield from _linear_cases(model, device)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _counter(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _norm_cases(model: ModelConfig, device: torch.device) -> Iterator[Case]:
    tokens, dim = model.tokens_per_chunk, model.dim
    saturated, scale = _counter(device), torch.full((1,), 0.05, device=device)
    turns = [
        (
            _random(device, tokens, dim),
            0.01 * _random(device, tokens, dim),
            *0.1 * _random(device, 3, dim),
            1e-6,
            scale,
            torch.zeros(tokens, dim, dtype=E4M3, device=device),
            saturated,
        )
        for _ in range(_TURNS)
    ]
    moved = tokens * dim * (2 + 2 + 2 + 1)
    yield Case("residual_norm", [partial(norm.residual_norm, *turn) for turn in turns], moved)
    for warps in (4, 16, 32):
        call = partial(norm.residual_norm_triton, num_warps=warps)
        calls = [partial(call, *turn) for turn in turns]
        yield Case(f"residual_norm[warps={warps}]", calls, moved)


def _store_cases(model: ModelConfig, device: torch.device) -> Iterator[Case]:
    tokens, heads, head_dim = model.tokens_per_chunk, model.num_heads, model.head_dim
    inner, saturated = heads * head_dim, _counter(device)
    angles = torch.rand(tokens, head_dim // 2, device=device)
    weights = torch.ones(2, head_dim, dtype=torch.bfloat16, device=device)
    scales = torch.full((3, heads), 0.05, device=device)
    slot = torch.tensor(model.prefix_slots, device=device)
    turns = [
        (
            _random(device, tokens, 3 * inner + model.mlp_dim),
            *weights,
            angles.cos(),
            angles.sin(),
            slot,
            *scales,
            1e-6,
            *(
                torch.zeros(rows, heads, head_dim, dtype=E4M3, device=device)
                for rows in (tokens, model.cache_slots, model.cache_slots)
            ),
            saturated,
        )
        for _ in range(_TURNS)
    ]
    moved = tokens * inner * 3 * (2 + 1)
    yield Case("ring_store", [partial(ring_store.ring_store, *turn) for turn in turns], moved)
    for rows in (4, 8, 32):
        call = partial(ring_store.ring_store_triton, tokens_per_program=rows)
        yield Case(f"ring_store[tokens={rows}]", [partial(call, *turn) for turn in turns], moved)


def _gelu_cases(model: ModelConfig, device: torch.device) -> Iterator[Case]:
    tokens, inner = model.tokens_per_chunk, model.num_heads * model.head_dim
    total, saturated = inner + model.mlp_dim, _counter(device)
    scale = torch.full((1,), 0.05, device=device)
    turns = [
        (
            _random(device, tokens, inner),
            _random(device, tokens, 3 * inner + model.mlp_dim)[:, 3 * inner :],
            scale,
            torch.zeros(tokens, total, dtype=E4M3, device=device),
            saturated,
        )
        for _ in range(_TURNS)
    ]
    moved = tokens * total * (2 + 1)
    yield Case("gelu_quant", [partial(gelu_quant.gelu_quant, *turn) for turn in turns], moved)
    for columns in (512, 1024, 4096):
        call = partial(gelu_quant.gelu_quant_triton, columns_per_program=columns)
        calls = [partial(call, *turn) for turn in turns]
        yield Case(f"gelu_quant[columns={columns}]", calls, moved)


def _rotate_cases(model: ModelConfig, device: torch.device) -> Iterator[Case]:
    """The result's time is that of a tenth of the 57B caches; a reset rotates all of them."""
    shape = (_ROTATED_CACHES, model.cache_slots, model.num_heads, model.head_dim)
    keys, saturated = random_e4m3(device, *shape), _counter(device)
    angles = 0.01 * torch.arange(model.rope_split[0] // 2, device=device)
    inputs = (keys, angles.cos(), angles.sin(), model.prefix_slots, saturated)
    turned = keys[:, model.prefix_slots :].numel()
    moved = turned // 2 * 2  # half of each key is read and written
    name = f"delta_rotate, {_ROTATED_CACHES} of {model.num_blocks * model.num_caches} caches"
    yield Case(name, [partial(delta_rotate.delta_rotate, *inputs)], moved)
    for rows in (16, 32, 128):
        call = partial(delta_rotate.delta_rotate_triton, *inputs, keys_per_program=rows)
        yield Case(f"delta_rotate[keys={rows}]", [call], moved)


def _attention_cases(model: ModelConfig, device: torch.device) -> Iterator[Case]:
    heads = (model.num_heads, model.head_dim)
    scales = torch.full((3, model.num_heads), 0.05, device=device)
    turns = [
        (
            random_e4m3(device, model.tokens_per_chunk, *heads),
            random_e4m3(device, model.cache_slots, *heads),
            random_e4m3(device, model.cache_slots, *heads),
            *scales,
        )
        for _ in range(_TURNS)
    ]
    flops = 4.0 * model.tokens_per_chunk * model.cache_slots * heads[0] * heads[1]
    if attention.backend(device) == "fa3":
        calls = [partial(attention.fp8_attention_fa3, *turn) for turn in turns]
        yield Case("attention fa3", calls, flops=flops)
    for queries, keys, warps, stages in ((128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 4, 3)):
        call = partial(
            attention.launch_attention,
            queries_per_program=queries,
            keys_at_once=keys,
            num_warps=warps,
            num_stages=stages,
        )
        name = f"attention triton[{queries}x{keys}, warps={warps}, stages={stages}]"
        yield Case(name, [partial(call, *turn) for turn in turns], flops=flops)


def _linear_cases(model: ModelConfig, device: torch.device) -> Iterator[Case]:
    inner, one = model.num_heads * model.head_dim, torch.full((1,), 0.05, device=device)
    shapes = {
        "in": (3 * inner + model.mlp_dim, model.dim),
        "out": (model.dim, inner + model.mlp_dim),
    }
    padded = -(-model.tokens_per_chunk // 16) * 16
    for name, (columns, depth) in shapes.items():
        weights = [random_e4m3(device, columns, depth) for _ in range(_TURNS)]
        flops = 2.0 * model.tokens_per_chunk * columns * depth
        for rows in sorted({model.tokens_per_chunk, padded}):
            x = random_e4m3(device, rows, depth)
            calls = [
                partial(linear_fp8.linear_fp8, x, weight, one, one, torch.bfloat16)
                for weight in weights
            ]
            yield Case(f"linear {name}, {rows} rows", calls, flops=flops)
        for tile, warps, stages in (
            ((128, 256, 128), 8, 3),
            ((128, 256, 64), 8, 4),
            ((128, 128, 128), 4, 3),
            ((64, 256, 128), 4, 3),
        ):
            call = partial(
                linear_fp8.linear_fp8_triton, tile=tile, num_warps=warps, num_stages=stages
            )
            calls = [partial(call, x, weight, one, one, torch.bfloat16) for weight in weights]
            yield Case(f"linear {name} triton{list(tile)}", calls, flops=flops)


def _row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['kernel']:44} {row['error']}"
    rate = f"{row['gb_s']:>7} GB/s" if "gb_s" in row else f"{row['tflops']:>7} TF/s"
    return f"{row['kernel']:44}{row['us']:>9.2f} us{rate} {row['share']:6.1%}"


def run(config: Config, options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise SystemExit("characters bench kernels: torch sees no CUDA GPU")
    device = torch.device("cuda")
    model = shard_of(config.model, options.shard_of)
    bandwidth = copy_bandwidth(device)
    result: dict[str, Any] = {
        "model": model.name,
        "shard_of": options.shard_of,
        "device": device_name(device),
        "copy_gb_s": round(bandwidth / 1e9),
        **origin(),
        "kernels": [],
    }
    for case in cases(model, device):
        try:
            row = measured(case, bandwidth)
        except RuntimeError as error:  # a tile that this GPU has no room for
            row = {"kernel": case.name, "error": str(error).splitlines()[0][:200]}
        result["kernels"].append(row)
        rate = f"{row['gb_s']:>7} GB/s" if "gb_s" in row else f"{row.get('tflops', '-'):>7} TF/s"
        share = row.get("share", 0.0)
        sys.stdout.write(
            f"{case.name:44}{row.get('us', row.get('error'))!s:>9} us{rate} {share:6.1%}\n"
        )
        sys.stdout.flush()
        save(result, options.out)
    report(result, options.out)
    return 0
