"""An open model's stream is timed whole, on one rank or two, and the result names its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from characters_serve.bench.stream import measure
from characters_serve.bench.waterfall import main
from characters_serve.config import Config, EngineConfig, ModelConfig, Optimizations
from tests.unit import small_causal_wan
from tests.unit.test_open_engine import SMALL as TALKER

FILM = small_causal_wan.causal_wan(
    decoder="wan21",
    decoder_dim=4,
    window_chunks=1,
    latents_per_chunk=1,
    frames_per_chunk=4,
    causal_wan={"window_latents": 3, "sink_latents": 1, "sink_distance": "constant"},
)
FAST = dict.fromkeys(("fp8_gemm", "fp8_kv_cache", "fused_pre_attention", "fused_norm_quant"), True)


def test_a_films_figures_and_their_origin() -> None:
    result = measured(FILM, 2, dedicated=True)
    assert result["tensor_parallel"] == 2 and result["decoder_overlapped"] is True
    assert result["passes"] == 5 and result["frames_per_chunk"] == 4
    assert 0 < result["session_ready_ms"] < result["first_frame_ms"]
    # A chunk is shown after its step and its decoding.
    parts = result["step_ms_median"] + result["decode_ms_median"]
    assert result["chunk_latency_ms_p99"] >= 0.99 * min(parts, result["chunk_latency_ms_median"])
    assert result["chunks"] >= 2 and result["fps"] > 0 and result["saturated"] == 0
    for origin in ("device", "torch", "command", "commit", "date", "decoder", "optimizations"):
        assert result[origin]


def test_a_talkers_stream_is_timed() -> None:
    pytest.importorskip("transformers", reason="the extra `open` is not installed")
    result = measured(TALKER, 1, dedicated=False)
    assert result["decoder_overlapped"] is False
    assert result["passes"] == 4 and result["fps_needed"] == 25 and result["fps"] > 0


def measured(model: ModelConfig, ranks: int, dedicated: bool) -> dict[str, Any]:
    threads = torch.get_num_threads()
    optimizations = Optimizations(dedicated_decoder=dedicated, **FAST)
    engine = EngineConfig(
        device="cpu", dtype="float32", tensor_parallel=ranks, degraded_passes=4, idle_passes=4
    )
    try:
        return measure(Config(model=model, optimizations=optimizations, engine=engine), 0.0)
    finally:
        torch.set_num_threads(threads)


def test_only_whole_streams_of_open_models_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    for what, more in (("waterfall", []), ("step", ["--shard-of", "2"])):
        with pytest.raises(SystemExit):
            main(what, ["--config", "configs/self-forcing-1.3b.yaml", *more])
        assert "is timed by `bench step`" in capsys.readouterr().err
