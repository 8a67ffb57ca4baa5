"""In: microphone PCM, playout reports. Out: agent speech, transcripts, states. Knows no transport.

What every agent is: `local.py`, an external program (`external.py`), a realtime API
(`openai_realtime.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from characters_serve.messages import (
    AgentAudio,
    AgentClear,
    AgentError,
    AgentMark,
    AgentStarted,
    Playback,
    ToolCall,
    ToolResult,
    Transcript,
    TurnTiming,
    UserSpeech,
)

AgentEvent = (
    UserSpeech
    | AgentAudio
    | Transcript
    | TurnTiming
    | AgentError
    | AgentClear
    | AgentMark
    | ToolCall
)

Emit = Callable[[AgentEvent], None]
"""Takes an event at once and in order; it must not block and must not call the agent back."""


class Agent(Protocol):
    """One session's agent. All calls come from one event loop; only open and close may wait.

    Utterance ids grow from 1; none is heard twice. An utterance that the host dropped before its
    first audio leaves a gap, so that a repeated interrupt can never hit its successor.
    """

    async def open(self) -> AgentStarted:
        """Says in plain words who listens, speaks and thinks, then begins (and greets)."""
        ...

    def hear(self, pcm_16k: bytes) -> None:
        """Microphone PCM, in order and without gaps; pieces of any length."""
        ...

    def say(self, text: str) -> None:
        """Speaks the text as one utterance, after whatever is already queued."""
        ...

    def read(self, text: str) -> None:
        """A turn that the user typed: answered as if it had been spoken."""
        ...

    def interrupt(self, utterance_id: int) -> None:
        """Drops what is thought or spoken up to and including the id; later utterances live on."""
        ...

    def playback(self, report: Playback) -> None:
        """What the user really heard; the conversation's memory keeps no more than that."""
        ...

    def tool_result(self, result: ToolResult) -> None:
        """What a function of the client returned; nothing to an agent that has not called it."""
        ...

    async def close(self) -> None:
        """Stops every task of the session; nothing is emitted afterwards."""
        ...
