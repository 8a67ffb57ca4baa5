"""Times the video decoders that can read a configuration's latents, plain and fast, I420 included.

    python -m characters_serve.bench.decode --config configs/characters-57b.yaml --out decode.json

Synthetic weights: speed does not depend on their values. Each decoder runs for some seconds
without a pause, because a GPU's clock falls under load; the first half is not counted. With
`--shard-of N` the largest of them runs instead while one rank of N denoises the next chunk: on a
second GPU where there is one, else on the same. What that adds to the rank's step is
`period_minus_diffusion_ms`. The last line of the output, and the file, are one JSON object.
Needs torch and pydantic only, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import torch

from characters_serve.bench.origin import origin, report, save
from characters_serve.bench.rank_step import RankStep
from characters_serve.cli import config_options
from characters_serve.config import Config, ConfigError, Decoder, ModelConfig, load_config
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.engine.decode_graph import CapturedStream
from characters_serve.engine.device import choose_device
from characters_serve.model.decoders.latent_video import LatentVideoDecoder
from characters_serve.model.weights import load_decoder

_KERNELS_NAMED: Final = 16
"""Of a fast chunk, those that take longest."""


def measure(
    config: Config, seconds: float, out: Path | None = None, *, shard_of: int = 0
) -> dict[str, Any]:
    """seconds: of each run. shard_of: see `--shard-of`; 0 times the decoders alone."""
    device, dtype = choose_device(config.engine)
    torch.set_num_threads(config.engine.decoder_threads)
    decoders: dict[str, Any] = {}
    result: dict[str, Any] = {
        "model": config.model.name,
        "picture": f"{config.model.width}x{config.model.height}",
        "chunk_period_ms": round(config.model.chunk_period_s * 1000, 2),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        **origin(),
    }
    models = readers(config.model)
    if shard_of:
        return result | beside_diffusion(config, models[0], seconds, shard_of)
    result["decoders"] = decoders
    for model in models:
        timed = _plain_and_fast(config, model, device, dtype, seconds)
        decoders[model.decoder] = timed
        fast_ms = timed["fast"]["decode_ms_median"]
        if model is models[0]:
            plain_ms = timed["plain"]["decode_ms_median"]
            result |= {"decode_ms_median": fast_ms, "plain_decode_ms_median": plain_ms}
        elif model.decoder == "taehv":
            result["taehv_decode_ms_median"] = fast_ms
        save(result, out)
    return result


def readers(model: ModelConfig) -> list[ModelConfig]:
    """The same model with each video decoder that reads its latents, the largest first."""
    found = []
    for decoder in get_args(Decoder):
        if decoder == "reference_warp":
            continue
        settings = model.model_dump() | {"decoder": decoder, "weights": "synthetic"}
        try:
            found.append(ModelConfig.model_validate(settings))
        except ValueError:
            continue  # another stride or number of channels
    if not found:
        raise ConfigError(f"no video decoder reads the latents of {model.name}")
    return found


def _plain_and_fast(
    config: Config, model: ModelConfig, device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, Any]:
    latent = torch.randn(model.video_tokens, model.token_channels).to(device)
    timed: dict[str, Any] = {}
    for name, fast in (("plain", False), ("fast", True)):
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        flags = config.optimizations.model_copy(update={"fast_decoder": fast})
        began_s = time.perf_counter()
        decoder = ChunkDecoder(model, device, dtype, flags)
        decoder.start(np.random.default_rng(0).bytes(model.height * model.width * 3))
        ready_s = time.perf_counter() - began_s
        # Each decode waits for the device: the frames are on the host.
        times_ms = _sustained_ms(lambda decoder=decoder: decoder.decode(latent), seconds)  # type: ignore[misc]
        timed[name] = {
            "decode_ms_median": round(float(np.median(times_ms)), 2),
            "decode_ms_p99": round(float(np.percentile(times_ms, 99)), 2),
            "chunks": len(times_ms),
            "ready_s": round(ready_s, 1),
        }
        if device.type == "cuda":
            gibibytes = torch.cuda.max_memory_allocated(device) / 2**30
            timed[name]["memory_gib"] = round(gibibytes, 2)
            timed[name]["kernels_ms"] = _kernels_ms(lambda decoder=decoder: decoder.decode(latent))  # type: ignore[misc]
        sys.stdout.write(f"{model.decoder:14}{name:6}{timed[name]['decode_ms_median']:9.2f} ms\n")
        sys.stdout.flush()
        del decoder
    return timed


def _sustained_ms(call: Callable[[], object], seconds: float) -> list[float]:
    """The second half of as many calls as fit."""
    times_ms: list[float] = []
    begun_s = time.perf_counter()
    while len(times_ms) < 4 or time.perf_counter() - begun_s < seconds:
        started_s = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - started_s) * 1000)
    return times_ms[len(times_ms) // 2 :]


def _kernels_ms(call: Callable[[], object]) -> dict[str, float]:
    """What the longest of a call's kernels take, together for each name, and all of them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
    spent: dict[str, float] = defaultdict(float)
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            spent[event.name[:120]] += event.device_time / 1000
    named = [("all", sum(spent.values())), *sorted(spent.items(), key=itemgetter(1))[::-1]]
    return {name: round(ms, 3) for name, ms in named[: _KERNELS_NAMED + 1]}


def beside_diffusion(
    config: Config, model: ModelConfig, seconds: float, ranks: int
) -> dict[str, Any]:
    """The rank's step alone, and the period of steps while the chunk before is decoded.

    Each period ends when the step's latent is there and the frames of the chunk before are on the
    host. The latent travels as it does between processes' devices, by a copy on the decoder's
    stream; the rank's own sockets are left out.
    """
    rank = RankStep(config, ranks)
    if rank.device.type != "cuda":
        raise ConfigError("--shard-of: decoding beside the diffusion needs a GPU")
    run = rank.started(config.optimizations)
    own_gpu = torch.cuda.device_count() > 1
    device = torch.device("cuda", 1) if own_gpu else rank.device
    network = load_decoder(model, device=device, dtype=rank.dtype, fused=True)
    assert isinstance(network, LatentVideoDecoder)
    stream = CapturedStream(network, model, device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    latent = torch.randn(model.video_tokens, model.token_channels, device=rank.device)

    def period() -> None:
        with torch.cuda.stream(side), torch.inference_mode():
            stream.replay(latent)
        run.step()
        with torch.cuda.stream(side), torch.inference_mode():
            for frame in stream.collect().numpy():
                frame.tobytes()

    step_ms = float(np.median(_sustained_ms(run.step, seconds)))
    period_ms = float(np.median(_sustained_ms(period, seconds)))
    return {
        "shard_of": ranks,
        "decoder_gpu": "its own" if own_gpu else "the rank's",
        "step_ms_median": round(step_ms, 2),
        "period_ms_median": round(period_ms, 2),
        "period_minus_diffusion_ms": round(period_ms - step_ms, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Times a configuration's possible decoders.", parents=[config_options()]
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for each run")
    parser.add_argument(
        "--shard-of", type=int, default=0, metavar="N", help="beside the steps of one rank of N"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = load_config(options.config, options.set)
    result = measure(config, options.seconds, options.out, shard_of=options.shard_of)
    report(result, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
