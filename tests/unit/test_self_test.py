"""The self-test: what makes a group ready, degraded or failed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from characters_serve.config import AgentConfig, Config, EngineConfig, ModelConfig, PatternConfig
from characters_serve.messages import StartCharacter, StepInput, VideoChunk
from characters_serve.session import self_test
from characters_serve.session.host import Host
from characters_serve.session.self_test import SESSION_ID, TrialFailed, run_self_test
from tests.unit.session_rig import HostParent
from tests.waiting import until

CONFIG = Config(
    model=ModelConfig(width=192, height=128, noise_levels=(1.0, 0.75, 0.5, 0.25)),
    engine=EngineConfig(kind="pattern"),
    agent=AgentConfig(kind="none"),
)


class InventedEngine:
    """Every chunk takes `period_s` of an invented clock; from chunk `mute_from` on, none comes."""

    def __init__(self, period_s: float, mute_from: int = 1000, frames: int = 4) -> None:
        self.calls: list[str] = []
        self.now_s = 0.0
        self.most_in_flight = 0
        self.passes: set[int] = set()
        self._period_s = period_s
        self._mute_from = mute_from
        self._frames = frames
        self._steps: asyncio.Queue[StepInput] = asyncio.Queue()

    async def start_character(self, message: StartCharacter) -> None:
        assert len(message.image_rgb) == 3 * 192 * 128
        self.calls.append("start")

    async def end_character(self, session_id: str) -> None:
        assert session_id == SESSION_ID
        self.calls.append("end")

    async def send_step(self, step: StepInput) -> None:
        self._steps.put_nowait(step)
        self.passes.add(step.passes)
        self.most_in_flight = max(self.most_in_flight, self._steps.qsize())

    async def next_chunk(self) -> VideoChunk:
        step = await self._steps.get()
        if step.chunk_index >= self._mute_from:
            await asyncio.sleep(60)
        self.now_s += self._period_s if step.chunk_index else 5.0
        frames = [b""] * self._frames
        index = step.chunk_index
        return VideoChunk(SESSION_ID, 0, index, frames, step.voice_48k, 0, 0.0, False, 4, 1.0, 1.0)

    async def run(self, config: Config = CONFIG) -> self_test.SelfTest:
        return await run_self_test(self, config, self.next_chunk, lambda: self.now_s)


async def test_the_median_period_decides_and_the_slow_first_chunk_does_not() -> None:
    fast, slow = InventedEngine(0.1), InventedEngine(0.2)
    result = await fast.run()
    assert result.period_ms == pytest.approx(100) and result.fast_enough and not result.degraded
    assert fast.calls == ["start", "end"] and fast.most_in_flight == self_test.CREDITS
    result = await slow.run()
    assert not result.fast_enough
    assert result.degraded == "a chunk takes 200 ms and plays for 167 ms"


async def test_a_chunk_has_the_passes_that_it_will_have_in_sessions() -> None:
    engine = InventedEngine(0.1)
    await engine.run()
    assert engine.passes == {4}
    fewer = InventedEngine(0.1)
    await fewer.run(CONFIG.model_copy(update={"engine": EngineConfig(kind="pattern", passes=2)}))
    assert fewer.passes == {2}


async def test_no_chunk_or_a_wrong_one_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "NO_CHUNK_S", 0.05)
    with pytest.raises(TrialFailed, match=r"self-test: no chunk 0 from the engine in 0\.05 s"):
        await InventedEngine(0.1, mute_from=0).run()
    with pytest.raises(TrialFailed, match="no chunk 7"):
        await InventedEngine(0.1, mute_from=7).run()
    with pytest.raises(TrialFailed, match="3 frames came where chunk 0 with 4 was due"):
        await InventedEngine(0.1, frames=3).run()


async def test_a_real_host_is_ready_only_after_it_delivered(tmp_path: Path) -> None:
    host = HostParent(tmp_path, CONFIG)
    await host.start()
    assert [type(message).__name__ for message in host.others] == ["Warming"]
    assert float(host.details["self_test_period_ms"]) > 0 and "degraded" not in host.details
    await until(lambda: bool(host.metrics))
    assert host.metrics[-1].gauges["group_degraded"] == 0
    assert host.metrics[-1].gauges["self_test_period_ms"] > 0
    await host.stop()


async def test_an_engine_that_is_too_slow_serves_and_says_so(tmp_path: Path) -> None:
    slow = EngineConfig(kind="pattern", pattern=PatternConfig(step_ms=250))
    host = HostParent(tmp_path, CONFIG.model_copy(update={"engine": slow}))
    await host.start()
    assert "and plays for 167 ms" in host.details["degraded"]
    await until(lambda: bool(host.metrics))
    assert host.metrics[-1].gauges["group_degraded"] == 1
    await host.stop()


async def test_an_engine_that_dies_in_the_self_test_is_a_failure_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(CONFIG, tmp_path)
    children = host._children
    monkeypatch.setattr(host, "_children", InventedEngine(0.1))
    warming = asyncio.create_task(host._warm_up())
    await asyncio.sleep(0.01)
    assert not warming.done(), "no chunk has come"
    host._fault("pattern exited with code -9")
    with pytest.raises(TrialFailed, match="self-test: pattern exited with code -9"):
        await warming
    await children.kill()
    host._link.channel.close()
