"""A group that is reset has forgotten: nothing that its processes hold is of the session before.

Beside it stands test_engine_processes.py, where the second session's frames are, bit for bit, what
they are on a group that never had a first: so neither cache nor decoder remembers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from fastapi import Request
from fastapi.responses import Response

from characters_serve.config import (
    AgentConfig,
    ChatConfig,
    Config,
    EngineConfig,
    FleetConfig,
    SessionConfig,
)
from characters_serve.messages import Done, OpenSession, Persona
from tests.chat_server import chat_server, event
from tests.unit.session_rig import Browser, HostParent
from tests.unit.small_model import SMALL
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


class Visitor:
    """Everything of one session can be recognised."""

    def __init__(self, name: str, seed: int) -> None:
        self.session_id = f"session-of-{name}"
        self.trace_id = f"trace-of-{name}"
        noise = np.random.default_rng(seed).integers(0, 256, (SMALL.height, SMALL.width, 3))
        self.image_rgb = noise.astype(np.uint8).tobytes()
        self.persona = Persona(
            name, "", {"hobby": f"hobby-of-{name}"}, [], f"instructions-for-{name}"
        )
        self.typed = f"typed-by-{name}"
        self.reply = f"The reply to {name} is long enough to be heard."
        self.secrets = {
            "session": self.session_id.encode(),
            "trace": self.trace_id.encode(),
            "image": self.image_rgb[2000:2064],
            "fact": f"hobby-of-{name}".encode(),
            "instructions": f"instructions-for-{name}".encode(),
            "typed": self.typed.encode(),
            "reply": f"reply to {name}".encode(),
        }


class Searched:
    """The processes of one group, each of which can be asked what it still holds."""

    def __init__(self, host_pid: int, secrets_file: Path) -> None:
        host = psutil.Process(host_pid)
        self._pids = {host_pid: "host"}
        for child in host.children():
            module = next(part for part in child.cmdline() if part.startswith("characters_serve."))
            self._pids[child.pid] = module.rpartition(".")[2]
        self._secrets_file = secrets_file

    async def find(self, visitor: Visitor) -> dict[str, set[str]]:
        """The secrets that each process holds."""
        names = {data.hex(): name for name, data in visitor.secrets.items()}
        self._secrets_file.write_text("\n".join(names))
        found: dict[str, set[str]] = {}
        answers = {pid: self._secrets_file.with_suffix(f".{pid}") for pid in self._pids}
        for pid, answer in answers.items():
            answer.unlink(missing_ok=True)
            os.kill(pid, signal.SIGUSR1)
        for pid, process in self._pids.items():
            await until(answers[pid].exists, PATIENCE_S)
            found[process] = {names[line] for line in answers[pid].read_text().split()}
        return found


async def converse(parent: HostParent, visitor: Visitor, asked: list[str]) -> Browser:
    """A session in which the visitor typed and the character has begun to answer."""
    done = await parent.ask(
        lambda number: OpenSession(
            number,
            visitor.session_id,
            visitor.image_rgb,
            visitor.persona,
            1,
            600.0,
            600.0,
            trace_id=visitor.trace_id,
        )
    )
    assert isinstance(done, Done), done
    browser = Browser(microphone=False)
    await parent.connect(visitor.session_id, browser)
    await until(lambda: browser.channel.readyState == "open", PATIENCE_S)
    text = {"content": visitor.typed}
    browser.channel.send(
        json.dumps({"label": "rtvi-ai", "id": "1", "type": "send-text", "data": text})
    )
    await until(lambda: any(visitor.typed in request for request in asked), PATIENCE_S)
    await until(lambda: "bot-started-speaking" in browser.kinds(), PATIENCE_S)
    return browser


@pytest.mark.timeout(600)
async def test_the_next_session_finds_nothing_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Visitor("Wilhelmina", 1), Visitor("Barnabas", 2)
    asked: list[str] = []

    async def answer(request: Request) -> Response:
        asked.append((await request.body()).decode())
        reply = first.reply if first.typed in asked[-1] else second.reply
        return Response(event(reply) + "data: [DONE]\n\n", media_type="text/event-stream")

    secrets_file = tmp_path / "secrets.txt"
    monkeypatch.setenv("SECRETS_FILE", str(secrets_file))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests' / 'searched'}:{ROOT}")
    async with chat_server(answer) as url:
        config = Config(
            model=SMALL,
            # The search takes long on a busy machine, and this browser sends no heartbeat.
            engine=EngineConfig(device="cpu", stall_timeout_s=PATIENCE_S),
            session=SessionConfig(reconnect_grace_s=PATIENCE_S),
            fleet=FleetConfig(ping_timeout_s=PATIENCE_S),
            agent=AgentConfig(
                recogniser="pocketsphinx", greet=False, chat=ChatConfig(base_url=url)
            ),
        )
        parent = HostParent(tmp_path, config)
        await parent.child.start(PATIENCE_S)
        try:
            assert parent.child.pid is not None
            group = Searched(parent.child.pid, secrets_file)
            browser = await converse(parent, first, asked)
            held = await group.find(first)
            assert all({"session", "trace"} <= secrets for secrets in held.values()), held
            assert {"fact", "instructions", "typed", "reply"} <= held["worker"]
            await parent.close(first.session_id)
            await browser.close()

            browser = await converse(parent, second, asked)
            # What a loop last took is its own until the next; a second has many.
            await asyncio.sleep(1)
            assert await group.find(first) == {process: set() for process in held}
            assert not any(
                secret.decode("latin-1") in request
                for request in asked
                if second.typed in request
                for secret in first.secrets.values()
            )
            told = json.dumps(browser.events)
            assert "Wilhelmina" not in told and "Barnabas" in told
            await parent.close(second.session_id)
            await browser.close()
        finally:
            await parent.stop()
