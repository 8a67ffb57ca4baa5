"""`characters serve` as people run it: the real session host, a real WebRTC peer, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from aiortc import RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import AudioStreamTrack
from av import VideoFrame

from characters_serve import cli
from characters_serve.config import ServerConfig
from tests.serving import ROOT, Server, serve_command

ENDS_S = 30


@asynccontextmanager
async def server(
    run_dir: Path, *settings: str, ready: bool = True, log: Path | None = None
) -> AsyncIterator[Server]:
    running = Server(run_dir, "agent.kind=none", *settings, log=log)
    try:
        if ready:
            async with asyncio.timeout(120):
                await asyncio.to_thread(until_open, running)
        yield running
    finally:
        running.kill()


def until_open(running: Server) -> None:
    assert any(line.startswith(b"Open http://") for line in running.said), "it has ended"


def left_over(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.glob("g*")]


async def connect(
    http: httpx.AsyncClient, heard: list[dict[str, Any]] | None = None
) -> tuple[dict[str, Any], RTCPeerConnection]:
    """heard: where the data of the server's events goes."""
    created = await http.post("/v1/sessions", json={"character": "mira"})
    assert created.status_code == 201, created.text
    session = created.json()
    peer = RTCPeerConnection()
    peer.addTrack(AudioStreamTrack())
    peer.addTransceiver("video", direction="recvonly")
    events = peer.createDataChannel("events")
    if heard is not None:
        events.on("message", lambda text: heard.append(json.loads(text).get("data") or {}))
    peer.createDataChannel("probe", ordered=False, maxRetransmits=0)
    await peer.setLocalDescription(await peer.createOffer())
    answer = await http.post(
        f"/v1/sessions/{session['id']}/webrtc",
        content=peer.localDescription.sdp,
        headers={"Content-Type": "application/sdp", **secret_of(session)},
    )
    assert answer.status_code == 201, answer.text
    await peer.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
    return session, peer


