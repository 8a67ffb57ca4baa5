"""Turns the step's optimisations on one by one, on one rank's share, and measures each set.

    characters bench waterfall --config configs/characters-57b.yaml --shard-of 4 --out tp4.json

The first bar is the plain path in bf16, the third the launch form in FP8: every cached key rotated
and converted again at each of its reads, the window shifted by copying. The last line of the
output, and the file, are one JSON object; after each bar the file holds what is known by then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from characters_serve.bench import gemm_all_reduce, kernels, stream
from characters_serve.bench.origin import device_name, origin, report, save
from characters_serve.bench.picture import draw_waterfall
from characters_serve.bench.rank_step import (
    CATEGORIES,
    RankStep,
    by_category,
    describe,
    floor_ms,
    summary,
    trace,
    upkeep_ms,
)
from characters_serve.cli import config_options
from characters_serve.config import Config, Optimizations, load_config

RUNGS: Final = (
    "plain",
    "fp8_gemm",
    "fp8_kv_cache",
    "write_time_rope",
    "ring_cache",
    "precomputed_modulation",
    "compile",
    "fused_norm_quant",
    "fused_pre_attention",
    "cuda_graphs",
)
_FLOOR_CALLS: Final = 60
_RESETS: Final = 5
_RESET_STEPS: Final = 4


def ladder(last: Optimizations) -> list[tuple[str, Optimizations]]:
    """From everything off to `last`, one flag more each time; flags off in `last` are left out."""
    flags = dict.fromkeys(Optimizations.model_fields, False)
    rungs = [("plain", Optimizations(**flags))]
    for name in RUNGS[1:]:
        if getattr(last, name):
            flags[name] = True
            rungs.append((name, Optimizations(**flags)))
    return rungs


def waterfall(
    config: Config, options: argparse.Namespace, rungs: list[tuple[str, Optimizations]]
) -> dict[str, Any]:
    rank = RankStep(config, options.shard_of)
    calls = min(_FLOOR_CALLS, rank.config.all_reduces_per_step)
    result: dict[str, Any] = describe(rank, options.shard_of) | {
        "device": device_name(rank.device),
        **origin(),
        "seconds": options.seconds,
    }
    if rank.device.type == "cuda":
        result["floor"] = floor_ms(rank, calls)
    bars: list[dict[str, Any]] = []
    result["waterfall"] = bars
    for index, (name, optimizations) in enumerate(rungs):
        is_last = index == len(rungs) - 1
        run = rank.started(optimizations)
        times_ms = run.sustained_ms(options.seconds if is_last else options.rung_seconds)
        bar: dict[str, Any] = {"rung": name} | summary(times_ms, rank.config)
        bar |= {
            "by_category": None,
            "eager_steps": run.denoiser.eager_steps,
            "saturated": run.denoiser.saturated,
        }
        bars.append(bar)
        save(result, options.out)
        bar["by_category"] = by_category(run)
        if options.profile and is_last:
            trace(run, options.profile)
        sys.stdout.write(_row(bar) + "\n")
        sys.stdout.flush()
        del run
        save(result, options.out)
    last = rungs[-1][1]
    first_bar, last_bar = bars[0], bars[-1]
    result |= {
        "step_ms_median": last_bar["step_ms_median"],
        "step_ms_p99": last_bar["step_ms_p99"],
        "plain_step_ms_median": first_bar["step_ms_median"],
        "by_category": last_bar["by_category"],
    }
    save(result, options.out)
    frequent = rank.started(last, reset_steps=_RESET_STEPS)
    result["reset_step_extra_ms"] = round(frequent.reset_extra_ms(_RESETS), 2)
    del frequent
    save(result, options.out)
    result["cache_upkeep_ms"] = round(upkeep_ms(rank, last, calls), 2)
    save(result, options.out)
    launch = dict(rungs).get("fp8_kv_cache", rungs[0][1])
    result["plain_cache_upkeep_ms"] = round(upkeep_ms(rank, launch, calls), 2)
    return result


def _row(bar: dict[str, Any]) -> str:
    spent = bar["by_category"] or {}
    shares = "  ".join(f"{name} {spent[name]:.1f}" for name in CATEGORIES if name in spent)
    return (
        f"{bar['rung']:24}{bar['step_ms_median']:9.1f} ms  p99 {bar['step_ms_p99']:7.1f}"
        f"{bar['tflops']:8.0f} TF/s  {shares}"
    )


def main(what: str, arguments: Sequence[str]) -> int:
    """what: step (the plain path and the configuration's own flags; of an open model its stream,
    decoding included), waterfall, or kernels."""
    parser = argparse.ArgumentParser(prog=f"characters bench {what}", parents=[config_options()])
    parser.add_argument(
        "--shard-of", type=int, default=1, metavar="N", help="one rank's share of N, no network"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of the last run")
    parser.add_argument("--rung-seconds", type=float, default=3.0, help="of each run before it")
    parser.add_argument("--out", type=Path, help="the JSON to write")
    parser.add_argument("--picture", type=Path, help="the PNG to draw")
    parser.add_argument("--profile", type=Path, help="one step's trace, for Perfetto")
    if what == "kernels":
        parser.add_argument("--op", choices=["gemm_all_reduce"], help="of several GPUs; its own")
        parser.add_argument("--ranks", type=int, default=2, help="of --op, each with its GPU")
        parser.add_argument("--sweep-seconds", type=float, default=0.0, help="of --op's plans")
    options = parser.parse_args(arguments)
    config = load_config(options.config, options.set)
    if config.model.family != "characters":
        if what != "step" or options.shard_of != 1:
            parser.error(f"family {config.model.family} is timed by `bench step`, as a whole")
        return stream.run(config, options)
    if what == "kernels":
        if options.op == "gemm_all_reduce":
            return gemm_all_reduce.run(config, options)
        return kernels.run(config, options)
    rungs = ladder(config.optimizations)
    if what == "step":
        rungs = rungs[:1] + rungs[1:][-1:]
    torch.set_num_threads(config.engine.rank_threads)
    result = waterfall(config, options, rungs)
    report(result, options.out)
    if options.picture:
        draw_waterfall(result, config.model.chunk_period_s * 1000, options.picture)
    return 0
