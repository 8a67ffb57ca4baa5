"""Times one step of a configuration: denoising and decoding, each by itself, on this machine.

    python -m characters_serve.bench.step --config configs/tiny.yaml --out tiny_cpu.json

The last line of the output, and the file, are one JSON object that says what was measured, with
which command, on which commit and machine. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from characters_serve.bench.origin import device_name, origin, report
from characters_serve.cli import config_options
from characters_serve.config import Config, load_config
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.device import choose_device
from characters_serve.engine.generator import load_family, load_prompt
from characters_serve.engine.reference_image import image_tensor
from characters_serve.engine.step_input import PackedStep
from characters_serve.messages import StepInput

_WARM_UP = 10


def measure(config: Config, num_steps: int) -> dict[str, Any]:
    model = config.model
    device, dtype = choose_device(config.engine)
    generator = load_family(model, device=device, dtype=dtype)
    prompt = load_prompt(model, device)
    denoiser = Denoiser(generator, model, config.optimizations, prompt=prompt)
    decoder = ChunkDecoder(model, device, dtype, config.optimizations)
    packed = PackedStep(model, device)
    random = np.random.default_rng(0)
    image_rgb = random.integers(0, 256, model.height * model.width * 3, np.uint8).tobytes()
    window = random.normal(0, 3000, model.audio_window_samples).astype(np.int16).tobytes()
    controls = random.uniform(-1, 1, (model.frames_per_chunk, model.num_controls))
    latent = torch.randn(model.video_tokens, model.token_channels).to(device)

    def denoise(passes: int) -> None:
        controls_f32 = controls.astype(np.float32).tobytes()
        packed.fill(StepInput("bench", 0, 0, window, b"", controls_f32, 1, 0.0, False, passes))
        denoiser.step(packed.audio_window, packed.controls, packed.passes).cpu()

    torch.set_num_threads(config.engine.decoder_threads)
    decoder.start(image_rgb)
    decode_ms = _time(lambda: decoder.decode(latent), num_steps)
    torch.set_num_threads(config.engine.rank_threads)
    denoiser.start(image_tensor(image_rgb, model, device), seed=0)
    by_passes = {}
    for passes in sorted({config.passes, config.engine.degraded_passes}, reverse=True):
        step_ms = _time(lambda passes=passes: denoise(passes), num_steps)  # type: ignore[misc]
        by_passes[str(passes)] = {
            "chunk_ms_median": round(float(np.median(step_ms)), 2),
            "chunk_ms_p99": round(float(np.percentile(step_ms, 99)), 2),
            "decode_ms_median": round(float(np.median(decode_ms)), 2),
            "decode_ms_p99": round(float(np.percentile(decode_ms, 99)), 2),
            "sum_ms_median": round(float(np.median(step_ms) + np.median(decode_ms)), 2),
        }
    return {
        "model": model.name,
        "weights": model.weights,
        "chunk_period_ms": round(model.chunk_period_s * 1000, 2),
        "params": sum(parameter.numel() for parameter in generator.parameters()),
        "steps": num_steps,
        "passes": by_passes,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "rank_threads": config.engine.rank_threads,
        "decoder_threads": config.engine.decoder_threads,
        **origin(),
    }


def _time(call: Callable[[], object], num_calls: int) -> list[float]:
    """Milliseconds of each call, after a warm-up; calls return once the device is done."""
    times_ms = []
    for _ in range(_WARM_UP + num_calls):
        started_s = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - started_s) * 1000)
    return times_ms[_WARM_UP:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Times one step of a configuration.", parents=[config_options()]
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(load_config(options.config, options.set), options.steps)
    report(result, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
