"""The page in the queue: it says its place, and talks when its turn has come."""

from __future__ import annotations

import asyncio
from pathlib import Path

from playwright.async_api import expect

from tests.e2e.rig import browser, new_tab, running_server


async def test_the_page_shows_its_place_in_the_queue_and_then_talks(tmp_path: Path) -> None:
    settings = ("engine.kind=pattern", "agent.kind=none", "server.queue_size=2")
    with running_server(tmp_path / "r", *settings) as server:
        async with browser() as launched:
            talking = await new_tab(launched, server)
            waiting = await new_tab(launched, server)
            last = await new_tab(launched, server)
            await talking.talk()
            for tab, place in ((waiting, "next in the queue"), (last, "number 2 in the queue")):
                await tab.page.get_by_test_id("talk-text").click()
                await expect(tab.page.get_by_test_id("progress")).to_contain_text(place)
            await talking.page.get_by_test_id("stop").click()
            await waiting.reach("live")
            await expect(last.page.get_by_test_id("progress")).to_contain_text("next in the queue")
            await waiting.page.close()  # its goodbye gives the seat to the last
            await last.reach("live")
            await last.page.get_by_test_id("stop").click()
            await last.reach("idle")
        await asyncio.to_thread(server.seconds_until_free, 5)
