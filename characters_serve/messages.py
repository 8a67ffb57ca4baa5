"""Every message that crosses a process boundary, and the one way it is put on the wire.

Frozen dataclasses without methods. A message travels as two frames: the class name and its msgpack
body. `session_id`, `epoch` and `chunk_index` name each object on the path of a chunk: the session
never changes while a message lives, and `epoch` counts the interruptions within it.

Audio is mono little-endian int16 PCM in `bytes`; images are packed RGB rows; a video frame is
planar I420 (height x width Y, then quarter-size U and V).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

# ---------------------------------------------------------------- supervision (parent <-> child)


@dataclass(frozen=True, slots=True)
class Ready:
    process: str
    pid: int
    details: dict[str, str]


@dataclass(frozen=True, slots=True)
class Warming:
    """Host to gateway, before Ready: everything is loaded and the self-test begins."""

    process: str


@dataclass(frozen=True, slots=True)
class Failed:
    """permanent: of a start that fails the same way however often it is tried."""

    process: str
    reason: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Ping:
    sequence: int


@dataclass(frozen=True, slots=True)
class Pong:
    sequence: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    reason: str


@dataclass(frozen=True, slots=True)
class ShutdownAck:
    process: str


# ---------------------------------------------------------------- gateway <-> session host


@dataclass(frozen=True, slots=True)
class Persona:
    """Who the character is: what the scripted agent and the chat prompt are made from."""

    name: str
    greeting: str
    facts: dict[str, str]
    likes: list[str]
    instructions: str


@dataclass(frozen=True, slots=True)
class OpenSession:
    """image_rgb: model height x width x 3. Answered by Done or Refused.

    uploaded: the picture is a user's own, so nobody knows yet how it will look. trace_id: of the
    W3C trace that the session is part of, here and below.
    """

    request_id: int
    session_id: str
    image_rgb: bytes
    persona: Persona
    seed: int
    max_duration_s: float
    idle_timeout_s: float
    uploaded: bool = False
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """A browser's SDP offer. Answered by Answer or Refused."""

    request_id: int
    session_id: str
    sdp: str
    takeover: bool


@dataclass(frozen=True, slots=True)
class Answer:
    request_id: int
    session_id: str
    sdp: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    request_id: int
    session_id: str


@dataclass(frozen=True, slots=True)
class Say:
    request_id: int
    session_id: str
    text: str


@dataclass(frozen=True, slots=True)
class EndSoon:
    """The session ends in at most left_s, and its client is told so now. Answered by Done."""

    request_id: int
    session_id: str
    reason: str
    left_s: float


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Ends the session; answered by Done once everything it opened is closed."""

    request_id: int
    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExternalOpen:
    """An external voice agent's socket. Answered by Done or Refused; request_id then names it."""

    request_id: int
    session_id: str
    takeover: bool


@dataclass(frozen=True, slots=True)
class ExternalInput:
    """Gateway to host: one frame that the socket sent; text is empty when it was binary."""

    session_id: str
    socket_id: int
    text: str
    pcm: bytes


@dataclass(frozen=True, slots=True)
class ExternalRoom:
    """Host to gateway: that many bytes of the socket's input are taken, so as many may follow."""

    session_id: str
    socket_id: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ExternalOutput:
    """Host to gateway: one frame for the socket; text is empty when it is binary."""

    session_id: str
    socket_id: int
    text: str
    pcm: bytes


@dataclass(frozen=True, slots=True)
class ExternalClose:
    """Either way: the socket is gone, or must be closed with this WebSocket code."""

    session_id: str
    socket_id: int
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    request_id: int


@dataclass(frozen=True, slots=True)
class Refused:
    """status is the HTTP status that fits; reason says why in words for the caller."""

    request_id: int
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class PictureReport:
    """How much a user's picture moved when it was tried: see session/rehearsal.py.

    expression: how strongly its liveliest parts changed. familiar: whether that is at least
    `least`, which nearly all pictures like those of the training reach.
    """

    expression: float
    least: float
    familiar: bool


