"""The agent's real process, over its real control channel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from characters_serve.config import AgentConfig, Config
from characters_serve.messages import (
    AgentAudio,
    AgentEnd,
    AgentInterrupt,
    AgentSay,
    AgentStart,
    AgentStarted,
    Message,
    Persona,
    Playback,
    Transcript,
    UserAudio,
    UserText,
)
from characters_serve.processes import ChildFailed, ChildProcess
from tests.e2e.speech import question_pcm

MIRA = Persona("Mira", "I'm Mira.", {}, ["tea"], "Warm.")


class Host:
    """The session host's side of the channel."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        self._news = asyncio.Event()
        self.exits: list[str] = []

    async def on_message(self, message: Message) -> None:
        self.received.append(message)
        self._news.set()

    async def on_exit(self, reason: str) -> None:
        self.exits.append(reason)

    async def until_said(self, session_id: str, utterance_id: int) -> str:
        def pieces() -> list[AgentAudio]:
            return [
                m
                for m in self.received
                if isinstance(m, AgentAudio)
                and (m.session_id, m.utterance_id) == (session_id, utterance_id)
            ]

        async with asyncio.timeout(20):
            while not any(piece.last for piece in pieces()):
                self._news.clear()
                await self._news.wait()
        return " ".join(piece.text for piece in pieces() if piece.text)


@asynccontextmanager
async def worker(tmp_path: Path, config: AgentConfig) -> AsyncIterator[tuple[ChildProcess, Host]]:
    (tmp_path / "config.json").write_text(Config(agent=config).model_dump_json())
    host = Host()
    child = ChildProcess(
        "agent",
        "characters_serve.agent.worker",
        tmp_path,
        nice=10,
        on_message=host.on_message,
        on_exit=host.on_exit,
        ping_interval_s=0.2,
    )
    await child.start(60)
    try:
        yield child, host
    finally:
        stopping = time.monotonic()
        await child.stop("test over", 60)
        assert time.monotonic() - stopping < 30, "the acknowledgement arrives before the exit"


async def test_two_sessions_one_after_the_other(tmp_path: Path) -> None:
    async with worker(tmp_path, AgentConfig(recogniser="pocketsphinx")) as (child, host):
        await child.send(AgentStart("a", MIRA, greet=True))
        assert "Mira" in await host.until_said("a", 1)
        started = host.received[0]
        assert isinstance(started, AgentStarted)
        assert "pocketsphinx" in started.listener
        assert "hibari" in started.voice
        assert "scripted" in started.chat
        await child.send(Playback("a", 1, "started", 0.0))
        await child.send(Playback("a", 1, "finished", 1500.0))
        pcm = question_pcm("What is your name?", 16_000) + bytes(2 * 11_200)
        for offset in range(0, len(pcm), 640):
            await child.send(UserAudio("a", pcm[offset : offset + 640]))
        assert "Mira" in await host.until_said("a", 2)
        words = [m.text for m in host.received if isinstance(m, Transcript) and m.role == "user"]
        assert "name" in words[-1]
        await child.send(AgentInterrupt("a", 2))
        await child.send(AgentSay("a", "One more thing."))
        assert await host.until_said("a", 3) == "One more thing."
        await child.send(UserText("a", "What is your name?"))
        assert "Mira" in await host.until_said("a", 4)

        await child.send(AgentEnd("a"))
        await child.send(AgentSay("a", "Too late."))
        await child.send(AgentStart("b", MIRA, greet=False))
        await child.send(AgentSay("b", "A new session begins at one."))
        assert await host.until_said("b", 1) == "A new session begins at one."
        assert not any(isinstance(m, AgentAudio) and m.text == "Too late." for m in host.received)
        assert host.exits == []


async def test_a_recogniser_that_cannot_be_had_is_a_plain_failure(tmp_path: Path) -> None:
    config = AgentConfig(recogniser="whisper", whisper_model=str(tmp_path / "nothing"))
    with pytest.raises(ChildFailed, match=r"agent\.recogniser: whisper cannot listen"):
        async with worker(tmp_path, config):
            pass
