"""The step benchmark measures the real model and says what it measured."""

from __future__ import annotations

import pytest
import torch

from characters_serve.bench import waterfall
from characters_serve.bench.step import measure
from characters_serve.config import Config, EngineConfig, ModelConfig


def test_result_names_its_numbers_and_their_origin() -> None:
    threads = torch.get_num_threads()
    model = ModelConfig(weights="synthetic", noise_levels=(1.0, 0.75, 0.5, 0.25))
    config = Config(model=model, engine=EngineConfig(device="cpu"))
    try:
        result = measure(config, num_steps=3)
    finally:
        torch.set_num_threads(threads)
    assert set(result["passes"]) == {"4", "2"}
    full, degraded = result["passes"]["4"], result["passes"]["2"]
    assert full["sum_ms_median"] > full["chunk_ms_median"] > degraded["chunk_ms_median"] > 0
    assert full["decode_ms_median"] > 0
    for origin in ("device", "torch", "command", "commit", "date", "rank_threads", "weights"):
        assert result[origin]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="has the GPUs")
def test_the_fused_sum_is_not_measured_without_two_gpus() -> None:
    with pytest.raises(SystemExit, match="2 GPUs are needed, torch sees"):
        waterfall.main("kernels", ["--op", "gemm_all_reduce"])
