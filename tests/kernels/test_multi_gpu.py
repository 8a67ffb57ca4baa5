"""Ranks on GPUs of their own: the fused kernel's sums, and steps that are those of one rank."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from characters_kernels.gemm_all_reduce import RankLost, gemm_all_reduce_reference, steady_plan
from characters_kernels.gemm_all_reduce import gemm_all_reduce as fused
from characters_serve.bench import gemm_all_reduce, tensor_parallel
from characters_serve.config import Config, EngineConfig, Optimizations, load_config
from tests.ranks_rig import end_ranks, start_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs of one host"),
]

BIG = load_config([Path(__file__).parents[2] / "configs" / "characters-57b.yaml"])
# Of sixty blocks two; positions reset on steps 12, 17 and 22.
MODEL = BIG.model.model_copy(update={"num_blocks": 2, "position_reset_steps": 5})
PLAIN = Optimizations(**dict.fromkeys(Optimizations.model_fields, False))
FAST = BIG.optimizations.model_copy(update={"compile": False})
STEPS = 24
LENGTHS = 100
ENDED_S = 150.0


def run_ranks(target: Callable[..., None], size: int, *arguments: Any) -> None:
    assert end_ranks(start_ranks(target, size, size, *arguments), ENDED_S) == [0] * size


def check_kernel(rank: int, size: int, folder: Path) -> None:
    member = gemm_all_reduce.Member(EngineConfig(device="cuda", tensor_parallel=size), folder, rank)
    steady = steady_plan(132)
    for rows, plan in (
        (768, steady),
        (757, steady),
        (768, steady._replace(adding_from=steady.computing)),
        (768, steady._replace(rows=128, columns=128, stages=3, computing=steady.programs)),
    ):
        gemm_all_reduce.check(member, rows, 9216, 1024, plan)
    member.ranks.leave()


def test_fused_sums_are_right_in_replayed_chains_with_a_rank_late(tmp_path: Path) -> None:
    run_ranks(check_kernel, 2, tmp_path)


def check_compiled(rank: int, size: int, folder: Path) -> None:
    """An odd number of calls, each read before the next: no compiler may move or copy them."""
    member = gemm_all_reduce.Member(EngineConfig(device="cuda", tensor_parallel=size), folder, rank)
    exchange = member.exchange(768, 9216, steady_plan(132))
    _, _, *constants = exchange.arguments
    of_all = [
        [gemm_all_reduce.integers(member.device, 768, 9216, 1024, 10 * call + other)
         for other in range(size)]
        for call in range(3)
    ]  # fmt: skip

    def chain(out: Tensor, counts: Tensor) -> list[Tensor]:
        doubled = []
        for inputs in of_all:
            fused(*inputs[rank], None, out, counts, *constants)
            doubled.append(2 * out)
        return doubled

    compiled = torch.compile(chain, fullgraph=True, dynamic=False)
    for _ in range(3):
        for found, inputs in zip(compiled(exchange.out, exchange.counts), of_all, strict=True):
            assert torch.equal(found, 2 * gemm_all_reduce_reference(inputs))
    member.ranks.leave()


def test_fused_sums_are_right_under_the_compiler(tmp_path: Path) -> None:
    run_ranks(check_compiled, 2, tmp_path)


def check_left_alone(rank: int, size: int, folder: Path) -> None:
    """The last rank dies after its first call; the others, which make three, hear of it."""
    engine = EngineConfig(device="cuda", tensor_parallel=size, rank_timeout_s=5)
    member = gemm_all_reduce.Member(engine, folder, rank)
    exchange = member.exchange(768, 9216, steady_plan(132))
    inputs = gemm_all_reduce.integers(member.device, 768, 9216, 1024, rank)
    exchange(*inputs)
    exchange.check()
    member.agreed(0.0)
    if rank < size - 1:
        exchange(*inputs)
        exchange(*inputs)
        with pytest.raises(RankLost):
            exchange.check()
    os._exit(0)  # a communicator does not part from ranks that are gone


def test_a_rank_that_dies_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    run_ranks(check_left_alone, 2, tmp_path)


def run_session(rank: int, size: int, folder: Path, config_json: str, lengths: int) -> None:
    config = Config.model_validate_json(config_json)
    member = tensor_parallel.StepMember(config, folder, rank)
    denoiser, model, device = member.denoiser, config.model, member.device
    random = torch.Generator().manual_seed(1)
    image = torch.rand(1, 3, model.height, model.width, generator=random).to(device)
    words = torch.randn(1, model.prompt_slots, model.prompt_dim, generator=random).to(device)
    window = 0.1 * torch.randn(member.network.log_mel.window_samples, generator=random)
    controls = torch.rand(model.frames_per_chunk, model.num_controls, generator=random)

    def step() -> Tensor:
        return denoiser.step(window.to(device), controls.to(device), len(model.noise_levels))

    denoiser.start(image, 5, words[:, :40])
    latents = torch.stack([step().clone() for _ in range(STEPS)]).cpu()
    used = []
    for length in range(1, lengths + 1):
        denoiser.start(image, 5, words[:, :length])
        step()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    plain_calls = member.steady_sum.plain_calls if member.steady_sum is not None else None
    torch.save({"latents": latents, "used": used, "plain": plain_calls}, folder / f"{rank}.pt")
    member.leave()


def session(size: int, optimizations: Optimizations, lengths: int = 0, **engine: Any) -> list[Any]:
    """What each rank made of the same session."""
    settings = BIG.engine.model_copy(update={"tensor_parallel": size, **engine})
    changed = {"model": MODEL, "engine": settings, "optimizations": optimizations}
    config = BIG.model_copy(update=changed).model_dump_json()
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run_session, size, Path(folder), config, lengths)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size)]


@functools.cache
def errors_of_one_rank() -> tuple[Tensor, float]:
    """Latents in float32, and how far the fast path of a single rank is from them."""
    truth: Tensor = session(1, PLAIN, dtype="float32")[0]["latents"]
    return truth, error(session(1, FAST)[0]["latents"], truth)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("flag", ["fused_gemm_all_reduce", "two_shot_all_reduce", None])
def test_two_ranks_make_the_latents_of_one_over_three_resets(flag: str | None) -> None:
    """A hundred prompt lengths, each captured anew, take no memory. And the ranks part, though
    NCCL's communicator waits for graphs that still hold its collectives."""
    optimizations = FAST.model_copy(update={flag: True}) if flag else FAST
    lengths = LENGTHS if flag == "fused_gemm_all_reduce" else 0
    made = session(2, optimizations, lengths)
    truth, of_one = errors_of_one_rank()
    assert torch.equal(made[0]["latents"], made[1]["latents"])
    assert error(made[0]["latents"], truth) <= 2 * of_one + 1e-3
    for rank in made:
        starts = 2 + lengths  # the benchmark's own session, then these
        assert rank["plain"] == (starts * MODEL.num_blocks if flag else None)
        if lengths:
            assert rank["used"][-1] <= rank["used"][20] * 1.01