def secret_of(session: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {session['client_secret']['value']}"}


async def reach(http: httpx.AsyncClient, session: dict[str, Any], state: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            response = await http.get(f"/v1/sessions/{session['id']}", headers=secret_of(session))
            if response.json()["status"] == state:
                return dict(response.json())
            await asyncio.sleep(0.1)


async def free_again(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(40):
        while (await http.get("/healthz/ready")).json()["free"] != 1:
            await asyncio.sleep(0.1)


async def test_a_peer_sees_the_character_and_leaves_no_trace(tmp_path: Path) -> None:
    async with server(tmp_path) as running, httpx.AsyncClient(base_url=running.url) as http:
        assert "<html" in (await http.get("/")).text
        too_long = await http.post("/v1/sessions", files={"image": bytes(12 * 1024 * 1024)})
        assert too_long.status_code == 413 and too_long.json()["field"] == "image"
        for _ in range(2):
            session, peer = await connect(http)
            video = next(t.receiver.track for t in peer.getTransceivers() if t.kind == "video")
            async with asyncio.timeout(20):
                frame = await video.recv()
            assert isinstance(frame, VideoFrame) and (frame.width, frame.height) == (384, 256)
            await reach(http, session, "live")
            response = await http.delete(
                f"/v1/sessions/{session['id']}", headers=secret_of(session)
            )
            assert response.status_code == 204
            await peer.close()
            await free_again(http)
        text = (await http.get("/metrics")).text
        assert 'characters_sessions{state="live"} 0.0' in text
        assert 'characters_groups{state="ready"} 1.0' in text
        children = running.descendants()
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended(ENDS_S) in (0, -signal.SIGTERM)
    assert left_over(tmp_path) == [] and not any(child.is_running() for child in children)


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "starting"])
async def test_ctrl_c_ends_everything(tmp_path: Path, ready: bool) -> None:
    async with server(tmp_path, ready=ready) as running:
        if not ready:
            await asyncio.sleep(0.5)
        children = running.descendants()
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does
        assert await running.ended(ENDS_S) == 0
    # Interrupted while it still starts, the kernel ends its children just after it.
    _, alive = psutil.wait_procs(children, timeout=5)
    assert left_over(tmp_path) == [] and not alive


async def test_sigterm_lets_the_conversation_finish_and_admits_no_other(tmp_path: Path) -> None:
    async with (
        server(tmp_path, "server.drain_s=8") as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        heard: list[dict[str, Any]] = []
        session, peer = await connect(http, heard)
        video = next(t.receiver.track for t in peer.getTransceivers() if t.kind == "video")
        await reach(http, session, "live")
        os.killpg(running.process.pid, signal.SIGTERM)  # as a service manager does
        async with asyncio.timeout(5):
            while (ready := await http.get("/healthz/ready")).status_code != 503:
                await asyncio.sleep(0.02)
        assert ready.json()["status"] == "draining"
        refused = await http.post("/v1/sessions", json={"character": "mira"})
        assert refused.status_code == 503 and "shutting down" in refused.json()["detail"]
        async with asyncio.timeout(5):
            while not any(data.get("kind") == "session-ending" for data in heard):
                await asyncio.sleep(0.02)
        notice = next(data for data in heard if data.get("kind") == "session-ending")
        assert notice["reason"] == "the server is shutting down" and 0 < notice["in_ms"] <= 8000
        for _ in range(24):
            await video.recv()
        answer = await http.get(f"/v1/sessions/{session['id']}", headers=secret_of(session))
        assert answer.json()["status"] in ("live", "reconnecting"), "it goes on while it may"
        assert await running.ended(ENDS_S) in (0, -signal.SIGTERM)
        await peer.close()
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_now(tmp_path: Path, how: signal.Signals) -> None:
    async with (
        server(tmp_path, "server.drain_s=60") as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        session, peer = await connect(http)
        await reach(http, session, "live")
        running.process.send_signal(how)
        await asyncio.sleep(0.5)
        assert (await http.get("/healthz/live")).status_code == 200
        running.process.send_signal(how)
        assert await running.ended(15) in (0, -signal.SIGTERM)
        await peer.close()
    assert left_over(tmp_path) == []


async def test_json_logs_follow_a_session_and_hold_nothing_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = "the quick brown vixen"
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with (
        server(
            tmp_path / "run",
            *("server.log_format=json", "agent.kind=local", "agent.recogniser=pocketsphinx"),
            log=log,
        ) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as http,
    ):
        http.headers["traceparent"] = f"00-{trace_id}-00f067aa0ba902b7-01"
        heard: list[dict[str, Any]] = []
        session, peer = await connect(http, heard)
        await reach(http, session, "live")
        said = await http.post(
            f"/v1/sessions/{session['id']}/say", json={"text": words}, headers=secret_of(session)
        )
        assert said.status_code == 204
        async with asyncio.timeout(30):
            while not any(words in str(data.get("text", "")) for data in heard):
                await asyncio.sleep(0.05)
        offer = peer.localDescription.sdp
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as raw:
            raw.sendall(b"\x00 no request\r\n\r\n")
            assert await asyncio.to_thread(raw.recv, 100)
        await http.delete(f"/v1/sessions/{session['id']}", headers=secret_of(session))
        await peer.close()
        await free_again(http)
        running.process.send_signal(signal.SIGTERM)
        await running.ended(ENDS_S)
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["session"] for line in lines if "session" in line} >= {session["id"][:8]}
    ours = [line for line in lines if line.get("session") == session["id"][:8]]
    assert {line["trace_id"] for line in ours} == {trace_id}
    assert any(line["lease_epoch"] > 0 for line in ours if "lease_epoch" in line)
    spoken = [str(data["text"]) for data in heard if data.get("text")]
    strangers = [line for line in lines if line["logger"].startswith("uvicorn")]
    assert strangers == [], "whoever sends nonsense would fill the log"
    secrets = [session["id"], session["client_secret"]["value"], *spoken]
    secrets += [line for line in offer.splitlines() if "ice-" in line or "fingerprint" in line]
    assert words in " ".join(spoken) and len(secrets) > 4
    assert [secret for secret in secrets if secret in text] == []


async def test_a_killed_servers_folders_go_when_the_next_one_starts(tmp_path: Path) -> None:
    async with server(tmp_path) as running:
        running.process.kill()
        await running.ended(ENDS_S)
    (dead,) = left_over(tmp_path)
    long_ago_s = time.time() - 60
    os.utime(tmp_path / dead, (long_ago_s, long_ago_s))
    async with server(tmp_path):
        assert dead not in left_over(tmp_path) and len(left_over(tmp_path)) == 1


async def test_when_the_server_is_killed_nothing_survives_it(tmp_path: Path) -> None:
    async with server(tmp_path) as running:
        children = running.descendants()
        assert len(children) >= 2
        running.process.kill()
        await running.ended(ENDS_S)
        async with asyncio.timeout(10):
            while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children):
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server.prot=1", "server.prot: there is no such setting"),
        (
            "server.allowed_origins=https://a.example",
            "server.allowed_origins: should be a list: [a, b]",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(
    setting: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--set", setting]) == cli.EXIT_CONFIG
    assert capsys.readouterr().err == f"characters: {words}\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_no_key_no_strangers(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHARACTERS_API_KEY", raising=False)
    assert cli.main(["serve", "--set", f"server.host='{host}'"]) == cli.EXIT_CONFIG
    said = capsys.readouterr().err
    assert said.startswith(f"characters: server.host: {host} can be reached")
    assert "CHARACTERS_API_KEY is not set" in said and "server.allow_keyless=true" in said


def test_a_key_or_a_plain_word_opens_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHARACTERS_API_KEY", raising=False)
    cli.check_exposure(ServerConfig())
    cli.check_exposure(ServerConfig(host="0.0.0.0", allow_keyless=True))
    monkeypatch.setenv("CHARACTERS_API_KEY", "k")
    cli.check_exposure(ServerConfig(host="0.0.0.0"))


async def test_a_taken_port_is_named() -> None:
    taken = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *serve_command(f"server.port={port}"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    taken.close()
    await taken.wait_closed()
    assert process.returncode == cli.EXIT_CONFIG
    assert b"server.port: cannot listen" in errors and b"already in use" in errors


async def test_weights_that_are_not_there_end_the_server_with_one_line(tmp_path: Path) -> None:
    """Told by the engine's own processes, through their host."""
    settings = ("server.port=0", "agent.kind=none", f"model.weights={tmp_path / 'none'}")
    process = await asyncio.create_subprocess_exec(
        *serve_command(*settings),
        "--log-level=error",
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    (said,) = errors.decode().splitlines()
    assert said.startswith("characters: no group can start: host: ")
    assert "model.weights: no " in said and str(tmp_path / "none") in said
    assert process.returncode == cli.EXIT_CONFIG


def test_doctor_says_what_will_run(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", "--set", "engine.kind=pattern", "--set", "server.port=0"])
    said = capsys.readouterr().out
    assert "test pattern, 384 x 256 at 24 fps" in said
    for subject in ("python", "torch", "cpu", "memory", "gpu", "FlashAttention-3", "multicast"):
        assert subject in said
