"""Times the video decoders that can read a configuration's latents, each by itself, I420 included.

    python -m characters_serve.bench.decode --config configs/characters-57b.yaml --out decode.json

Synthetic weights: speed does not depend on their values. Each decoder runs for some seconds
without a pause, because a GPU's clock falls under load; the first half is not counted. The last
line of the output, and the file, are one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from characters_serve.bench.origin import commit, report
from characters_serve.config import Config, ConfigError, Decoder, ModelConfig, load_config
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.engine.device import choose_device


def measure(config: Config, seconds: float) -> dict[str, Any]:
    device, dtype = choose_device(config.engine)
    torch.set_num_threads(config.engine.decoder_threads)
    return {
        "model": config.model.name,
        "picture": f"{config.model.width}x{config.model.height}",
        "chunk_period_ms": round(config.model.chunk_period_s * 1000, 2),
        "decoders": {
            model.decoder: _time(model, device, dtype, seconds) for model in readers(config.model)
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "commit": commit(),
        "command": shlex.join(sys.orig_argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def readers(model: ModelConfig) -> list[ModelConfig]:
    """The same model with each video decoder that reads its latents."""
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


def _time(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, Any]:
    decoder = ChunkDecoder(model, device, dtype)
    decoder.start(np.random.default_rng(0).bytes(model.height * model.width * 3))
    latent = torch.randn(model.video_tokens, model.token_channels).to(device)
    times_ms: list[float] = []
    begun_s = time.perf_counter()
    while len(times_ms) < 4 or time.perf_counter() - begun_s < seconds:
        started_s = time.perf_counter()
        decoder.decode(latent)  # waits for the device: the frames are on the host
        times_ms.append((time.perf_counter() - started_s) * 1000)
    counted = times_ms[len(times_ms) // 2 :]
    return {
        "decode_ms_median": round(float(np.median(counted)), 2),
        "decode_ms_p99": round(float(np.percentile(counted, 99)), 2),
        "chunks": len(counted),
        "memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
        if device.type == "cuda"
        else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Times a configuration's possible decoders.")
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each decoder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(load_config(options.config, options.overrides), options.seconds)
    report(result, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
