"""Which sums are made in shared memory: those of the steady shape, and no others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from characters_serve.config import ConfigError, EngineConfig, Optimizations
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.ranks import Ranks
from characters_serve.engine.steady_sum import SteadySum, share_sums, use
from characters_serve.model.fp8 import MatmulThenSum
from characters_serve.model.linear import alone
from characters_serve.model.steady import out_projection_rows
from characters_serve.model.weights import load_generator
from tests.unit.small_model import SMALL

CPU = torch.device("cpu")
STEPS = 3


@pytest.mark.parametrize("fused", [True, False])
def test_every_steady_sum_is_made_in_shared_memory_and_the_first_pass_is_counted(
    fused: bool,
) -> None:
    flags = Optimizations(fp8_gemm=True, fused_pre_attention=fused, fused_norm_quant=fused)
    dit = load_generator(SMALL, device=CPU, dtype=torch.float32)
    denoiser = Denoiser(dit, SMALL, flags)
    plain = MatmulThenSum(alone, torch.float32)
    shared: list[int] = []

    def steady(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        shared.append(x.shape[0])
        return plain(x, weight, x_scale, weight_scale)

    rows = out_projection_rows(SMALL, flags)
    total = SteadySum(rows, steady, plain)
    use(dit, total)
    denoiser.start(torch.rand(1, 3, SMALL.height, SMALL.width), seed=0)
    assert total.plain_calls == SMALL.num_blocks and not shared
    window = torch.zeros(dit.log_mel.window_samples)
    controls = torch.zeros(SMALL.frames_per_chunk, SMALL.num_controls)
    for _ in range(STEPS):
        denoiser.step(window, controls, len(SMALL.noise_levels))
    assert total.plain_calls == SMALL.num_blocks
    assert shared == [rows] * (SMALL.all_reduces_per_step * STEPS)


def test_without_a_flag_or_a_peer_nothing_is_shared(tmp_path: Path) -> None:
    dit = load_generator(SMALL, device=CPU, dtype=torch.float32)
    two = Ranks(EngineConfig(tensor_parallel=2), tmp_path, 0, CPU)
    assert share_sums(dit, Optimizations(fp8_gemm=True), two) is None
    one = Ranks(EngineConfig(), tmp_path, 0, CPU)
    assert share_sums(dit, Optimizations(fp8_gemm=True, fused_gemm_all_reduce=True), one) is None


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")]
)
def test_sums_in_the_switch_are_refused_where_multicast_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for other in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    ranks = Ranks(EngineConfig(tensor_parallel=2), tmp_path, 0, CPU)
    with pytest.raises(ConfigError, match=f"forbidden: {name}={value}"):
        ranks.share(16, multicast=True)


def test_sums_in_the_switch_are_refused_where_the_links_have_no_multicast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.delenv(name, raising=False)
    mapped = SimpleNamespace(buffer_ptrs=[0, 0], multicast_ptr=0)
    symmetric_memory = "torch.distributed._symmetric_memory"
    monkeypatch.setattr(f"{symmetric_memory}.empty", lambda size, **_: torch.zeros(size))
    monkeypatch.setattr(f"{symmetric_memory}.rendezvous", lambda *_: mapped)
    monkeypatch.setattr("characters_serve.engine.ranks._all_ranks", lambda: None)
    monkeypatch.setattr("characters_serve.engine.ranks.dist.all_reduce", lambda _: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    ranks = Ranks(EngineConfig(tensor_parallel=2), tmp_path, 0, CPU)
    with pytest.raises(ConfigError, match="needs multicast, which these GPUs do not have"):
        ranks.share(16, multicast=True)
