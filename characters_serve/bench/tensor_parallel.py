"""Times the step of a whole tensor-parallel group: each rank with its shard, and all their sums.

    python -m characters_serve.bench.tensor_parallel --config configs/characters-57b.yaml --ranks 2

In: a configuration and a number of ranks. Out: what a step takes, sustained, from its packed input
on rank 0 to its latent in host memory. The ranks are processes, and take rank 0's orders as a
serving group's do. Where the flags sum the steady steps in shared memory, the same group is timed
with the plain collective too: `unfused_step_ms_median`. The last line of the output, and the file,
are one JSON object.

Imports no sockets and no media, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from characters_serve.bench.members import SETTLE_SHARE, Member, following
from characters_serve.bench.origin import origin, report
from characters_serve.cli import config_options
from characters_serve.config import Config, load_config
from characters_serve.engine.ranks import Order
from characters_serve.engine.steady_sum import SteadySum, share_sums, use
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.shard import deal


class StepMember(Member):
    """One rank, with a session under way and its window full."""

    def __init__(self, config: Config, folder: Path, rank: int) -> None:
        super().__init__(config, folder, rank)
        assert isinstance(self.generator, CharacterDiT)
        self.network, self._model = self.generator, config.model
        self.steady_sum = share_sums(self.network, config.optimizations, self.ranks)
        self._start()

    def _start(self) -> None:
        model = self._model
        random = torch.Generator(self.device).manual_seed(0)
        size = (1, 3, model.height, model.width)
        image = torch.rand(size, device=self.device, generator=random)
        words = (1, model.prompt_slots, model.prompt_dim)
        prompt = torch.randn(words, device=self.device, generator=random)
        self.denoiser.start(image, 0, prompt if model.prompt_slots else None)
        for _ in range(model.window_chunks + 1):
            self.step()

    def sum_plainly(self, steady_sum: SteadySum) -> None:
        """A new session, summed by the plain collective."""
        self.denoiser.release()
        use(self.network, steady_sum.plain)
        self._start()

    def lead(self, seconds: float) -> list[float]:
        """Milliseconds of each step of a sustained run, as rank 0 sees it."""
        random = torch.Generator().manual_seed(0)
        self.packed.host.copy_(0.1 * torch.randn(self.packed.host.shape, generator=random))
        times_ms: list[float] = []
        started_s = time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_s) < seconds or not times_ms:
            self.packed.upload()
            self.ranks.give(Order.STEP, self.packed.host)
            self.step().cpu()
            if elapsed_s >= seconds * SETTLE_SHARE:
                times_ms.append((time.perf_counter() - started_s - elapsed_s) * 1000)
        if self.steady_sum is not None:
            self.steady_sum.check()
        self.ranks.give(Order.MESSAGE, self.packed.host)
        return times_ms

    def follow(self) -> None:
        """Until rank 0 ends the run."""
        while self.ranks.take(self.packed.host) is Order.STEP:
            self.packed.upload()
            self.step()


def _follow(config_json: str, folder: Path, rank: int) -> None:
    member = StepMember(Config.model_validate_json(config_json), folder, rank)
    member.follow()
    if member.steady_sum is not None:
        member.sum_plainly(member.steady_sum)
        member.follow()
    member.leave()


def measure(config: Config, seconds: float) -> dict[str, Any]:
    """When a rank of the group dies: raises PeerLost, as the fused sum does at the run's end; or
    NCCL ends the process."""
    model, size = config.model, config.engine.tensor_parallel
    with following(config, _follow) as folder:
        leader = StepMember(config, folder, 0)
        times_ms = leader.lead(seconds)
        unfused_ms: list[float] = []
        plain_sums = 0
        if leader.steady_sum is not None:
            plain_sums = leader.steady_sum.plain_calls
            leader.sum_plainly(leader.steady_sum)
            unfused_ms = leader.lead(seconds)
        leader.leave()
    step_ms = float(np.median(times_ms))
    on_gpu = leader.device.type == "cuda"
    result = {
        "model": model.name,
        "weights": model.weights,
        "ranks": size,
        "heads": [len(shard.heads) for shard in deal(model, size)],
        "mlp_columns": [len(shard.mlp_columns) for shard in deal(model, size)],
        "blocks": model.num_blocks,
        "rank0_params": leader.parameters,
        "all_reduce": _collective(config, on_gpu),
        "switch_reduction": config.optimizations.in_switch_reduction,
        # Calls that the flags would have summed in shared memory, had they had the steady shape.
        "plain_sums": plain_sums,
        # 0: peer to peer, and NCCL reduces nothing in the switch either.
        "nccl_nvls_enable": os.environ.get("NCCL_NVLS_ENABLE", "not set"),
        "optimizations": config.optimizations.model_dump(),
        "steps": len(times_ms),
        "step_ms_median": round(step_ms, 2),
        "step_ms_p99": round(float(np.percentile(times_ms, 99)), 2),
        "fps": round(1000 * model.frames_per_chunk / step_ms, 2),
        "chunk_period_ms": round(model.chunk_period_s * 1000, 2),
        "device": torch.cuda.get_device_name(leader.device) if on_gpu else "cpu",
        "dtype": str(leader.dtype).removeprefix("torch."),
        **origin(),
    }
    if unfused_ms:
        result["unfused_step_ms_median"] = round(float(np.median(unfused_ms)), 2)
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(leader.device)
        result["rank0_memory_gb"] = round(peak / 1e9, 1)
    return result


def _collective(config: Config, on_gpu: bool) -> str:
    if config.optimizations.fused_gemm_all_reduce:
        return "fused"
    if config.optimizations.two_shot_all_reduce:
        return "two_shot"
    return "nccl" if on_gpu else "gloo"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Times the step of a tensor-parallel group.", parents=[config_options()]
    )
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=8.0, help="of the sustained run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    overrides = [*(options.set or []), f"engine.tensor_parallel={options.ranks}"]
    result = measure(load_config(options.config, overrides), options.seconds)
    report(result, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
