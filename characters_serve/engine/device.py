"""In: the engine's configuration. Out: the device and number format that a process computes in.

Knows nothing of messages, so that benchmarks run on a bare GPU machine.
"""

from __future__ import annotations

from pathlib import Path

import torch

from characters_serve.config import ConfigError, EngineConfig


def choose_device(engine: EngineConfig, gpu: int = 0) -> tuple[torch.device, torch.dtype]:
    """`auto` is bf16 where the hardware multiplies it: on GPUs, and on CPUs with AMX.

    gpu: which one, in the order in which the process sees them; each rank has its own. Raises
    ConfigError where there is none.

    On one Sapphire Rapids core the tiny model's step took 51 ms in bf16 and 75 in float32, its
    latents 0.6 % apart; decoding 44 and 61 ms (see ChunkDecoder). Without matrix units bf16 is
    slower than float32.
    """
    if engine.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but torch sees no CUDA GPU")
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and torch.cuda.is_available())
    if on_gpu and gpu >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(f"engine.tensor_parallel: torch sees {count} GPUs, {gpu + 1} are needed")
    device = torch.device("cuda", gpu) if on_gpu else torch.device("cpu")
    if engine.dtype == "auto":
        fast_bf16 = on_gpu or cpu_has_amx()
        return device, torch.bfloat16 if fast_bf16 else torch.float32
    return device, torch.float32 if engine.dtype == "float32" else torch.bfloat16


def decoder_gpu(engine: EngineConfig) -> int:
    """The first GPU after the ranks', so that decoding takes no time of theirs; where there is
    none, the last rank's."""
    return min(engine.tensor_parallel, max(torch.cuda.device_count() - 1, 0))


def cpu_has_amx() -> bool:
    try:
        return " amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
