"""The test picture over bad networks, as a real browser receives it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.rig import Measure, Server, running_server, watched_s
from tests.e2e.watching import Figures, watching
from tests.relay import Conditions


@pytest.fixture(scope="module")
def large_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The production picture's size: 1.2 Mbit/s to begin with, 1.5 times what 800 kbit/s carry."""
    with running_server(
        tmp_path_factory.mktemp("l"),
        "engine.kind=pattern",
        "agent.kind=none",
        "model.width=1088",
        "model.height=704",
    ) as server:
        yield server


async def test_a_clean_network_costs_nothing(pattern: Server, measure: Measure) -> None:
    async with watching(pattern) as watcher:
        figures = Figures.of(await watcher.watch(watched_s(6)))
        measure("figures", figures)
        if watcher.others.can_judge(measure):
            assert figures.fps >= 23.5
            assert figures.freezes == 0
            assert figures.plis == 0
            assert figures.concealed_share < 0.01


async def test_five_percent_loss_is_repaired(pattern: Server, measure: Measure) -> None:
    async with watching(pattern, Conditions(delay_s=0.02, loss=0.05)) as watcher:
        figures = Figures.of(await watcher.watch(watched_s(10)))
        measure("figures", figures)
        if watcher.others.can_judge(measure):
            assert figures.fps >= 23.5
            assert figures.frozen_share < 0.02
            assert figures.concealed_share < 0.05


async def test_a_narrow_link_is_not_overrun(large_server: Server, measure: Measure) -> None:
    link_kbps = 1000
    narrow = Conditions(delay_s=0.02, kbps=link_kbps, queue_s=0.1)
    async with watching(large_server.when_free(), narrow) as watcher:
        samples = await watcher.watch(watched_s(12))
        half = len(samples) // 2
        measure("first", Figures.of(samples[:half]))
        settled = Figures.of(samples[half:])
        measure("second", settled)
        measure("dropped", f"{watcher.relay.down.dropped} of {watcher.relay.down.carried}")
        if watcher.others.can_judge(measure):
            assert settled.fps >= 20
            assert settled.kbps < link_kbps


async def test_the_picture_is_back_after_a_blackout(pattern: Server, measure: Measure) -> None:
    async with watching(pattern, Conditions(delay_s=0.02)) as watcher:
        await watcher.watch(2)
        watcher.relay.set(Conditions(blackout=True))
        await watcher.watch(3)
        watcher.relay.set(Conditions(delay_s=0.02))
        samples = await watcher.watch(5)
        began = samples[0]
        back = next((s for s in samples if s.decoded - began.decoded >= 12), None)
        measure("back_after_s", None if back is None else round(back.at_s - began.at_s, 2))
        measure("figures", Figures.of(samples))
        if watcher.others.can_judge(measure):
            await watcher.tab.reach("live", 5)
            assert back is not None and back.at_s - began.at_s < 3


async def test_jitter_does_not_part_voice_and_picture(pattern: Server, measure: Measure) -> None:
    async with watching(pattern, Conditions(delay_s=0.1, jitter_s=0.03)) as watcher:
        samples = await watcher.watch(watched_s(10))
        figures = Figures.of(samples[len(samples) // 2 :])
        measure("figures", figures)
        if watcher.others.can_judge(measure):
            assert figures.fps >= 23
            assert figures.av_ms is not None and abs(figures.av_ms) < 60
