"""In: settings, a microphone's file. Out: `characters serve` and a real browser's tab on its page.

Knows the page's test ids and the HTTP API, nothing of the server's inside.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import psutil
import pytest
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Page,
    ViewportSize,
    async_playwright,
    expect,
)

from characters_serve.bench.cores import usage
from tests.serving import ROOT, address_in, serve_command

HERE = Path(__file__).parent
READY_S = 90.0
STOP_S = 20.0
FREE_S = 40.0
LIVE_S = 20.0
OTHERS_CORES = 0.3
# Whether a machine is fast and quiet is known to who runs the tests.
JUDGED = os.environ.get("JUDGE_FIGURES") == "1"

FLAGS = (
    "--autoplay-policy=no-user-gesture-required",
    "--use-fake-device-for-media-stream",
    "--disable-features=WebRtcHideLocalIpsWithMdns",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

Stats = dict[str, Any]
Measure = Callable[[str, object], None]
T = TypeVar("T")


class Server:
    """A running `characters serve`."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.log = log
        self.url = ""

    @property
    def gateway(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    @property
    def host(self) -> psutil.Process:
        """Of the only group."""
        (host,) = self.gateway.children()
        return host

    def child(self, module: str) -> psutil.Process:
        """The group's process that runs characters_serve.<module>."""
        wanted = f"characters_serve.{module}"
        (found,) = (
            child for child in self.gateway.children(recursive=True) if wanted in child.cmdline()
        )
        return found

    def cpu_s(self) -> float:
        """Processor time of the whole server so far."""
        return usage(self.gateway).cpu_s

    def wait_until(self, what: str, holds: Callable[[], bool], within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                end = self.log.read_text("utf-8", "replace")[-3000:]
                pytest.fail(f"{what} within {within_s:g} s; the server's log ends:\n{end}")
            time.sleep(0.05)

    def is_free(self) -> bool:
        """Ready, and no session holds its group."""
        response = httpx.get(f"{self.url}/healthz/ready")
        return response.status_code == 200 and response.json()["free"] == 1

    def when_free(self) -> Server:
        """A test that failed with a browser connected must not fail the next one."""
        self.wait_until("the group is free", self.is_free, FREE_S)
        return self

    def seconds_until_free(self, within_s: float) -> float:
        """Call it from a thread while a browser is connected to this test."""
        began_s = time.monotonic()
        self.wait_until("the group is free", self.is_free, within_s)
        return time.monotonic() - began_s


@contextmanager
def running_server(
    run_dir: Path, *settings: str, module: str = "characters_serve.cli"
) -> Iterator[Server]:
    """Ready when it is handed out; afterwards nothing of it is left, or the test fails."""
    run_dir.mkdir(parents=True, exist_ok=True)
    all_settings = (
        "server.port=0",
        f"server.run_dir={run_dir}",
        "server.sessions_per_minute=100000",
        "fleet.stop_timeout_s=3",
        "server.drain_s=1",
        *settings,
    )
    log = run_dir / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            serve_command(*all_settings, module=module),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(process, run_dir, log)
    try:
        server.wait_until("the server listens", lambda: b"http://" in log.read_bytes(), READY_S)
        server.url = address_in(log.read_text())
        server.wait_until("a group is ready", lambda: "\nOpen http" in log.read_text(), READY_S)
        yield server
        children = server.gateway.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) in (0, -signal.SIGTERM)
        # The kernel ends what its parent left; on a busy machine that takes a moment.
        assert psutil.wait_procs(children, timeout=STOP_S)[1] == []
        assert list(run_dir.glob("g*")) == []
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@cache
def chromium() -> str | None:
    """The path of a Chromium that runs, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    found = sorted(Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*/chrome"))
    return str(found[-1]) if found else None


class Others:
    """What other programs take of this machine, from now on.

    Ask while all that the test started still runs: the time of what has ended is nobody's.
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._spent_s = usage(psutil.Process()).others_s

    @property
    def cores(self) -> float:
        spent_s = usage(psutil.Process()).others_s - self._spent_s
        return spent_s / (time.monotonic() - self._began_s)

    def can_judge(self, measure: Measure) -> bool:
        """Whether the figures are to be judged, and the others left enough for that.

        They are always printed.
        """
        cores = self.cores
        measure("cores_of_others", round(cores, 2))
        return JUDGED and cores < OTHERS_CORES


def watched_s(seconds: float) -> float:
    """How long figures are gathered: a third of it where nobody judges them."""
    return seconds if JUDGED else seconds / 3


class Tab:
    """The server's page in a browser."""

    def __init__(self, page: Page, server: Server) -> None:
        self.page = page
        self.server = server
        self.session: dict[str, Any] = {}
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    async def open(self) -> None:
        await self.page.goto(self.server.url)
        await expect(self.page.get_by_test_id("talk")).to_be_enabled()

    async def pick(self, character: str) -> None:
        await self.page.get_by_test_id(f"gallery-card-{character}").click()

    async def talk(self, button: Literal["talk", "talk-text"] = "talk-text") -> float:
        """Starts a conversation; returns the seconds until the page shows it live."""
        async with self.page.expect_response("**/v1/sessions") as created:
            began_s = time.monotonic()
            await self.page.get_by_test_id(button).click()
        self.session = await (await created.value).json()
        await self.reach("live")
        return time.monotonic() - began_s

    async def reach(self, phase: str, within_s: float = LIVE_S) -> None:
        await self.page.wait_for_selector(f"body[data-phase={phase}]", timeout=within_s * 1000)

    async def inbound(self) -> dict[str, Stats]:
        """The browser's inbound-rtp statistics, by kind."""
        found: dict[str, Stats] = await self.page.evaluate("() => probe.inbound()")
        return found

    async def seen(self, name: str) -> list[Any]:
        """What the probe has gathered: events, levels, onsets, frames, motion."""
        found: list[Any] = await self.page.evaluate("name => probe[name]", name)
        return found

    async def hear(self, lowpass_hz: int = 0) -> None:
        await self.page.evaluate("hz => probe.hear(hz)", lowpass_hz)

    async def event(
        self, kind: str, within_s: float, *, after_ms: float = 0.0, **data: Any
    ) -> dict[str, Any]:
        """The first such event of the server that arrived after that time."""

        async def arrived() -> dict[str, Any] | None:
            for event in await self.seen("events"):
                matches = data.items() <= (event.get("data") or {}).items()
                if event["type"] == kind and event["atMs"] > after_ms and matches:
                    return dict(event)
            return None

        return await until(f"a {kind} event", arrived, within_s)

    async def now_ms(self) -> float:
        return float(await self.page.evaluate("() => performance.now()"))

    async def mic_reaches(self, seconds: float) -> None:
        """Waits until that much of the microphone's file has been played."""
        await self.page.evaluate(
            "s => new Promise(r => setTimeout(r, probe.micAtMs + 1000 * s - performance.now()))",
            seconds,
        )

    async def passes(self, seconds: float) -> None:
        """Lets the conversation go on."""
        await self.page.evaluate("s => new Promise(r => setTimeout(r, 1000 * s))", seconds)

    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.session['client_secret']['value']}"}

    async def status(self) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self.server.url) as http:
            response = await http.get(
                f"/v1/sessions/{self.session['id']}", headers=self.authorization()
            )
        return dict(response.json())

    async def say(self, text: str) -> None:
        """These very words, through the API."""
        async with httpx.AsyncClient(base_url=self.server.url) as http:
            response = await http.post(
                f"/v1/sessions/{self.session['id']}/say",
                json={"text": text},
                headers=self.authorization(),
            )
        assert response.status_code == 204, response.text


