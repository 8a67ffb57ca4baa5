"""What goes wrong in production, done to a real server: each fault ends with the event that the
client expects, the slot comes back, and a session beside it notices nothing.

One server with four groups on the test picture serves all of it; its agent speaks to an endpoint
that is not there, so that there is an agent's process to kill and an agent that errs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import websockets
import zmq

from characters_serve.channels import Channel, endpoint
from characters_serve.messages import VideoChunk
from tests import serving
from tests.unit.session_rig import Browser
from tests.unit.small_model import SMALL
from tests.waiting import until

GROUPS = 4
SIZE = (192, 128)
VIDEO_STEP = 90_000 // 24
PATIENCE_S = 90.0


async def gone(*processes: psutil.Process) -> None:
    await until(lambda: not any(process.is_running() for process in processes), PATIENCE_S)


class Server(serving.Server):
    """Its groups' processes can be found; `log` has its lines of JSON."""

    def __init__(self, folder: Path, log: Path, *settings: str) -> None:
        self.log = log
        super().__init__(
            folder / "run",
            *(f"model.width={SIZE[0]}", f"model.height={SIZE[1]}", "server.log_format=json"),
            *("fleet.ping_interval_s=0.5", "fleet.ping_timeout_s=6"),
            "server.sessions_per_minute=1000",
            *settings,
            log=log,
        )

    async def all_ready(self, groups: int = GROUPS) -> None:
        async with httpx.AsyncClient(base_url=self.url) as http, asyncio.timeout(PATIENCE_S):
            while (await http.get("/healthz/ready")).json()["free"] != groups:
                await asyncio.sleep(0.1)

    def lines_about(self, session_id: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.log.read_text().splitlines())
        return [line for line in lines if line.get("session") == session_id[:8]]

    def group_of(self, session_id: str) -> str:
        """The group that holds a session, as the log has it."""
        return next(str(said["group"]) for said in self.lines_about(session_id) if "group" in said)

    def process_of(self, group: str, module: str) -> psutil.Process:
        (found,) = (
            child
            for child in self.descendants()
            if str(self.run_dir / group) in (line := child.cmdline()) and module in line
        )
        return found


