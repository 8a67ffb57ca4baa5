"""A browser that may use nothing but a relay, and a real coturn."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.rig import Measure, Server, browser, new_tab, running_server, until

SECRET = "shared by the server and its relay"
RELAY_ONLY = """
const Peer = window.RTCPeerConnection;
window.RTCPeerConnection = class extends Peer {
  constructor(options) { super({ ...options, iceTransportPolicy: "relay" }); }
};
"""


def free_port(kind: socket.SocketKind) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def coturn(folder: Path, port: int, secret: str) -> Iterator[Path]:
    """On loopback; hands out its log."""
    program = shutil.which("turnserver")
    if program is None:
        pytest.skip("no coturn on this machine (Debian's package coturn)")
    log = folder / "coturn.txt"
    options = {
        "listening-ip": "127.0.0.1",
        "relay-ip": "127.0.0.1",
        "listening-port": port,
        "realm": "characters",
        "static-auth-secret": secret,
        "userdb": folder / "coturn.db",
        "pidfile": folder / "coturn.pid",
        "log-file": "stdout",
    }
    flags = ("n", "use-auth-secret", "fingerprint", "no-tls", "no-dtls", "no-cli", "verbose")
    command = [program, *(f"--{name}={value}" for name, value in options.items())]
    command += [f"-{flag}" if len(flag) == 1 else f"--{flag}" for flag in flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield log
        assert process.poll() is None, log.read_text("utf-8", "replace")[-2000:]
    finally:
        process.kill()
        process.wait()


@contextmanager
def served(folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("CHARACTERS_TURN_SECRET", SECRET)
    relays = json.dumps([f"turn:127.0.0.1:{port}?transport=udp"])
    with running_server(
        folder / "r", "engine.kind=pattern", "agent.kind=none", f"server.turn_urls={relays}"
    ) as server:
        yield server


async def test_all_media_goes_through_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Measure
) -> None:
    port = free_port(socket.SOCK_DGRAM)
    with coturn(tmp_path, port, SECRET) as log, served(tmp_path, port, monkeypatch) as server:
        async with browser() as launched:
            tab = await new_tab(launched, server, before=RELAY_ONLY)
            measure("live_s", round(await tab.talk(), 2))

            async def two_seconds() -> int | None:
                video = (await tab.inbound()).get("video", {})
                return video["framesDecoded"] if video.get("framesDecoded", 0) > 48 else None

            await until("two seconds of pictures", two_seconds, 20)
            local = await tab.page.evaluate(
                """async () => {
                  const stats = await probe.peers.at(-1).getStats();
                  const of = (type) => [...stats.values()].filter((each) => each.type === type);
                  const pair = stats.get(of("transport")[0].selectedCandidatePairId);
                  return stats.get(pair.localCandidateId);
                }"""
            )
            assert local["candidateType"] == "relay"
            await tab.page.get_by_test_id("stop").click()
            await tab.reach("idle")
        server.when_free()
        assert ":characters" in log.read_text("utf-8", "replace"), "the session's own user name"


async def test_a_relay_that_never_answers_delays_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Measure
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with served(tmp_path, silent.getsockname()[1], monkeypatch) as server:
            async with browser() as launched:
                tab = await new_tab(launched, server)
                measure("live_s", round(await tab.talk(), 2))
                await tab.page.get_by_test_id("stop").click()
                await tab.reach("idle")
                await asyncio.to_thread(server.when_free)
                # And once more on the same page, which was not loaded again.
                await tab.talk()
                await tab.page.get_by_test_id("stop").click()
                await tab.reach("idle")


async def test_a_browser_that_reaches_nothing_says_so_and_frees_the_seat(
    pattern: Server, measure: Measure
) -> None:
    async with browser() as launched:
        tab = await new_tab(launched, pattern, before=RELAY_ONLY)  # and there is no relay
        began_ms = await tab.now_ms()
        await tab.page.get_by_test_id("talk-text").click()
        await tab.page.get_by_test_id("error").wait_for(state="visible", timeout=60_000)
        measure("told_after_s", round((await tab.now_ms() - began_ms) / 1000, 1))
        measure("told", await tab.page.get_by_test_id("error").inner_text())
        await tab.reach("idle")
    pattern.when_free()
