"""Ranks as processes of their own, over gloo: together they are the one rank."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from characters_serve.config import EngineConfig, ModelConfig, Optimizations
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.ranks import PEER_LOST_S, PeerLost, Ranks
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.linear import alone
from characters_serve.model.shard import Shard, deal
from characters_serve.model.weights import load_generator
from tests.ranks_rig import end_ranks, start_ranks
from tests.unit import small_model
from tests.unit.small_model import SMALL, sharpen

CPU = torch.device("cpu")
# Three heads and MLP tiles: two ranks cannot share them equally. Positions reset at chunk 8 first.
MODEL = ModelConfig(
    **{
        **SMALL.model_dump(),
        "num_heads": 3,
        "cache_policy": "per_pass",
        "position_reset_steps": 3,
    }
)
STEPS = 16
ENDED_S = 90.0
AllReduce = Callable[[Tensor], Tensor]


def network(shard: Shard | None, all_reduce: AllReduce) -> CharacterDiT:
    return sharpen(
        load_generator(MODEL, device=CPU, dtype=torch.float32, shard=shard, all_reduce=all_reduce)
    )


def session(dit: CharacterDiT) -> Tensor:
    """Latents (steps, V, C) of a session, its positions reset three times."""
    return small_model.session(Denoiser(dit, MODEL, Optimizations()), STEPS, prompt=0)


@functools.cache
def of_one_rank() -> Tensor:
    return session(network(None, alone))


def run_rank(rank: int, size: int, folder: Path, timeout_s: float, ends: str) -> None:
    """A session, the same with the last rank late at every sum, and then that rank's end."""
    engine = EngineConfig(tensor_parallel=size, rank_timeout_s=timeout_s)
    ranks = Ranks(engine, folder, rank, CPU)
    is_last, lateness = rank == size - 1, iter([0.0, 0.0, 0.01] * 1000)
    late = False

    def all_reduce(x: Tensor) -> Tensor:
        if late and is_last:
            time.sleep(next(lateness))
        return ranks.all_reduce(x)

    dit = network(deal(MODEL, size)[rank], all_reduce)
    ranks.join()
    punctual = session(dit)
    late = True
    torch.save({"punctual": punctual, "late": session(dit)}, folder / f"{rank}.pt")
    if is_last and ends == "dies":
        os._exit(9)
    if is_last:
        time.sleep(ENDED_S)
    try:
        session(dit)
    except PeerLost as error:
        (folder / f"{rank}.txt").write_text(str(error))


@pytest.mark.parametrize(
    ("size", "timeout_s", "ends"), [(2, 60.0, "dies"), (3, 8.0, "hangs")], ids=["2-dies", "3-hangs"]
)
def test_ranks_make_the_latents_of_one_and_miss_one_that_is_lost(
    tmp_path: Path, size: int, timeout_s: float, ends: str
) -> None:
    *others, last = start_ranks(run_rank, size, size, tmp_path, timeout_s, ends)
    assert end_ranks(others, ENDED_S) == [0] * (size - 1)
    end_ranks([last], 0)
    whole = of_one_rank()
    made = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for which in ("punctual", "late"):
        for latents in made:
            assert torch.equal(latents[which], made[0]["punctual"])
    torch.testing.assert_close(made[0]["punctual"], whole, rtol=1e-3, atol=1e-3)
    for rank in range(size - 1):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert said.startswith("another rank of the group is gone or late")


def test_what_a_rank_computes_alone_is_not_the_character() -> None:
    """The comparison above would see sums that are not made."""
    part = session(network(deal(MODEL, 3)[0], alone))
    assert (part - of_one_rank()).abs().max() > 0.1


def test_the_word_of_who_sees_the_dead_rank_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_x: Tensor) -> None:
        raise RuntimeError("Connection closed by peer")

    slept: list[float] = []
    monkeypatch.setattr("characters_serve.engine.ranks.dist.all_reduce", broken)
    monkeypatch.setattr("characters_serve.engine.ranks.time.sleep", slept.append)
    ranks = Ranks(EngineConfig(tensor_parallel=2), tmp_path, 0, CPU)
    with pytest.raises(PeerLost, match="Connection closed by peer"):
        ranks.all_reduce(torch.ones(1))
    assert slept == [PEER_LOST_S]
