"""In: a server and a bad network. Out: what a real browser counts of its picture and sound."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from playwright.async_api import Route

from tests.e2e.rig import Others, Server, Tab, browser, new_tab, until
from tests.relay import CLEAN, Conditions, Relay, relayed

SAMPLE_S = 0.25


@dataclass(frozen=True)
class Sample:
    """The browser's counters at one time; av_ms: the voice's playout time minus the picture's."""

    at_s: float
    decoded: int
    received_bytes: int
    frozen_s: float
    freezes: int
    keyframes: int
    plis: int
    concealed: int
    samples: int
    av_ms: float | None

    @classmethod
    def of(cls, inbound: dict[str, Any]) -> Sample:
        video, audio = inbound["video"], inbound["audio"]
        times = [side.get("estimatedPlayoutTimestamp") for side in (audio, video)]
        return cls(
            at_s=inbound["atMs"] / 1000,
            decoded=video["framesDecoded"],
            received_bytes=video["bytesReceived"] + video.get("headerBytesReceived", 0),
            frozen_s=video.get("totalFreezesDuration", 0.0),
            freezes=video.get("freezeCount", 0),
            keyframes=video.get("keyFramesDecoded", 0),
            plis=video.get("pliCount", 0),
            concealed=audio["concealedSamples"] - audio.get("silentConcealedSamples", 0),
            samples=audio["totalSamplesReceived"],
            av_ms=None if None in times else times[0] - times[1],
        )


@dataclass(frozen=True)
class Figures:
    fps: float
    frozen_share: float
    freezes: int
    kbps: float
    keyframes: int
    plis: int
    concealed_share: float
    av_ms: float | None

    @classmethod
    def of(cls, samples: list[Sample]) -> Figures:
        first, last = samples[0], samples[-1]
        elapsed_s = last.at_s - first.at_s
        offsets = [sample.av_ms for sample in samples if sample.av_ms is not None]
        return cls(
            fps=round((last.decoded - first.decoded) / elapsed_s, 2),
            frozen_share=round((last.frozen_s - first.frozen_s) / elapsed_s, 4),
            freezes=last.freezes - first.freezes,
            kbps=round((last.received_bytes - first.received_bytes) * 8 / elapsed_s / 1000),
            keyframes=last.keyframes - first.keyframes,
            plis=last.plis - first.plis,
            concealed_share=round(
                (last.concealed - first.concealed) / max(1, last.samples - first.samples), 4
            ),
            av_ms=round(statistics.median(offsets), 1) if offsets else None,
        )


class Watcher:
    """A tab behind the relay."""

    def __init__(self, tab: Tab, relay: Relay) -> None:
        self.tab = tab
        self.relay = relay
        self.others = Others()

    async def watch(self, seconds: float) -> list[Sample]:
        samples: list[Sample] = []
        while len(samples) < 2 or samples[-1].at_s - samples[0].at_s < seconds:
            inbound = await self.tab.inbound()
            if "video" in inbound and "audio" in inbound:  # a new connection has none at first
                samples.append(Sample.of(inbound))
            await self.tab.passes(SAMPLE_S)
        return samples


@asynccontextmanager
async def watching(server: Server, conditions: Conditions = CLEAN) -> AsyncIterator[Watcher]:
    """Live through the relay; the conditions begin with the connection."""
    async with relayed() as relay, browser() as launched:
        tab = await new_tab(launched, server)

        async def through_the_relay(route: Route) -> None:
            if route.request.method != "POST":
                await route.continue_()
                return
            response = await route.fetch()
            await route.fulfill(response=response, body=await relay.rewrite(await response.text()))

        await tab.page.route("**/v1/sessions/*/webrtc*", through_the_relay)
        relay.set(conditions)
        await tab.talk()
        yield Watcher(tab, relay)

        async def took_this_way() -> bool | None:
            return relay.down.carried > 100 or None

        await until("the media through the relay", took_this_way, 10)
        relay.set(CLEAN)
        if await tab.page.get_by_test_id("stop").is_visible():
            await tab.page.get_by_test_id("stop").click()
        await tab.reach("idle")
