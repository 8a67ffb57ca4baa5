"""What every agent keeps to, whoever speaks: real agents, with the conversation around them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import pytest

from characters_serve.agent.base import Agent, AgentEvent, Emit
from characters_serve.agent.external import ExternalAgent
from characters_serve.agent.local import LocalAgent, LocalModels, load_models
from characters_serve.agent.openai_realtime import RealtimeAgent
from characters_serve.config import AgentConfig, RealtimeConfig
from characters_serve.messages import (
    AgentAudio,
    AgentError,
    AgentInterrupt,
    AgentStart,
    MarkReached,
    Persona,
    Playback,
)
from tests.realtime_server import RealtimeServer, realtime_server
from tests.unit.test_session_conversation import Rig

START = AgentStart("s", Persona("Mira", "I'm Mira.", {}, ["tea"], "Warm."), greet=False)
KINDS = ["local", "openai_realtime", *(f"external-{rate}" for rate in (8000, 22_050, 48_000))]


class Speaker(Protocol):
    """How a test makes one kind of agent speak."""

    agent: Agent

    async def speak(self) -> None:
        """A second or a little more, sent whole."""
        ...

    async def begin(self) -> None:
        """Several seconds, of which not all are sent yet when a part is heard."""
        ...

    async def think(self) -> None:
        """An utterance is on its way, and nothing of it can be heard yet."""
        ...

    async def rest(self) -> None:
        """What was begun goes on as if nobody had interrupted it."""
        ...


class LocalSpeaker:
    def __init__(self, models: LocalModels, emit: Emit) -> None:
        self.agent: Agent = LocalAgent(models, AgentConfig(), START, emit)

    async def speak(self) -> None:
        self.agent.say("This is the whole of it.")

    async def begin(self) -> None:
        self.agent.say("It was a dark night. " * 6)

    think = begin

    async def rest(self) -> None:
        await asyncio.sleep(0.3)


class ExternalSpeaker:
    def __init__(self, rate: int, emit: Emit) -> None:
        self.external = ExternalAgent("s", emit, lambda _frame: None)
        self.agent: Agent = self.external
        self._rate = rate
        self.external.connect()
        self._tell("start", sample_rate=rate)

    def _tell(self, kind: str, **fields: object) -> None:
        self.external.text(json.dumps({"type": kind, **fields}))

    def _sound(self, seconds: float) -> None:
        wave = 9000 * np.sin(2 * np.pi * 500 / self._rate * np.arange(round(seconds * self._rate)))
        pcm = wave.astype("<i2").tobytes()
        for first in range(0, len(pcm), 999):
            self.external.pcm(pcm[first : first + 999])

    async def speak(self) -> None:
        self._sound(1.0)
        self._tell("end")

    async def begin(self) -> None:
        self._sound(3.0)

    async def think(self) -> None:
        self._tell("caption", text="Let me see.")

    async def rest(self) -> None:
        self._sound(1.0)
        self._tell("end")


class RealtimeSpeaker:
    def __init__(self, server: RealtimeServer, emit: Emit) -> None:
        self._server = server
        config = RealtimeConfig(url=server.url)
        self.agent: Agent = RealtimeAgent(config, START, emit, environment={})

    async def speak(self) -> None:
        self._server.seconds, self._server.pause_s, self._server.think_s = 1.0, 0.0, 0.0
        self.agent.say("This is the whole of it.")

    async def begin(self) -> None:
        self._server.seconds, self._server.pause_s, self._server.think_s = 6.0, 0.01, 0.0
        self.agent.say("A long story.")

    async def think(self) -> None:
        self._server.think_s = 5.0
        self.agent.say("Let me see.")
        async with asyncio.timeout(10):
            while not self._server.of("response.create"):
                await asyncio.sleep(0.01)

    async def rest(self) -> None:
        await asyncio.sleep(0.1)


class Stage:
    """The agent, and the host's conversation on invented time."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.events: list[AgentEvent] = []
        self.speaker: Speaker
        self._reports: list[Playback] = []

    def emit(self, event: AgentEvent) -> None:
        self.events.append(event)
        self.rig.talk.agent(event, self.rig.now_s)

    def audio(self, utterance_id: int) -> list[AgentAudio]:
        return [
            e for e in self.events if isinstance(e, AgentAudio) and e.utterance_id == utterance_id
        ]

    def sent_ms(self, utterance_id: int) -> float:
        return sum(len(a.pcm) * 500 / a.sample_rate for a in self.audio(utterance_id))

    @property
    def latest(self) -> int:
        return max((e.utterance_id for e in self.events if isinstance(e, AgentAudio)), default=0)

    async def until(self, seen: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not seen():
                await asyncio.sleep(0.01)

    async def until_whole(self, utterance_id: int) -> None:
        await self.until(lambda: any(piece.last for piece in self.audio(utterance_id)))

    def play(self, seconds: float) -> None:
        self.rig.run(seconds)
        self._deliver()

    def interrupt(self) -> None:
        self.rig.talk.interrupt(self.rig.now_s)
        self._deliver()

    def reports(self) -> list[tuple[str, int]]:
        return [(report.event, report.utterance_id) for report in self._reports]

    def _deliver(self) -> None:
        """What the host tells an agent comes a little later than it happens."""
        for message in self.rig.told:
            match message:
                case Playback():
                    self._reports.append(message)
                    self.speaker.agent.playback(message)
                case AgentInterrupt(utterance_id=utterance_id):
                    self.speaker.agent.interrupt(utterance_id)
                case MarkReached():
                    raise AssertionError("nobody set a mark")
        self.rig.told.clear()

    async def speaks_whole(self) -> None:
        """The next utterance is heard from its beginning to its end."""
        before = self.latest
        await self.speaker.speak()
        await self.until(lambda: self.latest > before)
        number = self.latest
        await self.until_whole(number)
        sent_ms = self.sent_ms(number)
        self.play(sent_ms / 1000 + 1.5)
        assert self.reports()[-2:] == [("started", number), ("finished", number)]
        # The local voice ends an utterance with a pause, which nobody hears.
        assert sent_ms - 160 < self._reports[-1].played_ms < sent_ms + 20
        assert [piece.last for piece in self.audio(number)].count(True) == 1
        assert self.audio(number)[-1].last


@cache
def models() -> LocalModels:
    return load_models(AgentConfig(recogniser="pocketsphinx"))


@asynccontextmanager
async def stage(kind: str) -> AsyncIterator[Stage]:
    made = Stage()
    async with realtime_server() as server:
        if kind == "local":
            made.speaker = LocalSpeaker(models(), made.emit)
        elif kind == "openai_realtime":
            made.speaker = RealtimeSpeaker(server, made.emit)
        else:
            made.speaker = ExternalSpeaker(int(kind.partition("-")[2]), made.emit)
        await made.speaker.agent.open()
        try:
            made.play(1.0)
            yield made
        finally:
            await made.speaker.agent.close()
    assert [event for event in made.events if isinstance(event, AgentError)] == []


@pytest.mark.parametrize("kind", KINDS)
async def test_utterances_are_numbered_from_one_and_heard_whole(kind: str) -> None:
    async with stage(kind) as s:
        for number in (1, 2, 3):
            await s.speaks_whole()
            assert s.latest == number
        assert s.reports() == [
            (event, number) for number in (1, 2, 3) for event in ("started", "finished")
        ]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_interruption_before_the_first_sound(kind: str, times: int) -> None:
    async with stage(kind) as s:
        await s.speaker.think()
        for _ in range(times):
            s.interrupt()
        s.play(0.5)
        assert s.latest == 0
        await s.speaks_whole()
        assert {event for event, _ in s.reports()} == {"started", "finished"} or s.latest == 2


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_interruption_in_the_middle_of_a_word(kind: str, times: int) -> None:
    async with stage(kind) as s:
        await s.speaker.begin()
        await s.until(lambda: s.sent_ms(1) > 1000)
        s.play(0.8)
        assert s.reports() == [("started", 1)]
        for _ in range(times):
            s.interrupt()
        assert s.reports() == [("started", 1), ("interrupted", 1)]
        sent_ms = s.sent_ms(1)
        await s.speaker.rest()
        s.play(1.0)
        assert s.sent_ms(1) == sent_ms and s.latest == 1, "what is dropped is not sent on"
        assert s.reports() == [("started", 1), ("interrupted", 1)]
        await s.speaks_whole()
        assert s.latest == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_an_interruption_after_the_last_sound_was_sent(kind: str) -> None:
    async with stage(kind) as s:
        await s.speaker.speak()
        await s.until_whole(1)
        s.play(0.6)
        s.interrupt()
        assert s.reports() == [("started", 1), ("interrupted", 1)]
        await s.speaks_whole()
        assert s.latest == 2
        assert [piece.last for piece in s.audio(1)].count(True) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_the_end_of_a_session_leaves_nothing(kind: str) -> None:
    def tasks() -> set[Any]:
        return {t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("agent-")}

    async with stage(kind) as s:
        for size in (2, 998, 640, 32_000):
            s.speaker.agent.hear(bytes(size))
        await s.speaker.begin()
        await s.until(lambda: s.latest == 1)
        await s.speaker.agent.close()
        count = len(s.events)
        await s.speaker.rest()
        assert len(s.events) == count
        assert tasks() == set()
