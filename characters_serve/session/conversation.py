"""In: agent messages, microphone PCM, playout events, the client's wishes. Out: RTVI events for the
client, reports for the agent, speech for the chunker.

What the client reads follows what it hears: captions and speaking states are sent when the playout
reaches them. Knows nothing of the connection or the engine.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from characters_serve.messages import (
    AgentAudio,
    AgentClear,
    AgentError,
    AgentInterrupt,
    AgentMark,
    AgentSay,
    MarkReached,
    Message,
    Playback,
    ToolCall,
    Transcript,
    TurnTiming,
    UserAudio,
    UserSpeech,
    UserText,
)
from characters_serve.session.chunker import Chunker
from characters_serve.session.counters import TURN_STAGE, Counters
from characters_serve.session.events import EventsChannel
from characters_serve.session.microphone import loudness
from characters_serve.session.playout import Playout, PlayoutEvent

log = logging.getLogger(__name__)

# A turn that has not been answered for this long is not measured by what is said later.
MAX_TURN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Caption:
    utterance_id: int
    offset_ms: float
    text: str
    mark: bool = False


class Conversation:
    def __init__(
        self,
        session_id: str,
        chunker: Chunker,
        playout: Playout,
        events: EventsChannel,
        counters: Counters,
        to_agent: Callable[[Message], None],
        now_s: float,
        *,
        hesitates: bool,
    ) -> None:
        """hesitates: the voice waits as soon as the user may be speaking."""
        self.listening_energy = 0.0
        self.last_speech_s = now_s
        self.turn_stages_ms: dict[str, float] = {}
        self._session_id = session_id
        self._chunker = chunker
        self._playout = playout
        self._events = events
        self._counters = counters
        self._to_agent = to_agent
        self._hesitates = hesitates
        self._user_speaking = False
        self._speech_ended_s: float | None = None
        self._unheard_s: float | None = None
        self._stamps_s: dict[str, float] = {}
        self._captions: deque[_Caption] = deque()
        self._over_id = 0
        self._queued_ms: tuple[int, float] = (0, 0.0)

    def microphone(self, pcm_16k: bytes) -> None:
        heard = loudness(pcm_16k) if self._user_speaking else 0.0
        self.listening_energy += 0.1 * (heard - self.listening_energy)
        self._to_agent(UserAudio(self._session_id, pcm_16k))

    def agent(self, message: Message, now_s: float) -> None:
        match message:
            case AgentAudio():
                self._queue(message, now_s)
            case UserSpeech():
                self._user_speech(message, now_s)
            case Transcript(role="user"):
                data = {"text": message.text, "final": message.final}
                self._events.emit("user-transcription", data)
            case Transcript():
                pass  # captions come with the audio, so that they can follow its playout
            case TurnTiming():
                self._timing(message, now_s)
            case AgentError():
                self._counters.count("agent_errors_total")
                log.warning("the agent reports: %s", message.reason)
                self._events.emit("error", {"message": message.reason, "fatal": False})
            case ToolCall():
                data = {
                    "function_name": message.name,
                    "tool_call_id": message.call_id,
                    "args": json.loads(message.arguments),
                }
                self._events.emit("llm-function-call", data)
            case AgentClear():
                self._silence(now_s)
            case AgentMark():
                place = (message.utterance_id, message.position_ms, message.name)
                self._captions.append(_Caption(*place, mark=True))
                self._show_captions()

    def say(self, text: str, now_s: float) -> None:
        self.last_speech_s = now_s
        self._speech_ended_s = None  # what follows answers a text
        self._to_agent(AgentSay(self._session_id, text))

    def typed(self, text: str, now_s: float) -> None:
        self.interrupt(now_s)
        self.last_speech_s = now_s
        self._to_agent(UserText(self._session_id, text))

    def interrupt(self, now_s: float) -> None:
        """Stops what is spoken, and what is thought but not yet heard of here (the next id)."""
        latest_id = self._silence(now_s)
        self._speech_ended_s = None
        self._to_agent(AgentInterrupt(self._session_id, latest_id + 1))

    def stamp(self, stage: str, now_s: float) -> None:
        """A stage of the answer to the present turn, on its way through the engine."""
        self._stamps_s.setdefault(stage, now_s)

    def heard(self, heard_s: float, now_s: float) -> None:
        """The client played the first sound of the answer at heard_s; told once for each turn."""
        ended_s, self._unheard_s = self._unheard_s, None
        if ended_s is None or now_s - ended_s > MAX_TURN_S:
            return
        # The client takes half a round trip off, which on a lopsided path may be too much.
        heard_ms = max(round((heard_s - ended_s) * 1000, 1), self.turn_stages_ms["voice"])
        self.turn_stages_ms["heard"] = heard_ms
        self._counters.observe(f"{TURN_STAGE}heard", heard_ms)
        self._events.emit("metrics", {"turn": self.turn_stages_ms})

    def follow(self, now_s: float) -> None:
        """Called after each picture and packet: reports where the playout has come to."""
        for event in self._playout.take_events():
            self._playout_event(event, now_s)
        if self._captions:
            self._show_captions()

    def _silence(self, now_s: float) -> int:
        was_speaking = self._playout.utterance_id != 0
        position_ms = self._playout.position_ms if was_speaking else 0.0
        latest_id = self._chunker.interrupt()
        self._playout.interrupt(self._chunker.epoch, latest_id)
        self._captions.clear()
        self._counters.count("interrupts_total")
        if was_speaking:
            self._events.emit("bot-interrupted", {"position_ms": round(position_ms)})
        self.follow(now_s)
        return latest_id

    def _queue(self, audio: AgentAudio, now_s: float) -> None:
        utterance_id, queued_ms = self._queued_ms
        if utterance_id != audio.utterance_id:
            queued_ms = 0.0
        taken = self._chunker.add(audio)
        if taken:
            self.stamp("queued", now_s)
        if taken and audio.text:
            self._captions.append(_Caption(audio.utterance_id, queued_ms, audio.text))
        queued_ms += len(audio.pcm) / 2 * 1000 / audio.sample_rate
        self._queued_ms = (audio.utterance_id, queued_ms)

    def _user_speech(self, speech: UserSpeech, now_s: float) -> None:
        self.last_speech_s = now_s
        if speech.speaking != self._user_speaking:
            self._user_speaking = speech.speaking
            kind = "user-started-speaking" if speech.speaking else "user-stopped-speaking"
            self._events.emit(kind)
            self._speech_ended_s = None if speech.speaking else now_s
            self._unheard_s = None
            self._stamps_s.clear()
        begins = speech.speaking and not speech.barge_in
        if begins and self._hesitates and self._playout.wait():
            self._events.emit("server-message", {"kind": "voice-waits"})
        if speech.barge_in:
            latest_id = self._silence(now_s)
            self._to_agent(AgentInterrupt(self._session_id, latest_id))

    def _timing(self, timing: TurnTiming, now_s: float) -> None:
        self.turn_stages_ms = dict(timing.stages_ms)
        # The agent knows when the speech really ended; its own notice comes a silence later.
        first_audio_ms = timing.stages_ms.get("first_audio")
        if first_audio_ms is not None and self._speech_ended_s is not None:
            self._speech_ended_s = now_s - first_audio_ms / 1000

    def _playout_event(self, event: PlayoutEvent, now_s: float) -> None:
        if event.kind == "voiced":
            self._voiced(now_s)
            return
        if event.kind == "resumed":
            self._events.emit("server-message", {"kind": "voice-goes-on"})
            return
        report = Playback(self._session_id, event.utterance_id, event.kind, event.played_ms)
        self._to_agent(report)
        self.last_speech_s = now_s
        position_ms = round(event.played_ms)
        if event.kind != "started":
            self._over_id = event.utterance_id
        if event.kind == "started":
            self._events.emit("bot-started-speaking", {"utterance_id": event.utterance_id})
        elif event.kind == "finished" or event.played_ms > 0:
            if event.kind == "finished":
                self._show_captions()
            interrupted = event.kind == "interrupted"
            data = {"interrupted": interrupted, "position_ms": position_ms}
            self._events.emit("bot-stopped-speaking", data)

    def _voiced(self, now_s: float) -> None:
        if self._speech_ended_s is None:
            return
        ended_s, self._speech_ended_s = self._speech_ended_s, None
        latency_s = now_s - ended_s
        if latency_s > MAX_TURN_S:
            return
        self._unheard_s = ended_s
        for stage, stamp_s in (*self._stamps_s.items(), ("voice", now_s)):
            self.turn_stages_ms[stage] = round((stamp_s - now_s + latency_s) * 1000, 1)
        self._counters.observe("turn_latency_ms", latency_s * 1000)
        for stage, stage_ms in self.turn_stages_ms.items():
            self._counters.observe(f"{TURN_STAGE}{stage}", stage_ms)
        turn = {"turn_latency_ms": round(latency_s * 1000), "turn": self.turn_stages_ms}
        self._events.emit("metrics", turn)

    def _show_captions(self) -> None:
        """Emits the captions and marks that the voice has reached, or has left behind."""
        speaking_id, position_ms = self._playout.utterance_id, self._playout.position_ms
        while self._captions:
            caption = self._captions[0]
            over = caption.utterance_id <= self._over_id or caption.utterance_id < speaking_id
            reached = caption.utterance_id == speaking_id and caption.offset_ms <= position_ms
            if not (over or reached):
                return
            self._captions.popleft()
            if caption.mark:
                self._to_agent(MarkReached(self._session_id, caption.text))
                continue
            data = {"text": caption.text, "utterance_id": caption.utterance_id}
            self._events.emit("bot-transcription", data)
