"""Pages of somebody else's, each on an origin of its own: the README's, and one not allowed."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from playwright.async_api import expect

from tests.e2e.rig import browser, running_server
from tests.serving import ROOT

README_ADDRESS = "http://127.0.0.1:8080"
POLICY = "default-src 'none'; script-src 'unsafe-inline' SERVER; connect-src SERVER; img-src SERVER"
PICTURES = """<body><script type="module">
  import { CharacterSession } from "SERVER/client.js";
  const all = await CharacterSession.listCharacters({ baseUrl: "SERVER" });
  document.body.append(...all.map(({ image: src }) => Object.assign(new Image(), { src })));
</script></body>"""


def page_of_the_readme() -> str:
    section = (ROOT / "README.md").read_text().split("## In your own page")[1]
    found = re.search(r"```html\n(.*?)```", section, re.S)
    assert found is not None
    return found[1].replace(README_ADDRESS, "SERVER")


class Site:
    """An origin with two pages, which name the server as SERVER."""

    def __init__(self) -> None:
        self.server_url = ""
        self.pages = {"/": page_of_the_readme(), "/pictures": PICTURES}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        page = self.pages.get(request.path)
        request.send_response(404 if page is None else 200)
        request.send_header("Content-Type", "text/html; charset=utf-8")
        policy = POLICY.replace("SERVER", self.server_url)
        request.send_header("Content-Security-Policy", policy)
        request.end_headers()
        request.wfile.write((page or "").replace("SERVER", self.server_url).encode())


@contextmanager
def origin_of(site: Site) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.answer(self)

        def log_message(self, format: str, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_the_readmes_page_talks_from_an_origin_that_is_allowed(tmp_path: Path) -> None:
    site = Site()
    with origin_of(site) as allowed, origin_of(site) as another:
        settings = ("engine.kind=pattern", "agent.kind=none")
        origins = f'server.allowed_origins=["{allowed}"]'
        with running_server(tmp_path / "r", *settings, origins) as server:
            site.server_url = server.url
            async with browser() as launched:
                page = await launched.new_page()
                await page.goto(another)
                await page.locator("button").click()
                await expect(page.locator("#said")).to_contain_text("server.allowed_origins")

                complaints: list[str] = []
                page.on("pageerror", lambda error: complaints.append(str(error)))
                page.on("requestfailed", lambda request: complaints.append(request.url))
                await page.goto(f"{allowed}/pictures")
                await expect(page.locator("img").first).to_have_js_property("complete", True)
                assert await page.locator("img").first.evaluate("i => i.naturalWidth") > 100

                await page.goto(allowed)
                await page.locator("button").click()
                video = page.locator("video")
                await expect(video).to_have_js_property("readyState", 4, timeout=15_000)
                await expect(video).to_have_js_property("paused", False)
                assert not await asyncio.to_thread(server.is_free)
                assert complaints == []
                await page.close()
                await asyncio.to_thread(server.seconds_until_free, 15)
            metrics = httpx.get(f"{server.url}/metrics").text
            # What asks the server first, as a DELETE does, is too late in some browsers.
            assert '/end",status="204"} 1' in metrics
            ended = re.findall(r"^characters_sessions_ended_total.* 1", metrics, re.M)
            assert len(ended) == 1 and '"user"' in ended[0], ended
