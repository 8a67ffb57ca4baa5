"""In: an external voice agent's frames, playout reports. Out: agent speech, frames for it.

The protocol's state machine, pure: text frames are JSON objects with a `type`, binary frames are
PCM. An utterance begins with the first sound after `start`, `end` or `clear` and ends with `end`;
after an interruption what still comes of it is dropped. Knows no socket, no clock and no session.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from characters_serve.agent.base import Emit
from characters_serve.messages import (
    AgentAudio,
    AgentClear,
    AgentMark,
    AgentStarted,
    Playback,
    ToolResult,
    UserSpeech,
)

MICROPHONE_RATE: Final = 16_000
_BYTES: Final = {"pcm_s16le": 2, "pcm_f32le": 4}


class _Frame(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Start(_Frame):
    type: Literal["start"]
    sample_rate: int = Field(ge=8_000, le=48_000)
    encoding: Literal["pcm_s16le", "pcm_f32le"] = "pcm_s16le"
    channels: Literal[1, 2] = 1
    microphone: bool = Field(True, description="send the user's microphone from now on")


class End(_Frame):
    type: Literal["end"]


class Clear(_Frame):
    type: Literal["clear"]


class Mark(_Frame):
    type: Literal["mark"]
    name: str = Field(min_length=1, max_length=128)


class Caption(_Frame):
    """The words of the sound that follows."""

    type: Literal["caption"]
    text: str = Field(max_length=2000)


class UserStarted(_Frame):
    """The agent's own ears heard the user: stops the voice."""

    type: Literal["user_started_speaking"]


class UserStopped(_Frame):
    type: Literal["user_stopped_speaking"]


_FRAMES: TypeAdapter[Start | End | Clear | Mark | Caption | UserStarted | UserStopped] = (
    TypeAdapter(
        Annotated[
            Start | End | Clear | Mark | Caption | UserStarted | UserStopped,
            Field(discriminator="type"),
        ]
    )
)


class PcmReader:
    """Bytes cut anywhere to mono int16; a sample cut in two waits for its rest."""

    def __init__(self, encoding: Literal["pcm_s16le", "pcm_f32le"], channels: int) -> None:
        self._float = encoding == "pcm_f32le"
        self._channels = channels
        self._size = _BYTES[encoding] * channels
        self._rest = b""

    def read(self, data: bytes) -> bytes:
        data = self._rest + data
        whole = len(data) // self._size * self._size
        self._rest = data[whole:]
        data = data[:whole]
        if not self._float and self._channels == 1:
            return data
        samples: NDArray[Any] = np.frombuffer(data, "<f4" if self._float else "<i2")
        if self._float:  # first of all: a signalling NaN cannot be converted without a complaint
            samples = np.clip(np.nan_to_num(samples), -1.0, 1.0)
        samples = samples.astype(np.float64) * (32767.0 if self._float else 1.0)
        mono = samples.reshape(-1, self._channels).mean(axis=1)
        return bytes(np.rint(mono).astype("<i2").tobytes())

    def cut(self) -> None:
        """What follows begins with a whole sample."""
        self._rest = b""


class ExternalAgent:
    """One session's external agent, through every socket that it comes by; see `base.Agent`."""

    def __init__(self, session_id: str, emit: Emit, send: Callable[[str | bytes], None]) -> None:
        self.connected = False
        self._session_id = session_id
        self._emit = emit
        self._send = send
        self._format: Start | None = None
        self._reader = PcmReader("pcm_s16le", 1)
        self._last_id = 0
        self._speaking = False
        self._dropping = False
        self._unformatted = False
        self._samples = 0
        self._rate = 1
        self._caption = ""

    # ------------------------------------------------------------ the socket

    def connect(self) -> None:
        self.connected = True
        self._format = None
        self._unformatted = self._dropping = False
        self._tell("ready", sample_rate=MICROPHONE_RATE)

    def disconnect(self) -> None:
        """Its utterance ends with what has come of it; the session goes on."""
        self.connected = False
        self._end()

    def text(self, raw: str) -> None:
        if not self.connected:
            return
        try:
            frame = _FRAMES.validate_json(raw)
        except ValidationError as error:
            self._tell("error", message=_explain(error))
            return
        match frame:
            case Start():
                self._end()
                self._format, self._unformatted = frame, False
                self._reader = PcmReader(frame.encoding, frame.channels)
            case End():
                self._end()
            case Clear():
                self._speaking = self._dropping = False
                self._reader.cut()
                self._caption = ""
                self._emit(AgentClear(self._session_id))
            case Mark(name=name):
                if not self._dropping:
                    position_ms = self._samples * 1000.0 / self._rate
                    self._emit(AgentMark(self._session_id, self._last_id, position_ms, name))
            case Caption(text=text):
                self._caption = "" if self._dropping else f"{self._caption} {text}".strip()
            case UserStarted():
                self._emit(UserSpeech(self._session_id, speaking=True, barge_in=True))
            case UserStopped():
                self._emit(UserSpeech(self._session_id, speaking=False, barge_in=False))

    def pcm(self, data: bytes) -> None:
        if not self.connected:
            return
        if self._format is None:
            if not self._unformatted:
                self._unformatted = True
                self._tell("error", message="sound came before a start message that describes it")
            return
        pcm = self._reader.read(data)
        if self._dropping or not pcm:
            return
        if not self._speaking:
            self._speaking = True
            self._last_id += 1
            self._samples, self._rate = 0, self._format.sample_rate
        self._samples += len(pcm) // 2
        self._audio(pcm, last=False)

    def _end(self) -> None:
        self._reader.cut()
        if self._speaking and not self._dropping:
            self._audio(b"", last=True)
        self._speaking = self._dropping = False

    def _audio(self, pcm: bytes, *, last: bool) -> None:
        caption, self._caption = self._caption, ""
        self._emit(AgentAudio(self._session_id, self._last_id, self._rate, pcm, caption, last))

    # ------------------------------------------------------------ the agent's calls

    async def open(self) -> AgentStarted:
        words = "an external voice agent"
        return AgentStarted(self._session_id, listener=words, voice=words, chat=words)

    def hear(self, pcm_16k: bytes) -> None:
        if self.connected and self._format is not None and self._format.microphone:
            self._send(pcm_16k)

    def say(self, text: str) -> None:
        self._tell("say", text=text)

    def read(self, text: str) -> None:
        self._tell("user_text", text=text)

    def interrupt(self, utterance_id: int) -> None:
        if self._speaking and self._last_id <= utterance_id:
            self._dropping = True
        self._caption = ""
        self._tell("interrupted")

    def playback(self, report: Playback) -> None:
        if report.event == "started":
            self._tell("playback_started", utterance=report.utterance_id)
            return
        self._tell(
            "playback_finished",
            utterance=report.utterance_id,
            position_ms=round(report.played_ms),
            interrupted=report.event == "interrupted",
        )

    def mark_reached(self, name: str) -> None:
        self._tell("mark", name=name)

    def tool_result(self, result: ToolResult) -> None:
        """Its functions are its own business."""

    async def close(self) -> None:
        """Nothing is emitted afterwards."""
        self.connected = self._speaking = False

    def _tell(self, kind: str, **fields: object) -> None:
        if self.connected:
            self._send(json.dumps({"type": kind, **fields}))


def _explain(error: ValidationError) -> str:
    """The first thing wrong; what was sent is not repeated."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"].startswith("union_tag"):
        return "type: unknown, or missing"
    return f"{field}: {first['msg']}" if field else first["msg"]
