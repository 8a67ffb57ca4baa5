"""The realtime API's agent against a live server of its event protocol."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from characters_serve.agent import openai_realtime
from characters_serve.agent.base import AgentEvent
from characters_serve.agent.openai_realtime import RealtimeAgent
from characters_serve.config import AgentConfig, RealtimeConfig
from characters_serve.messages import (
    AgentAudio,
    AgentEnd,
    AgentError,
    AgentSay,
    AgentStart,
    AgentStarted,
    Persona,
    Playback,
    ToolCall,
    ToolResult,
    Transcript,
    TurnTiming,
    UserSpeech,
)
from tests.realtime_server import WORDS, RealtimeServer, realtime_server, tone
from tests.unit.test_agent_worker import worker

MIRA = Persona("Mira", "I'm Mira.", {"home": "a lighthouse"}, ["tea"], "Warm.")


class Scene:
    def __init__(self, server: RealtimeServer, **changes: Any) -> None:
        self.server = server
        self.events: list[AgentEvent] = []
        greet = changes.pop("greet", False)
        self.agent = RealtimeAgent(
            RealtimeConfig(url=server.url, **changes),
            AgentStart("s", MIRA, greet),
            self.events.append,
            environment={"OPENAI_API_KEY": "a-key\n"},
        )

    def audio(self, utterance_id: int) -> list[AgentAudio]:
        return [
            e for e in self.events if isinstance(e, AgentAudio) and e.utterance_id == utterance_id
        ]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def errors(self) -> list[str]:
        return [event.reason for event in self.of(AgentError)]

    async def until(self, seen: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not seen():
                await asyncio.sleep(0.01)

    async def said(self, utterance_id: int) -> bytes:
        await self.until(lambda: any(piece.last for piece in self.audio(utterance_id)))
        return b"".join(piece.pcm for piece in self.audio(utterance_id))

    def played(self, utterance_id: int, event: Any, played_ms: float = 0.0) -> None:
        self.agent.playback(Playback("s", utterance_id, event, played_ms))


@asynccontextmanager
async def scene(**changes: Any) -> AsyncIterator[Scene]:
    old_names, pause_s = changes.pop("old_names", False), changes.pop("pause_s", 0.0)
    async with realtime_server() as server:
        server.old_names, server.pause_s = old_names, pause_s
        made = Scene(server, **changes)
        await made.agent.open()
        try:
            await made.until(lambda: server.of("session.update"))
            yield made
        finally:
            await made.agent.close()


@pytest.mark.parametrize("old_names", [False, True])
async def test_a_greeting_is_spoken_and_captioned(old_names: bool) -> None:
    async with scene(greet=True, old_names=old_names) as s:
        assert await s.said(1) == tone(0.5)
        (update,) = s.server.of("session.update")
        audio = update["session"]["audio"]
        assert audio["input"]["format"] == audio["output"]["format"]
        assert audio["output"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        assert audio["input"]["turn_detection"]["type"] == "server_vad"
        assert "lighthouse" in update["session"]["instructions"]
        (create,) = s.server.of("response.create")
        assert "I'm Mira." in create["response"]["instructions"]
        request = s.server.requests[0]
        assert request.path == "/v1/realtime?model=gpt-realtime"
        assert request.headers["Authorization"] == "Bearer a-key"
        pieces = s.audio(1)
        assert " ".join(piece.text for piece in pieces if piece.text) == WORDS
        assert [piece.last for piece in pieces].count(True) == 1 and pieces[-1].last
        s.played(1, "started")
        s.played(1, "finished", 500.0)
        assert s.of(Transcript)[-1] == Transcript("s", "character", WORDS, True, 1)
        assert s.errors() == []


async def test_a_spoken_turn() -> None:
    async with scene() as s:
        heard = (9000 * np.sin(np.arange(16_000) * 2 * np.pi * 500 / 16_000)).astype("<i2")
        await s.until(lambda: s.agent._connected)
        for first in range(0, len(heard), 320):
            s.agent.hear(heard[first : first + 320].tobytes())

        def sent_pcm() -> bytes:
            events = s.server.of("input_audio_buffer.append")
            return b"".join(base64.b64decode(event["audio"]) for event in events)

        await s.until(lambda: len(sent_pcm()) > 2 * 0.96 * 24_000)
        sent = sent_pcm()
        assert len(sent) / 2 <= 24_000
        spectrum = np.abs(np.fft.rfft(np.frombuffer(sent, "<i2"), 24_000))
        assert abs(int(np.argmax(spectrum)) - 500) <= 1

        await s.server.send("input_audio_buffer.speech_started", audio_start_ms=0, item_id="u")
        await s.server.send("input_audio_buffer.speech_stopped", audio_end_ms=900, item_id="u")
        await s.server.send("input_audio_buffer.committed", item_id="u")
        transcription = "conversation.item.input_audio_transcription"
        for delta in ("Hello ", "there."):
            await s.server.send(f"{transcription}.delta", item_id="u", delta=delta)
        await s.server.send(f"{transcription}.completed", item_id="u", transcript="Hello there.")
        s.server.begin_response()
        await s.said(1)
        assert s.of(UserSpeech) == [UserSpeech("s", True, False), UserSpeech("s", False, False)]
        texts = [(t.text, t.final) for t in s.of(Transcript) if t.role == "user"]
        assert texts == [("Hello ", False), ("Hello there.", False), ("Hello there.", True)]
        (timing,) = s.of(TurnTiming)
        assert timing.utterance_id == 1 and timing.stages_ms["first_audio"] >= 500
        await s.server.send(f"{transcription}.failed", item_id="v", error={})
        await s.until(s.errors)
        assert "could not write down" in s.errors()[0]


async def test_a_barge_in_truncates_what_was_not_heard() -> None:
    async with scene(pause_s=0.02) as s:
        s.server.seconds = 3.0
        s.agent.say("A long story.")
        await s.until(lambda: len(s.audio(1)) > 5)
        s.played(1, "started")
        await s.server.send("input_audio_buffer.speech_started", audio_start_ms=0, item_id="u")
        await s.until(lambda: s.of(UserSpeech))
        assert s.of(UserSpeech) == [UserSpeech("s", True, True)]
        s.played(1, "interrupted", 321.7)
        s.agent.interrupt(1)
        await s.until(lambda: s.server.of("conversation.item.truncate"))
        (truncated,) = s.server.of("conversation.item.truncate")
        assert (truncated["item_id"], truncated["audio_end_ms"]) == ("ir1", 321)
        assert len(s.server.of("response.cancel")) == 1
        (final,) = [t for t in s.of(Transcript) if t.final]
        assert final.text in WORDS and final.text != WORDS
        count = len(s.audio(1))
        s.server.seconds = 0.5
        s.agent.read("And then?")
        assert await s.said(2) == tone(0.5)
        assert len(s.audio(1)) == count and not any(piece.last for piece in s.audio(1))
        (item,) = [e["item"] for e in s.server.of("conversation.item.create")]
        assert item["content"] == [{"type": "input_text", "text": "And then?"}]
        await s.server.error("response_cancel_not_active")
        await asyncio.sleep(0.05)
        assert s.errors() == []


async def test_one_response_at_a_time() -> None:
    async with scene(pause_s=0.02) as s:
        await s.until(lambda: s.agent._connected)
        s.server.begin_response()  # as its own voice detection does
        s.agent.say("In the meantime.")  # refused at first
        s.agent.say("And again.")
        for number in (1, 2, 3):
            assert await s.said(number) == tone(0.5)
        assert "meantime" in s.server.of("response.create")[-2]["response"]["instructions"]
        assert s.errors() == []


async def test_errors_in_plain_words() -> None:
    async with scene() as s:
        await s.server.error("rate_limit_exceeded")
        await s.server.error("something_new")
        limits = [{"name": "tokens", "limit": 1, "remaining": 0, "reset_seconds": 12.2}]
        await s.server.send("rate_limits.updated", rate_limits=limits)
        await s.server.send("response.created", response={"id": "x"})
        failed = {"type": "failed", "error": {"code": "rate_limit_exceeded"}}
        await s.server.send(
            "response.done", response={"id": "x", "status": "failed", "status_details": failed}
        )
        await s.server.send("response.created", response={"id": "y"})
        await s.server.call("y", "c", "open_door", "{}")
        await s.server.send("response.done", response={"id": "y", "status": "completed"})
        assert s.server.socket is not None
        await s.server.socket.send("nonsense")
        await s.said(1)  # what the API makes of the refused call
        assert s.errors() == [
            "the realtime API's rate limit is reached",
            "the realtime API reported an error: something_new",
            "the realtime API's limit of tokens is used up for 12 s",
            "the realtime API's rate limit is reached",
            "the realtime API sent an event that cannot be understood",
        ]
        (item,) = [e["item"] for e in s.server.of("conversation.item.create")]
        assert item["type"] == "function_call_output" and "no such" in item["output"]


async def test_a_function_is_run_by_the_client() -> None:
    tools = [{"name": "open_door", "description": "Opens it."}]
    async with scene(tools=tools) as s:
        (update,) = s.server.of("session.update")
        (tool,) = update["session"]["tools"]
        assert tool["type"] == "function" and tool["parameters"]["type"] == "object"
        await s.server.send("response.created", response={"id": "x"})
        await s.server.call("x", "c1", "open_door", '{"wide": true}')
        await s.server.send("response.done", response={"id": "x", "status": "completed"})
        await s.until(lambda: s.of(ToolCall))
        assert s.of(ToolCall) == [ToolCall("s", "c1", "open_door", '{"wide": true}')]
        s.agent.tool_result(ToolResult("s", "another", "1"))
        for _ in range(2):  # a client may say it twice
            s.agent.tool_result(ToolResult("s", "c1", '{"opened": true}'))
        assert await s.said(1) == tone(0.5)
        (item,) = [e["item"] for e in s.server.of("conversation.item.create")]
        assert item == {
            "type": "function_call_output",
            "call_id": "c1",
            "output": '{"opened": true}',
        }
        assert len(s.server.of("response.create")) == 1 and s.errors() == []


# What the API may send and this agent has no use for, and what a new version may bring.
UNUSED = [
    "conversation.created",
    "conversation.item.added",
    "conversation.item.created",
    "conversation.item.done",
    "conversation.item.deleted",
    "conversation.item.retrieved",
    "conversation.item.truncated",
    "conversation.item.input_audio_transcription.segment",
    "input_audio_buffer.cleared",
    "input_audio_buffer.committed",
    "input_audio_buffer.dtmf_event_received",
    "input_audio_buffer.timeout_triggered",
    "mcp_list_tools.in_progress",
    "mcp_list_tools.completed",
    "mcp_list_tools.failed",
    "output_audio_buffer.started",
    "output_audio_buffer.stopped",
    "output_audio_buffer.cleared",
    "response.content_part.added",
    "response.content_part.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.mcp_call.in_progress",
    "response.mcp_call.completed",
    "response.mcp_call.failed",
    "response.mcp_call_arguments.delta",
    "response.mcp_call_arguments.done",
    "response.output_item.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.output_audio.done",
    "something.new",
]


async def test_events_without_use_do_no_harm() -> None:
    async with scene() as s:
        for kind in UNUSED:
            await s.server.send(kind, event_id="e", response_id="x", item_id="i", item={})
        s.agent.say("Still here.")
        assert await s.said(1) == tone(0.5)
        assert s.errors() == []


async def test_an_event_that_lacks_what_it_must_hold_is_told_and_survived() -> None:
    kinds = ["response.created", "response.done", "rate_limits.updated", "error"]
    async with scene() as s:
        for kind in kinds:
            await s.server.send(kind)
        s.agent.say("Still here.")
        assert await s.said(1) == tone(0.5)
        words = "the realtime API sent an event that cannot be understood"
        assert s.errors() == [words] * len(kinds)


async def test_a_lost_connection_comes_back_with_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_realtime, "FIRST_BACKOFF_S", 0.05)
    async with scene(pause_s=0.05) as s:
        s.agent.read("Who are you?")
        await s.said(1)
        s.played(1, "finished", 500.0)
        s.server.seconds = 5.0
        s.agent.say("A long story.")
        await s.until(lambda: s.audio(2))
        await s.server.drop_connection()
        await s.said(2)  # it ends with what has come of it
        s.played(2, "interrupted", 50.0)
        await s.until(lambda: len(s.server.of("session.update")) == 2)
        s.server.seconds = 0.5
        s.agent.say("Here again.")
        assert await s.said(3) == tone(0.5)
        items = [e["item"] for e in s.server.of("conversation.item.create")]
        assert [i["content"][0]["text"] for i in items[1:3]] == ["Who are you?", WORDS]
        assert len(s.errors()) == 1 and "trying again" in s.errors()[0]


@pytest.mark.parametrize(
    ("status", "words", "attempts"),
    [(401, "refused the key in OPENAI_API_KEY", 1), (429, "given up: too many requests", 3)],
)
async def test_an_endpoint_that_does_not_answer_is_given_up(
    status: int, words: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_realtime, "FIRST_BACKOFF_S", 0.02)
    async with realtime_server() as server:
        server.refuse_status = status
        s = Scene(server, reconnects=2)
        await s.agent.open()
        s.agent.say("Anybody?")
        s.agent.hear(bytes(640))
        await s.until(lambda: s.agent._task is not None and s.agent._task.done())
        assert words in s.errors()[-1]
        assert len(server.requests) == attempts
        await s.agent.close()


async def test_the_agents_process_speaks_for_it(tmp_path: Path) -> None:
    async with realtime_server() as server:
        config = AgentConfig(kind="openai_realtime", realtime=RealtimeConfig(url=server.url))
        async with worker(tmp_path, config) as (child, host):
            for session_id in ("a", "b"):
                await child.send(AgentStart(session_id, MIRA, greet=False))
                await child.send(AgentSay(session_id, "Good evening."))
                assert await host.until_said(session_id, 1) == WORDS
                await child.send(AgentEnd(session_id))
            started = [m for m in host.received if isinstance(m, AgentStarted)]
            assert [m.listener for m in started] == ["gpt-realtime at 127.0.0.1"] * 2
        assert len(server.requests) == 2