HostedState = Literal["starting", "ready", "live", "reconnecting", "ending", "ended", "failed"]


@dataclass(frozen=True, slots=True)
class SessionState:
    """Unsolicited, host to gateway, whenever the session's state changes.

    picture: with `ready`, of a picture that was tried.
    """

    session_id: str
    state: HostedState
    reason: str
    picture: PictureReport | None = None


@dataclass(frozen=True, slots=True)
class HostMetrics:
    """Unsolicited, about once a second. Counters only grow within a group's life."""

    counters: dict[str, float]
    gauges: dict[str, float]
    observations: dict[str, list[float]]


# ---------------------------------------------------------------- session host -> engine -> host


@dataclass(frozen=True, slots=True)
class StartCharacter:
    """Host to rank and decoder: encode this reference, forget everything before it."""

    session_id: str
    image_rgb: bytes
    seed: int
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class CharacterReady:
    session_id: str
    process: str
    elapsed_ms: float


@dataclass(frozen=True, slots=True)
class EndCharacter:
    """Host to rank and decoder: drop every trace of the session. Answered by CharacterEnded."""

    session_id: str


@dataclass(frozen=True, slots=True)
class CharacterEnded:
    session_id: str
    process: str


@dataclass(frozen=True, slots=True)
class StepInput:
    """Everything that conditions one chunk; self-contained, so a dropped one harms no other.

    audio_window: LogMel's window (past, chunk, look-ahead) at the model's audio rate.
    voice_48k: the chunk's own slice of the voice, carried along unchanged to its frames.
    controls: frames_per_chunk x num_controls float32, row-major.
    utterance_id: 0 when the chunk holds no speech; `last` marks an utterance's final chunk.
    passes: denoising passes wanted (fewer when late).
    """

    session_id: str
    epoch: int
    chunk_index: int
    audio_window: bytes
    voice_48k: bytes
    controls: bytes
    utterance_id: int
    utterance_offset_ms: float
    last: bool
    passes: int


@dataclass(frozen=True, slots=True)
class LatentChunk:
    """Rank to decoder. latent: video_tokens x token_channels float32.

    step_began_s: CLOCK_MONOTONIC of the machine, here and in VideoChunk; 0 where it is not known.
    """

    step: StepInput
    latent: bytes
    passes: int
    step_ms: float
    step_began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class VideoChunk:
    """Decoder to host: frames_per_chunk I420 frames with their slice of the voice."""

    session_id: str
    epoch: int
    chunk_index: int
    frames_i420: list[bytes]
    voice_48k: bytes
    utterance_id: int
    utterance_offset_ms: float
    last: bool
    passes: int
    step_ms: float
    decode_ms: float
    step_began_s: float = 0.0
    decode_began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Rank to host, unsolicited, about once a second: what it has counted since the last.

    eager_steps: steps that the captured graph declined. fp8_saturated: values that were clamped,
    because they did not fit their FP8 scale. plain_sums: sums over the ranks that the memory for
    the steady shape declined.
    """

    process: str
    steps: int
    eager_steps: int
    fp8_saturated: int
    plain_sums: int = 0


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Rank or decoder to host, unsolicited, around each session: what is in use on its GPU."""

    process: str
    used_bytes: int


# ---------------------------------------------------------------- session host <-> agent worker


@dataclass(frozen=True, slots=True)
class AgentStart:
    session_id: str
    persona: Persona
    greet: bool
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class AgentStarted:
    """listener: the recogniser in use, in words; voice: the synthesizer, in words."""

    session_id: str
    listener: str
    voice: str
    chat: str


@dataclass(frozen=True, slots=True)
class AgentEnd:
    session_id: str


@dataclass(frozen=True, slots=True)
class UserAudio:
    """Microphone PCM at 16 kHz, in order, without gaps."""

    session_id: str
    pcm_16k: bytes


