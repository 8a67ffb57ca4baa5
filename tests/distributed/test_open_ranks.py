"""Two ranks of an open family, over gloo, are the one rank: q and k are normed over all heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from characters_serve.config import EngineConfig, ModelConfig, Optimizations
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.ranks import Ranks
from characters_serve.model.linear import AllReduce, alone
from characters_serve.model.open.causal_wan import CausalWan
from characters_serve.model.open.live_avatar import LiveAvatar
from characters_serve.model.shard import deal
from characters_serve.model.weights import load_network, save_network
from tests.ranks_rig import end_ranks, start_ranks
from tests.unit import small_live_avatar
from tests.unit.small_causal_wan import model_of
from tests.unit.small_causal_wan import network as causal_wan
from tests.unit.test_open_fast_paths import FUSED, TALKER, TalkerStream, stream

CPU = torch.device("cpu")
ENDED_S = 90.0
CHUNKS = 4
FAMILIES = ("causal_wan", "live_avatar")
FLAGS = {
    "plain": Optimizations(write_time_rope=False, ring_cache=False),
    "fused": Optimizations(**dict.fromkeys(FUSED, True)),
    "fp8": Optimizations(**dict.fromkeys((*FUSED, "fp8_gemm", "fp8_kv_cache"), True)),
}


def config_of(family: str) -> ModelConfig:
    return TALKER if family == "live_avatar" else model_of("chunks")


def of_rank(family: str, folder: Path, rank: int, size: int, all_reduce: AllReduce) -> Any:
    """A generator, from the checkpoint in folder/family."""
    model = config_of(family).model_copy(update={"weights": str(folder / family)})
    shard = deal(model, size)[rank]

    def make() -> CausalWan | LiveAvatar:
        if family == "causal_wan":
            return CausalWan(model, None, shard, all_reduce)
        return LiveAvatar(model, shard, all_reduce)

    network = load_network(make, model, "dit", CPU, torch.float32, 0)
    if isinstance(network, CausalWan):
        return network
    talker = TalkerStream()
    assert isinstance(network, LiveAvatar)
    talker.network = network
    return talker


def sessions(folder: Path, rank: int, size: int, all_reduce: AllReduce) -> dict[str, Tensor]:
    return {
        f"{family} {name}": stream(
            Denoiser(
                of_rank(family, folder, rank, size, all_reduce),
                config_of(family),
                flags,
            ),
            CHUNKS,
        )
        for family in FAMILIES
        for name, flags in FLAGS.items()
    }


def run_rank(rank: int, folder: Path) -> None:
    ranks = Ranks(EngineConfig(tensor_parallel=2, rank_timeout_s=60.0), folder, rank, CPU)
    ranks.join()
    torch.save(sessions(folder, rank, 2, ranks.all_reduce), folder / f"{rank}.pt")
    ranks.leave()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for family in FAMILIES:
        (tmp_path / family).mkdir()
        model = config_of(family)
        made = small_live_avatar.network if family == "live_avatar" else causal_wan
        save_network(made(model), tmp_path / family, "dit")
    return tmp_path


def test_two_ranks_make_the_latents_of_one(checkpoints: Path) -> None:
    ranks = start_ranks(run_rank, 2, checkpoints)
    whole = sessions(checkpoints, 0, 1, alone)
    assert end_ranks(ranks, ENDED_S) == [0, 0]
    one, other = (torch.load(checkpoints / f"{rank}.pt") for rank in range(2))
    for name, expected in whole.items():
        assert torch.equal(one[name], other[name]), name
        error = (one[name] - expected).norm() / expected.norm()
        # A rank's scales are its own, so that FP8 rounds other numbers than on one rank.
        assert error < (0.05 if "fp8" in name else 1e-4), name
    partial_sum = stream(
        Denoiser(
            of_rank("causal_wan", checkpoints, 0, 2, alone), model_of("chunks"), FLAGS["plain"]
        ),
        CHUNKS,
    )
    assert (partial_sum - whole["causal_wan plain"]).abs().max() > 0.1


def test_norms_of_the_ranks_own_heads_alone_would_show(checkpoints: Path) -> None:
    expected = first_head(checkpoints, 1)
    assert (first_head(checkpoints, 2) - expected).abs().max() > 1e-2


def first_head(checkpoints: Path, size: int) -> Tensor:
    """q of the first block's first head, as the norms of one rank of `size`, alone, find it."""
    dit = of_rank("causal_wan", checkpoints, 0, size, alone)
    assert isinstance(dit, CausalWan)
    x = torch.linspace(-1, 1, dit.config.dim).expand(1, 3, -1)
    attn = dit.blocks[0].self_attn
    q, _, _ = attn.split(attn.qkv(x))
    return q[:, :, 0]
