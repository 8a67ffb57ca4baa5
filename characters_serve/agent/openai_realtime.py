"""In: microphone PCM, playout reports. Out: a realtime API's speech and transcripts.

One WebSocket of the OpenAI Realtime event protocol for each session. The API's own voice detection
begins and ends turns; what the user really heard of an answer is told to it, so that its memory
keeps no more than that. Knows no session and no host. Neither words nor keys are logged.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import soxr
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from characters_serve.agent.base import AgentEvent, Emit
from characters_serve.agent.chat import HISTORY_LINES, system_prompt
from characters_serve.agent.external import MICROPHONE_RATE, PcmReader
from characters_serve.agent.history import History, SpokenSentence, Utterance
from characters_serve.agent.sentences import SentenceSplitter
from characters_serve.config import RealtimeConfig, secret
from characters_serve.messages import (
    AgentAudio,
    AgentError,
    AgentStart,
    AgentStarted,
    Playback,
    ToolCall,
    ToolResult,
    Transcript,
    TurnTiming,
    UserSpeech,
)

log = logging.getLogger(__name__)

RATE: Final = 24_000
SILENCE_MS: Final = 500
FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 8.0
MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
_KEY_REFUSED: Final = "it refused the key"
# Answers to a cancel or a truncation that came a moment too late.
_HARMLESS: Final = ("response_cancel_not_active", "item_truncate_invalid_item_id")
_WORDS: Final = {
    "rate_limit_exceeded": "the realtime API's rate limit is reached",
    "insufficient_quota": "the realtime API's account has no quota left",
    "invalid_api_key": "the realtime API refused the key",
    "session_expired": "the realtime API ended its session, which lasts an hour at most",
}

Event = dict[str, Any]


@dataclass(eq=False)
class _Reply:
    """One response of the API; it becomes an utterance with its first sound."""

    utterance: Utterance | None = None
    item_id: str = ""
    content_index: int = 0
    text: str = ""
    dropped: bool = False
    captions: list[str] = field(default_factory=list)
    splitter: SentenceSplitter = field(default_factory=SentenceSplitter)
    reader: PcmReader = field(default_factory=lambda: PcmReader("pcm_s16le", 1))


class GaveUp(RuntimeError):
    """The endpoint will not serve this session; the message says why in plain words."""


class RealtimeAgent:
    """One session. See `base.Agent` for the calls."""

    def __init__(
        self,
        config: RealtimeConfig,
        start: AgentStart,
        emit: Emit,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.session_id = start.session_id
        self._config = config
        self._emit_event = emit
        self._clock_s = clock_s
        self._key = secret(config.api_key_env, environment)
        self._instructions = system_prompt(start.persona)
        self._history = History()
        self._open = False
        self._connected = False
        self._failures = 0
        self._task: asyncio.Task[None] | None = None
        self._outgoing: asyncio.Queue[Event] = asyncio.Queue()
        self._resampler = soxr.ResampleStream(MICROPHONE_RATE, RATE, 1, dtype="int16", quality="HQ")
        self._replies: dict[str, _Reply] = {}
        self._playing: dict[int, _Reply] = {}
        self._active = False
        self._wanted: deque[Event] = deque()
        self._asked: Event = {"type": "response.create"}
        self._last_id = 0
        self._heard: dict[str, str] = {}
        self._speech_end_s: float | None = None
        self._calls: set[str] = set()
        if start.greet and start.persona.greeting:
            self._wanted.append(_verbatim(start.persona.greeting))

    # ------------------------------------------------------------ the agent's calls

    async def open(self) -> AgentStarted:
        self._open = True
        self._task = asyncio.create_task(self._run(), name="agent-realtime")
        words = f"{self._config.model} at {urlsplit(self._config.url).hostname}"
        return AgentStarted(self.session_id, listener=words, voice=words, chat=words)

    def hear(self, pcm_16k: bytes) -> None:
        if not self._connected:
            return
        samples = np.frombuffer(pcm_16k, "<i2")
        resampled = self._resampler.resample_chunk(samples, last=False).astype("<i2").tobytes()
        if resampled:
            self._send("input_audio_buffer.append", audio=base64.b64encode(resampled).decode())

    def say(self, text: str) -> None:
        self._want(_verbatim(text))

    def read(self, text: str) -> None:
        self._history.add_user(text)
        if self._connected:
            self._send("conversation.item.create", item=_item("user", text))
        self._want({"type": "response.create"})

    def interrupt(self, utterance_id: int) -> None:
        thought = self._last_id + 1
        for reply in self._replies.values():
            number = reply.utterance.utterance_id if reply.utterance else thought
            if number <= utterance_id and not reply.dropped:
                self._drop(reply)
        if thought <= utterance_id:
            self._wanted.clear()

    def tool_result(self, result: ToolResult) -> None:
        if result.call_id in self._calls:
            self._calls.discard(result.call_id)
            self._returned(result.call_id, result.result)

    def playback(self, report: Playback) -> None:
        reply = self._playing.get(report.utterance_id)
        if reply is None or reply.utterance is None:
            return
        utterance = reply.utterance
        if report.event == "started":
            utterance.started_s = self._clock_s()
            return
        del self._playing[report.utterance_id]
        interrupted = report.event == "interrupted"
        utterance.played_ms = utterance.sent_ms
        if interrupted:
            utterance.played_ms = min(report.played_ms, utterance.sent_ms)
            if not reply.dropped:
                self._drop(reply)
            self._send(
                "conversation.item.truncate",
                item_id=reply.item_id,
                content_index=reply.content_index,
                audio_end_ms=int(utterance.played_ms),
            )
        self._emit(
            Transcript(self.session_id, "character", utterance.heard(), True, report.utterance_id)
        )

    async def close(self) -> None:
        self._open = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------ the connection

    async def _run(self) -> None:
        """Connects, and connects again, until the session ends or there is no hope."""
        while True:
            try:
                await self._talk()
                reason = "it closed the connection"
            except GaveUp as error:
                self._lost()
                self._error(str(error))
                return
            except (OSError, WebSocketException, TimeoutError) as error:
                reason = _why(error)
            self._lost()
            if reason == _KEY_REFUSED:
                self._error(f"the realtime API refused the key in {self._config.api_key_env}")
                return
            self._failures += 1
            if self._failures > self._config.reconnects:
                self._error(f"the realtime API is given up: {reason}")
                return
            pause_s = min(FIRST_BACKOFF_S * 2 ** (self._failures - 1), LONGEST_BACKOFF_S)
            self._error(f"the realtime API is gone ({reason}); trying again in {pause_s:g} s")
            await asyncio.sleep(pause_s)

    async def _talk(self) -> None:
        separator = "&" if urlsplit(self._config.url).query else "?"
        async with connect(
            f"{self._config.url}{separator}model={self._config.model}",
            additional_headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
            open_timeout=self._config.connect_timeout_s,
            close_timeout=1.0,
            max_size=MAX_FRAME_BYTES,
        ) as socket:
            self._outgoing = asyncio.Queue()
            self._send("session.update", session=self._session())
            for line in self._history.lines(HISTORY_LINES):  # a new session has no memory
                role = "user" if line.role == "user" else "assistant"
                self._send("conversation.item.create", item=_item(role, line.text))
            self._connected = True
            self._pump()
            sender = asyncio.create_task(self._send_all(socket), name="agent-realtime-send")
            try:
                async for frame in socket:
                    self._take(frame)
            finally:
                self._connected = False
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)

    async def _send_all(self, socket: ClientConnection) -> None:
        while True:
            await socket.send(json.dumps(await self._outgoing.get()))

    def _session(self) -> Event:
        pcm = {"type": "audio/pcm", "rate": RATE}
        return {
            "type": "realtime",
            "instructions": self._instructions,
            "output_modalities": ["audio"],
            "tools": [{"type": "function", **tool.model_dump()} for tool in self._config.tools],
            "audio": {
                "input": {
                    "format": pcm,
                    "transcription": {"model": self._config.transcription_model},
                    "turn_detection": {
                        "type": "server_vad",
                        "silence_duration_ms": SILENCE_MS,
                        "create_response": True,
                        "interrupt_response": True,
                    },
                },
                "output": {"format": pcm, "voice": self._config.voice},
            },
        }

    def _lost(self) -> None:
        """What was being said ends with what has come of it."""
        for response_id in list(self._replies):
            self._finish(response_id)
        self._active = False
        self._heard.clear()
        self._calls.clear()

    # ------------------------------------------------------------ the API's events

    def _take(self, frame: str | bytes) -> None:
        try:
            event = json.loads(frame)
            self._event(event["type"], event)
        except (KeyError, TypeError, ValueError):
            self._error("the realtime API sent an event that cannot be understood")

    def _event(self, kind: str, event: Event) -> None:
        match kind:
            case "session.created" | "session.updated":
                self._failures = 0
            case "input_audio_buffer.speech_started":
                self._speech_end_s = None
                speaking = any(not r.utterance.over for r in self._playing.values() if r.utterance)
                self._emit(UserSpeech(self.session_id, speaking=True, barge_in=speaking))
            case "input_audio_buffer.speech_stopped":
                self._speech_end_s = self._clock_s() - SILENCE_MS / 1000
                self._emit(UserSpeech(self.session_id, speaking=False, barge_in=False))
            case "conversation.item.input_audio_transcription.delta":
                text = self._heard.get(event["item_id"], "") + event["delta"]
                self._heard[event["item_id"]] = text
                self._emit(Transcript(self.session_id, "user", text, False, 0))
            case "conversation.item.input_audio_transcription.completed":
                self._heard.pop(event["item_id"], None)
                text = event["transcript"].strip()
                if text:
                    self._history.add_user(text)
                    self._emit(Transcript(self.session_id, "user", text, True, 0))
            case "conversation.item.input_audio_transcription.failed":
                self._heard.pop(event["item_id"], None)
                self._error("the realtime API could not write down what the user said")
            case "rate_limits.updated":
                for limit in event["rate_limits"]:
                    if limit["remaining"] <= 0:
                        wait_s = float(limit["reset_seconds"])
                        self._error(
                            f"the realtime API's limit of {limit['name']} is used up "
                            f"for {wait_s:.0f} s"
                        )
            case "error":
                self._refusal(event["error"])
            case _ if kind.startswith("response."):
                self._response_event(kind.removeprefix("response."), event)

    def _response_event(self, kind: str, event: Event) -> None:
        if kind == "created":
            self._active = True
            self._replies[event["response"]["id"]] = _Reply()
            return
        if kind == "done":
            self._done(event["response"])
            return
        reply = self._replies.get(event.get("response_id", ""))
        if reply is None or reply.dropped:
            return
        match kind:
            case "output_audio.delta" | "audio.delta":
                self._sound(reply, event)
            case "output_audio_transcript.delta" | "audio_transcript.delta":
                reply.text += event["delta"]
                reply.captions += reply.splitter.feed(event["delta"])
                self._written(reply)
            case "output_audio_transcript.done" | "audio_transcript.done":
                reply.text = event["transcript"]
                reply.captions += reply.splitter.flush()
                self._written(reply)
            case "output_item.done" if event["item"].get("type") == "function_call":
                self._call(event["item"])

    def _call(self, item: Event) -> None:
        """A function of the client's, which answers with tool_result."""
        call_id, name, arguments = item["call_id"], item["name"], item["arguments"]
        json.loads(arguments)
        if name not in (tool.name for tool in self._config.tools):
            self._returned(call_id, json.dumps({"error": "there is no such function"}))
            return
        self._calls.add(call_id)
        self._emit(ToolCall(self.session_id, call_id, name, arguments))

    def _returned(self, call_id: str, output: str) -> None:
        item = {"type": "function_call_output", "call_id": call_id, "output": output}
        self._send("conversation.item.create", item=item)
        self._want({"type": "response.create"})

    def _sound(self, reply: _Reply, event: Event) -> None:
        pcm = reply.reader.read(base64.b64decode(event["delta"], validate=True))
        if not pcm:
            return
        if reply.utterance is None:
            self._last_id += 1
            reply.utterance = Utterance(self._last_id)
            reply.item_id, reply.content_index = event["item_id"], event["content_index"]
            self._history.add_utterance(reply.utterance)
            self._playing[self._last_id] = reply
            if self._speech_end_s is not None:
                first_ms = round((self._clock_s() - self._speech_end_s) * 1000, 1)
                stages = {"end_of_turn": float(SILENCE_MS), "first_audio": first_ms}
                self._emit(TurnTiming(self.session_id, self._last_id, stages))
                self._speech_end_s = None
        reply.utterance.sent_ms += len(pcm) * 500.0 / RATE
        self._written(reply)
        self._audio(reply, pcm, last=False)

    def _written(self, reply: _Reply) -> None:
        utterance = reply.utterance
        if utterance is None or not reply.text:
            return
        if utterance.text != reply.text:
            self._emit(
                Transcript(self.session_id, "character", reply.text, False, utterance.utterance_id)
            )
        utterance.sentences = [SpokenSentence(reply.text, 0.0, utterance.sent_ms)]

    def _audio(self, reply: _Reply, pcm: bytes, *, last: bool) -> None:
        assert reply.utterance is not None
        caption, reply.captions = " ".join(reply.captions), []
        number = reply.utterance.utterance_id
        self._emit(AgentAudio(self.session_id, number, RATE, pcm, caption, last))

    def _done(self, response: Event) -> None:
        self._active = False
        self._finish(response["id"])
        if response.get("status") in ("failed", "incomplete"):
            details = response.get("status_details") or {}
            error = details.get("error") or {}
            self._refusal({"code": error.get("code") or details.get("reason")})
        self._pump()

    def _finish(self, response_id: str) -> None:
        reply = self._replies.pop(response_id, None)
        if reply is None or reply.dropped or reply.utterance is None:
            return
        reply.captions += reply.splitter.flush()
        self._written(reply)
        self._audio(reply, b"", last=True)

    def _drop(self, reply: _Reply) -> None:
        reply.dropped = True
        if reply in self._replies.values():
            self._send("response.cancel")

    def _refusal(self, error: Event) -> None:
        code = str(error.get("code") or error.get("type") or "unknown")
        if code == "conversation_already_has_active_response":
            # Begun by the API's own voice detection; what was asked waits for its end.
            self._active = True
            self._wanted.appendleft(self._asked)
        elif code in ("invalid_api_key", "insufficient_quota"):
            raise GaveUp(_WORDS[code])
        elif code not in _HARMLESS:
            self._error(_WORDS.get(code, f"the realtime API reported an error: {code[:60]}"))

    # ------------------------------------------------------------ to the API

    def _want(self, create: Event) -> None:
        self._wanted.append(create)
        self._pump()

    def _pump(self) -> None:
        """The API makes one response at a time."""
        if self._connected and not self._active and self._wanted:
            self._active = True
            self._asked = self._wanted.popleft()
            self._outgoing.put_nowait(self._asked)

    def _send(self, kind: str, **fields: Any) -> None:
        self._outgoing.put_nowait({"type": kind, **fields})

    def _error(self, reason: str) -> None:
        log.warning("%s", reason)
        self._emit(AgentError(self.session_id, reason))

    def _emit(self, event: AgentEvent) -> None:
        if self._open:
            self._emit_event(event)


def _verbatim(text: str) -> Event:
    words = json.dumps(text, ensure_ascii=False)
    instructions = f"Say exactly these words, and nothing before or after them: {words}"
    return {"type": "response.create", "response": {"instructions": instructions}}


def _item(role: str, text: str) -> Event:
    kind = "input_text" if role == "user" else "output_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _why(error: Exception) -> str:
    if isinstance(error, InvalidStatus):
        status = error.response.status_code
        if status in (401, 403):
            return _KEY_REFUSED
        return "too many requests" if status == 429 else f"it answered {status}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return type(error).__name__
