"""A tensor-parallel group behind the real session host, and what a rank does between orders."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from characters_kernels.gemm_all_reduce import Exchange, Plan, region_bytes
from characters_serve.channels import BlockingChannel, endpoint
from characters_serve.config import (
    AgentConfig,
    Config,
    EngineConfig,
    ModelConfig,
    SessionConfig,
)
from characters_serve.engine.rank import Rank
from characters_serve.engine.ranks import Order, PeerLost, Ranks
from characters_serve.engine.steady_sum import SteadySum
from characters_serve.engine.step_input import PackedStep
from characters_serve.messages import (
    CharacterEnded,
    CharacterReady,
    EndCharacter,
    Failed,
    Message,
    Ping,
    Pong,
    Shutdown,
    ShutdownAck,
    StartCharacter,
    StepCounts,
    StepInput,
)
from characters_serve.processes import ControlLink
from tests.unit.session_rig import HostParent
from tests.unit.small_model import SMALL
from tests.waiting import until

LIVE_S = 40.0


def has_counts(host: HostParent) -> bool:
    """What the ranks count comes with the host's report."""
    return host.metrics[-1].counters["rank_steps_total"] > 0


async def test_two_ranks_hold_sessions_and_end_with_the_one_that_dies(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(width=192, height=128, weights="synthetic"),
        engine=EngineConfig(device="cpu", tensor_parallel=2),
        agent=AgentConfig(kind="none"),
        session=SessionConfig(connect_timeout_s=LIVE_S, reconnect_grace_s=LIVE_S),
    )
    host = HostParent(tmp_path, config)
    await host.start()
    processes = [host.details[f"pid_{name}"] for name in ("rank0", "rank1", "decoder")]
    assert host.details["rank1_device"] == "cpu"
    browser = await host.reach_second_session()
    await until(lambda: has_counts(host), LIVE_S)
    os.kill(int(host.details["pid_rank1"]), signal.SIGKILL)
    await until(lambda: bool(host.exits), LIVE_S)
    assert host.state_names("two")[-1] == "failed"
    assert host.states[-1].reason == "rank1 exited with code -9"
    failures = [message for message in host.others if isinstance(message, Failed)]
    assert [failure.reason for failure in failures] == ["rank1 exited with code -9"]
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []
    await browser.close()
    await host.child.kill()


class Ordered:
    """The orders of an invented rank 0."""

    def __init__(self, orders: Iterator[Order]) -> None:
        self._orders = orders

    def take(self, _packed: torch.Tensor) -> Order:
        return next(self._orders)


def no_product(*_inputs: torch.Tensor) -> torch.Tensor:
    raise AssertionError


class Recorder:
    """Stands where a denoiser does and keeps what was asked of it. Each step clamps a value; the
    first forward pass of a session has two sums outside the steady shape."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.sums = SteadySum(rows=16, steady=no_product, plain=no_product)
        self.eager_steps = 0
        self.saturated = 0

    def start(self, _image: object, seed: int) -> None:
        self.asked.append(f"start {seed}")
        self.sums.plain_calls += 2
        self.saturated = 0

    def step(self, _window: object, _controls: object, passes: int) -> None:
        self.asked.append(f"step {passes}")
        self.saturated += 1

    def reset(self) -> None:
        self.asked.append("reset")


def test_no_latent_is_sent_of_sums_that_missed_a_rank(tmp_path: Path) -> None:
    """The last word of the shared memory is how a kernel says that it has waited in vain."""
    plan = Plan(16, 16, 16, 16, 1, 1, 0, 4, 2)
    region = torch.zeros(region_bytes(16, 16, plan), dtype=torch.uint8)
    sums = SteadySum(16, Exchange(region, [region.data_ptr()], 0, 16, 16, plan, 30.0), no_product)
    sent: list[int] = []

    class Denoiser(Recorder):
        def step(self, window: object, controls: object, passes: int) -> None:
            super().step(window, controls, passes)
            region[-8] = self.saturated - 1  # in vain in the second step

    step = StepInput(
        "one",
        0,
        0,
        bytes(2 * SMALL.audio_window_samples),
        b"",
        bytes(4 * SMALL.frames_per_chunk * SMALL.num_controls),
        0,
        0.0,
        False,
        passes=4,
    )
    image = bytes(3 * SMALL.width * SMALL.height)
    messages = [
        StartCharacter("one", image, seed=5),
        *[replace(step, chunk_index=n) for n in (0, 1)],
    ]
    parent = BlockingChannel(endpoint(tmp_path, "control-rank0"), "pair", bind=True)
    link = ControlLink(tmp_path, "rank0")
    alone = Ranks(EngineConfig(), tmp_path, 0, torch.device("cpu"))
    packed = PackedStep(SMALL, torch.device("cpu"))
    sink = SimpleNamespace(
        start=lambda _image: None, send=lambda step, *_latent: sent.append(step.chunk_index)
    )
    inbox = SimpleNamespace(messages=lambda _wait_s: iter(messages))
    rank = Rank(SMALL, link, alone, cast(Any, Denoiser()), packed, sums)
    with pytest.raises(PeerLost, match="waited for another's tiles for 30 s"):
        rank.lead(cast(Any, inbox), cast(Any, sink))
    assert sent == [0]
    parent.close()
    link.channel.close()


def test_a_rank_keeps_messages_until_their_order_and_answers_pings_before(tmp_path: Path) -> None:
    parent = BlockingChannel(endpoint(tmp_path, "control-rank1"), "pair", bind=True)
    link = ControlLink(tmp_path, "rank1")
    packed, asked = PackedStep(SMALL, torch.device("cpu")), Recorder()
    packed.host[1] = 3
    image = bytes(3 * SMALL.width * SMALL.height)
    sent: list[Message] = [
        StartCharacter("one", image, seed=5),
        EndCharacter("one"),
        Shutdown("over"),
        Ping(7),
    ]
    for message in sent:
        parent.send(message)

    def orders() -> Iterator[Order]:
        yield Order.STEP
        while not parent.socket.poll(10):
            yield Order.IDLE  # until the ping is answered
        yield from (Order.MESSAGE, Order.STEP, Order.MESSAGE, Order.MESSAGE)

    ordered = cast(Any, Ordered(orders()))
    Rank(SMALL, link, ordered, cast(Any, asked), packed, asked.sums).follow()
    assert asked.asked == ["step 3", "start 5", "step 3", "reset"]
    said = [parent.recv() for _ in range(6)]
    answers = [message for message in said if not isinstance(message, StepCounts)]
    assert answers[0] == Pong(7)
    assert isinstance(answers[1], CharacterReady)
    assert answers[2:] == [CharacterEnded("one", "rank1"), ShutdownAck("rank1")]
    first = StepCounts("rank1", steps=1, eager_steps=0, fp8_saturated=1)
    counted = replace(first, plain_sums=2)
    assert [message for message in said if isinstance(message, StepCounts)] == [first, counted]
    assert said.index(first) < 2 and said[-3] == counted, "a session's last word before its end"
    parent.close()
    link.channel.close()
