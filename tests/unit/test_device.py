"""Which GPU each process of a group computes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from characters_serve.config import EngineConfig
from characters_serve.engine.device import choose_device, decoder_gpu
from characters_serve.engine.gpu_memory import tell_gpu_memory
from characters_serve.messages import GpuMemory


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    return count


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_each_rank_has_a_gpu_of_its_own_and_a_missing_one_is_said(gpus: int) -> None:
    engine = EngineConfig(device="cuda")
    assert [choose_device(engine, rank)[0] for rank in range(gpus)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    with pytest.raises(ValueError, match="torch sees 2 GPUs, 3 are needed"):
        choose_device(engine, gpus)


@pytest.mark.parametrize(
    ("gpus", "ranks", "decodes"),
    [(5, 4, 4), (4, 4, 3), (2, 1, 1), (1, 1, 0), (0, 3, 0)],
    indirect=["gpus"],
)
def test_the_decoder_takes_the_gpu_after_the_ranks(gpus: int, ranks: int, decodes: int) -> None:
    engine = EngineConfig(tensor_parallel=ranks)
    assert decoder_gpu(engine) == decodes
    device, _ = choose_device(engine, decodes)
    assert device.type == ("cuda" if gpus else "cpu")


def test_memory_in_use_is_told_of_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (30, 140))
    said: list[GpuMemory] = []
    link = cast(Any, SimpleNamespace(name="rank1", channel=SimpleNamespace(send=said.append)))
    tell_gpu_memory(link, torch.device("cpu"))
    tell_gpu_memory(link, torch.device("cuda", 1))
    assert said == [GpuMemory("rank1", 110)]
