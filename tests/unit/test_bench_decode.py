"""The decoder benchmark measures each decoder that reads a model's latents, and no other."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from characters_serve.bench.decode import measure, readers
from characters_serve.config import Config, ConfigError, EngineConfig, ModelConfig
from tests.unit.small_model import SMALL

WAN22 = SMALL.model_copy(
    update={"latent_stride": 16, "latent_channels": 48, "patch": 2, "decoder_dim": 4}
)


def test_only_what_reads_the_latents_is_measured() -> None:
    assert [model.decoder for model in readers(WAN22)] == ["wan22", "taehv", "taehv_super"]
    with pytest.raises(ConfigError, match="reads the latents of tiny"):
        readers(ModelConfig())


def test_result_names_its_numbers_and_their_origin() -> None:
    threads = torch.get_num_threads()
    try:
        result = measure(Config(model=WAN22, engine=EngineConfig(device="cpu")), seconds=0.1)
    finally:
        torch.set_num_threads(threads)
    assert set(result["decoders"]) == {"wan22", "taehv", "taehv_super"}
    for decoder in result["decoders"].values():
        for timed in (decoder["plain"], decoder["fast"]):
            assert timed["decode_ms_p99"] >= timed["decode_ms_median"] > 0
    wan22, taehv = result["decoders"]["wan22"], result["decoders"]["taehv"]
    assert result["decode_ms_median"] == wan22["fast"]["decode_ms_median"]
    assert result["plain_decode_ms_median"] == wan22["plain"]["decode_ms_median"]
    assert result["taehv_decode_ms_median"] == taehv["fast"]["decode_ms_median"]
    for origin in ("device", "dtype", "torch", "command", "commit", "date", "picture"):
        assert result[origin]


def test_gpu_benchmarks_need_no_package_of_the_server() -> None:
    """They run on bare GPU machines, where only torch and a few others are."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('zmq', 'msgspec', 'av', 'aiortc')));"
        "import characters_serve.cli;"
        "import characters_serve.bench.decode, characters_serve.bench.waterfall"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