@dataclass
class Client:
    """A page: it watches, hears events, and says once a second that it is there."""

    http: httpx.AsyncClient
    session: dict[str, Any]
    browser: Browser
    token: str
    trace_id: str

    async def status(self) -> dict[str, Any]:
        answer = await self.http.get(
            f"/v1/sessions/{self.session['id']}", headers={"Authorization": f"Bearer {self.token}"}
        )
        return dict(answer.json())

    async def leave(self) -> httpx.Response:
        return await self.http.delete(
            f"/v1/sessions/{self.session['id']}", headers={"Authorization": f"Bearer {self.token}"}
        )

    async def reach(self, *states: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while (now := await self.status())["status"] not in states:
                assert now["status"] not in ("ended", "failed"), now["reason"]
                await asyncio.sleep(0.05)
        return now

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The data of the server's messages of this kind."""
        said = [e["data"] for e in self.browser.events if e["type"] == "server-message"]
        return [data for data in said if data.get("kind") == kind]

    async def watches(self) -> None:
        """New pictures come."""
        seen = len(self.browser.pictures)
        await until(lambda: len(self.browser.pictures) > seen + 5)


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[Client]:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                created = await http.post("/v1/sessions", json={"character": "mira"})
                if created.status_code != 503:
                    break
                await asyncio.sleep(0.3)
        assert created.status_code == 201, created.text
        session, browser = created.json(), Browser(microphone=False)
        trace_id = created.headers["traceresponse"].split("-")[1]
        page = Client(http, session, browser, session["client_secret"]["value"], trace_id)
        await page.reach("ready")
        answer = await http.post(
            f"/v1/sessions/{session['id']}/webrtc",
            json={"sdp": await browser.offer(), "type": "offer"},
            headers={"Authorization": f"Bearer {page.token}"},
        )
        assert answer.status_code == 201, answer.text
        page.token = answer.json()["resume_token"]
        await browser.accept(answer.json()["sdp"])
        browser.keep_beating()
        try:
            await until(lambda: len(browser.pictures) > 5)
            await page.reach("live")
            yield page
        finally:
            with contextlib.suppress(httpx.HTTPError):
                await page.leave()
            await browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    running = Server(
        folder,
        folder / "log",
        f"fleet.groups={GROUPS}",
        *("agent.kind=openai_realtime", "agent.realtime.url=ws://127.0.0.1:9/"),
    )
    yield running
    running.kill()


HOST = "characters_serve.session.host"
ENGINE = "characters_serve.engine.pattern"
AGENT = "characters_serve.agent.worker"


NAMES = {HOST: "host", ENGINE: "pattern", AGENT: "agent"}


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
async def test_a_process_that_dies_or_hangs_fails_its_session_and_no_other(
    server: Server, sent: signal.Signals
) -> None:
    async with AsyncExitStack() as stack:
        pages = [await stack.enter_async_context(client(server)) for _ in range(GROUPS)]
        beside = pages.pop()
        groups = [server.group_of(page.session["id"]) for page in pages]
        lost = [server.process_of(g, module) for g, module in zip(groups, NAMES, strict=True)]
        hosts = [server.process_of(group, HOST) for group in groups]
        whole = [p for host in hosts for p in (host, *host.children())]
        for process in lost:
            process.send_signal(sent)
        for page, (module, name) in zip(pages, NAMES.items(), strict=True):
            reason = (await page.reach("failed"))["reason"]
            assert reason.endswith(f"{name} exited with code -9")
            if module != HOST:  # a host that is gone can tell nothing; the API does
                (end,) = page.told("session-ending")
                assert end["reason"] in reason
            if (module, sent) == (ENGINE, signal.SIGSTOP):
                assert "stalled" in [said["state"] for said in page.told("avatar-state")]
        await gone(*whole)
        assert (await beside.status())["status"] == "live"
        await beside.watches()


async def test_who_leaves_a_hanging_engine_is_let_go_and_the_cold_start_disturbs_nobody(
    server: Server,
) -> None:
    """How smoothly the others play is measured: scripts/measurements/fleet.py, `cold_start`."""
    async with client(server) as page:
        first = len(page.browser.pictures)
        async with client(server) as leaver:
            engine = server.process_of(server.group_of(leaver.session["id"]), ENGINE)
            engine.suspend()
            left = await leaver.leave()
            assert left.status_code == 204, "whatever its engine does"
        await gone(engine)
        await server.all_ready(GROUPS - 1)
        await page.watches()
        times = [picture.pts or 0 for picture in page.browser.pictures[first:]]
        steps = [after - before for before, after in pairwise(times)]
        # One clock all along; a busy machine may leave pictures out, and does not stop it.
        assert all(step > 0 and step % VIDEO_STEP == 0 for step in steps)
        assert max(steps) < 5 * 90_000
        assert page.told("session-ending") == [] and (await page.status())["status"] == "live"


async def test_clients_that_leave_in_the_middle_of_a_step_leave_no_trace(server: Server) -> None:
    async with client(server) as beside:
        engines = set()
        for number in range(5):
            async with client(server) as page:
                engine = server.process_of(server.group_of(page.session["id"]), ENGINE)
                engines.add(engine)
                engine.suspend()  # what it has begun is not done when its client is gone
                await page.browser.close()
                if number % 2:
                    engine.resume()
                else:  # not before the session's end is asked for
                    asyncio.get_running_loop().call_later(0.5, engine.resume)
            await beside.watches()
        assert all(engine.is_running() for engine in engines), "a group was rebuilt"
        assert (await beside.status())["status"] == "live"
        async with client(server) as last:
            await last.watches()


async def test_a_group_that_is_slow_to_start_holds_up_nobody(server: Server) -> None:
    await server.all_ready()
    async with client(server) as beside:
        taken = server.group_of(beside.session["id"])
        hosts = [p for p in psutil.Process(server.process.pid).children() if HOST in p.cmdline()]
        idle = next(p for p in hosts if str(server.run_dir / taken) not in p.cmdline())
        idle.kill()

        def starting() -> list[psutil.Process]:
            children = psutil.Process(server.process.pid).children()
            return [p for p in children if p not in hosts and HOST in p.cmdline()]

        await until(starting)
        (cold,) = starting()
        cold.suspend()
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
                for _ in range(3):
                    await beside.watches()
                    assert (await http.get("/healthz/live")).status_code == 200
                    assert (await http.get("/healthz/ready")).json()["free"] < GROUPS - 1
                async with client(server) as another:  # its offer is answered
                    await another.watches()
        finally:
            cold.resume()
        assert (await beside.status())["status"] == "live"
    await server.all_ready()


async def test_a_slow_chunk_is_told_and_survived(server: Server) -> None:
    async with client(server) as page:
        engine = server.process_of(server.group_of(page.session["id"]), ENGINE)
        engine.suspend()
        await until(lambda: [s["state"] for s in page.told("avatar-state")][-1:] == ["stalled"])
        engine.resume()
        await until(lambda: [s["state"] for s in page.told("avatar-state")][-1] != "stalled")
        await page.watches()
        assert (await page.status())["status"] == "live"


def chunk(session_id: str, index: int, voice_48k: bytes) -> VideoChunk:
    frames = [bytes(SIZE[0] * SIZE[1] * 3 // 2 if voice_48k else 0)] * 4
    return VideoChunk(session_id, 0, index, frames, voice_48k, 0, 0.0, False, 4, 1.0, 1.0)


async def test_chunks_of_another_session_or_time_are_not_played(server: Server) -> None:
    async with client(server) as page:
        folder = server.run_dir / server.group_of(page.session["id"])
        zombie = Channel(endpoint(folder, "chunks"), "push", bind=False)
        for stray in (
            *(chunk("0" * 32, index, bytes(16_000)) for index in range(400)),
            *(chunk(page.session["id"], index, bytes(16_000)) for index in (0, 1, 10**6)),
        ):
            await zombie.send(stray)
        seen = len(page.browser.pictures)
        await until(lambda: len(page.browser.pictures) > seen + 24)
        zombie.close()
        assert page.told("session-ending") == [] and (await page.status())["status"] == "live"
        black = [p for p in page.browser.pictures if int(p.to_ndarray(format="gray").max()) < 40]
        assert black == [], "a zombie's picture was shown"


@pytest.mark.parametrize("kind", ["impossible", "garbage"])
async def test_an_engine_that_talks_nonsense_fails_its_session(server: Server, kind: str) -> None:
    async with client(server) as page:
        address = endpoint(server.run_dir / server.group_of(page.session["id"]), "chunks")
        if kind == "garbage":
            raw: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            raw.connect(address)
            raw.send_multipart([b"VideoChunk", b"\xc1 no message"])
            await page.reach("failed")
            raw.close(0)
        else:
            # Stopped, so that a step is waited for: the test picture answers at once.
            server.process_of(server.group_of(page.session["id"]), ENGINE).suspend()
            broken = Channel(address, "push", bind=False)
            while (await page.status())["status"] == "live":
                for index in range(100):  # one of them is the next
                    await broken.send(chunk(page.session["id"], index, b""))
                await asyncio.sleep(0.2)
            broken.close()
        reason = (await page.reach("failed"))["reason"]
        expected = {"impossible": "sent an impossible chunk", "garbage": "sent no message"}
        assert expected[kind] in reason
        assert [end["reason"] for end in page.told("session-ending")] == [reason]


async def test_an_agent_that_cannot_think_is_told_and_the_session_goes_on(server: Server) -> None:
    async with client(server) as page:
        await until(lambda: any(event["type"] == "error" for event in page.browser.events))
        about = server.lines_about(page.session["id"])
        assert {line["process"].rpartition("/")[2] for line in about} == {"", "host", "agent"}
        assert {line["trace_id"] for line in about} == {page.trace_id}
        error = next(e["data"] for e in page.browser.events if e["type"] == "error")
        assert error["fatal"] is False and "realtime" in error["message"]
        await page.watches()
        assert (await page.status())["status"] == "live"


async def test_media_goes_on_while_the_gateway_is_stopped(server: Server) -> None:
    async with client(server) as page:
        server.process.send_signal(signal.SIGSTOP)
        seen = len(page.browser.pictures)
        await until(lambda: len(page.browser.pictures) > seen + 24)
        server.process.send_signal(signal.SIGCONT)
        assert (await page.status())["status"] == "live"


async def test_every_slot_is_back_and_the_end_leaves_nothing(server: Server) -> None:
    """Last: after all that was done above."""
    await server.all_ready()
    shared = {path.name for path in Path("/dev/shm").iterdir()}
    everything = server.descendants()
    assert len(everything) == 3 * GROUPS
    server.process.send_signal(signal.SIGTERM)
    assert await server.ended(PATIENCE_S) in (0, -signal.SIGTERM)
    assert not any(process.is_running() for process in everything)
    assert list(server.run_dir.iterdir()) == []
    assert {path.name for path in Path("/dev/shm").iterdir()} <= shared


async def test_a_full_disk_for_logs_and_a_closed_terminal_stop_nobody(tmp_path: Path) -> None:
    running = Server(tmp_path, Path("/dev/full"), "agent.kind=none")
    try:
        running.said.close()
        await running.all_ready(1)
        async with client(running) as page:
            await page.watches()
        await running.all_ready(1)
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended(PATIENCE_S) in (0, -signal.SIGTERM)
        assert list(running.run_dir.iterdir()) == []
    finally:
        running.kill()


async def test_a_rank_that_dies_or_hangs_ends_its_session_and_the_slot_comes_back(
    tmp_path: Path,
) -> None:
    small = SMALL.model_dump(mode="json", exclude_unset=True)
    running = Server(
        tmp_path,
        tmp_path / "log",
        *("engine.kind=diffusion", "engine.tensor_parallel=2", "engine.device=cpu"),
        *(f"model.{name}={value}" for name, value in small.items()),
        *("optimizations.dedicated_decoder=false", "agent.kind=none"),
    )
    try:
        for sent in (signal.SIGKILL, signal.SIGSTOP):
            await running.all_ready(1)  # the second time: the slot is back
            async with client(running) as page:
                group = running.group_of(page.session["id"])
                ranks = running.process_of(group, HOST).children(recursive=True)
                (follower,) = (rank for rank in ranks if rank.cmdline()[-2:] == ["--rank", "1"])
                follower.send_signal(sent)
                reason = (await page.reach("failed"))["reason"]
                (end,) = page.told("session-ending")
                assert end["reason"] in reason and reason.endswith("exited with code -9")
                if sent is signal.SIGKILL:
                    assert "rank1" in reason, "the one that died, not the one that misses it"
            await gone(*ranks)
        text = httpx.get(f"{running.url}/metrics").text
        ended = 'characters_sessions_ended_total{reason="process_died",state="failed"} 2.0'
        assert ended in text
    finally:
        running.kill()


@pytest.mark.parametrize("signals", [1, 2])
async def test_sigterm_while_the_character_speaks(tmp_path: Path, signals: int) -> None:
    """The first lets it finish, the second does not wait for it."""
    log, spoken_s = tmp_path / "log", 2.0 if signals == 1 else 40.0
    running = Server(tmp_path, log, "agent.kind=external", "server.drain_s=80")
    try:
        await running.all_ready(1)
        async with client(running) as page, voice(running, page) as (agent, heard):
            everything = running.descendants()
            await agent.send(json.dumps({"type": "start", "sample_rate": 8000}))
            await agent.send(bytes(2 * round(8000 * spoken_s)))
            await agent.send(json.dumps({"type": "end"}))
            await until(lambda: "playback_started" in heard)
            running.process.send_signal(signal.SIGTERM)
            await until(lambda: len(page.told("session-ending")) == 1)
            assert page.told("session-ending")[0]["reason"] == "the server is shutting down"
            if signals == 1:
                await until(lambda: "playback_finished" in heard)
                finished = heard["playback_finished"]
                assert finished["interrupted"] is False
                assert finished["position_ms"] == 1000 * spoken_s
                await page.watches()
                assert (await page.status())["status"] == "live"
            else:
                assert "playback_finished" not in heard
                running.process.send_signal(signal.SIGTERM)
                await until(lambda: running.process.poll() is not None, spoken_s - 10)
        assert await running.ended(PATIENCE_S) in (0, -signal.SIGTERM)
        assert not any(process.is_running() for process in everything)
        assert list(running.run_dir.iterdir()) == []
    finally:
        running.kill()


@asynccontextmanager
async def voice(
    server: Server, page: Client
) -> AsyncIterator[tuple[websockets.ClientConnection, dict[str, dict[str, Any]]]]:
    """The session's external agent, and the last message of each type that it was sent."""
    heard: dict[str, dict[str, Any]] = {}

    async def read() -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            async for frame in socket:
                if isinstance(frame, str):
                    message = json.loads(frame)
                    heard[message["type"]] = message

    url = f"{server.url.replace('http', 'ws', 1)}/v1/sessions/{page.session['id']}/audio"
    headers = {"Authorization": f"Bearer {page.token}"}
    async with websockets.connect(url, additional_headers=headers) as socket:
        reading = asyncio.create_task(read())
        await until(lambda: "ready" in heard)
        try:
            yield socket, heard
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