async def until(what: str, find: Callable[[], Awaitable[T | None]], within_s: float) -> T:
    """The first thing found that is not None."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                found = await find()
                if found is not None:
                    return found
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"{what} within {within_s:g} s")


@asynccontextmanager
async def browser(mic: Path | None = None, *, deny_mic: bool = False) -> AsyncIterator[Browser]:
    """A browser whose microphone plays the file once, from when a page opens it."""
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine")
    source = [f"--use-file-for-fake-audio-capture={mic}%noloop"] if mic else []
    prompt = "--deny-permission-prompts" if deny_mic else "--use-fake-ui-for-media-stream"
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=path,
            chromium_sandbox=False,
            args=[*FLAGS, prompt, *source],
        )
        try:
            yield launched
        finally:
            await launched.close()


async def new_tab(
    launched: Browser,
    server: Server,
    *,
    hears: bool = False,
    dark: bool = False,
    size: ViewportSize | None = None,
    before: str = "",
) -> Tab:
    """A tab of its own context, with the probe in it and the page loaded; `before` runs first.

    The probe's ears are an audio worklet, which the page's content policy forbids: without `hears`
    the policy holds.
    """
    context = await launched.new_context(
        bypass_csp=hears,
        color_scheme="dark" if dark else "light",
        viewport=size or ViewportSize(width=1280, height=800),
    )
    if before:
        await context.add_init_script(before)
    meter = json.dumps((HERE / "probe_worklet.js").read_text())
    await context.add_init_script(f"window.probeMeter = {meter};")
    await context.add_init_script(path=HERE / "probe.js")
    tab = Tab(await context.new_page(), server)
    await tab.open()
    return tab