@dataclass(frozen=True, slots=True)
class UserSpeech:
    """Agent to host: the user began or stopped speaking. `barge_in`: it must stop the character."""

    session_id: str
    speaking: bool
    barge_in: bool


@dataclass(frozen=True, slots=True)
class AgentAudio:
    """Agent speech. utterance_id grows by one with each utterance, from 1; `text` is its words."""

    session_id: str
    utterance_id: int
    sample_rate: int
    pcm: bytes
    text: str
    last: bool


@dataclass(frozen=True, slots=True)
class Transcript:
    session_id: str
    role: Literal["user", "character"]
    text: str
    final: bool
    utterance_id: int


@dataclass(frozen=True, slots=True)
class AgentInterrupt:
    """Host to agent: drop what is being thought or spoken, up to and including utterance_id."""

    session_id: str
    utterance_id: int


@dataclass(frozen=True, slots=True)
class Playback:
    """Host to agent: an utterance's playout began, or ended at played_ms."""

    session_id: str
    utterance_id: int
    event: Literal["started", "finished", "interrupted"]
    played_ms: float


@dataclass(frozen=True, slots=True)
class AgentSay:
    """The character must speak these very words."""

    session_id: str
    text: str


@dataclass(frozen=True, slots=True)
class UserText:
    """The user typed this: a turn of the conversation, answered as if it had been spoken."""

    session_id: str
    text: str


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """Milliseconds from the end of the user's speech to each stage of the agent's turn."""

    session_id: str
    utterance_id: int
    stages_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class AgentError:
    session_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Agent to host: the client should run a function. arguments: JSON."""

    session_id: str
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Host to agent: what the client's function returned, as JSON."""

    session_id: str
    call_id: str
    result: str


@dataclass(frozen=True, slots=True)
class AgentClear:
    """Agent to host: stop the voice and drop all that was sent."""

    session_id: str


@dataclass(frozen=True, slots=True)
class AgentMark:
    """Agent to host: answer with MarkReached once that place of the utterance has played."""

    session_id: str
    utterance_id: int
    position_ms: float
    name: str


@dataclass(frozen=True, slots=True)
class MarkReached:
    session_id: str
    name: str


Message = (
    Ready
    | Warming
    | Failed
    | Ping
    | Pong
    | Shutdown
    | ShutdownAck
    | OpenSession
    | Offer
    | Answer
    | Interrupt
    | Say
    | EndSoon
    | CloseSession
    | ExternalOpen
    | ExternalInput
    | ExternalRoom
    | ExternalOutput
    | ExternalClose
    | Done
    | Refused
    | SessionState
    | HostMetrics
    | StartCharacter
    | CharacterReady
    | EndCharacter
    | CharacterEnded
    | StepInput
    | LatentChunk
    | VideoChunk
    | StepCounts
    | GpuMemory
    | AgentStart
    | AgentStarted
    | AgentEnd
    | UserAudio
    | UserSpeech
    | AgentAudio
    | Transcript
    | AgentInterrupt
    | Playback
    | AgentSay
    | UserText
    | TurnTiming
    | AgentError
    | ToolCall
    | ToolResult
    | AgentClear
    | AgentMark
    | MarkReached
)

_TYPES: dict[bytes, type] = {kind.__name__.encode(): kind for kind in Message.__args__}


class WireError(ValueError):
    """Frames that are no message of ours."""


def encode(message: Message) -> list[bytes]:
    return [type(message).__name__.encode(), msgspec.msgpack.encode(message)]


def decode(frames: list[bytes]) -> Message:
    if len(frames) != 2 or frames[0] not in _TYPES:
        raise WireError(f"unknown message {bytes(frames[0][:40])!r}" if frames else "empty message")
    try:
        message: Any = msgspec.msgpack.decode(frames[1], type=_TYPES[frames[0]])
    except msgspec.DecodeError as error:
        raise WireError(f"{frames[0].decode()}: {error}") from error
    return message  # type: ignore[no-any-return]
