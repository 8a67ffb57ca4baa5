"""A conversation with invented time: what the client reads and what the agent is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from characters_serve.config import ModelConfig
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
    VideoChunk,
)
from characters_serve.session.chunker import Chunker
from characters_serve.session.conversation import Conversation
from characters_serve.session.counters import Counters
from characters_serve.session.events import EventsChannel
from characters_serve.session.playout import Playout

MODEL = ModelConfig()


class Rig:
    """Chunker, playout and conversation around an engine that needs no time."""

    def __init__(self, *, hesitates: bool = True) -> None:
        self.sent: list[str] = []
        self.told: list[Message] = []
        self.counters = Counters()
        events = EventsChannel()
        events.attach(self.sent.append, lambda: 0)
        self.chunker = Chunker(MODEL, "s", 1)
        self.playout = Playout(fps=24, voice_samples_per_chunk=8000, target_chunks=2)
        self.talk = Conversation(
            "s",
            self.chunker,
            self.playout,
            events,
            self.counters,
            self.told.append,
            0.0,
            hesitates=hesitates,
        )
        self.packet = 0
        self.packets: list[NDArray[np.int16]] = []
        self.epochs: list[int] = []  # of each picture

    @property
    def sound(self) -> NDArray[np.int16]:
        return np.concatenate(self.packets)

    @property
    def now_s(self) -> float:
        return self.packet * 0.02

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 50)):
            while self.playout.credits() > 0:
                step = self.chunker.next(passes=4, listening_energy=self.talk.listening_energy)
                self.playout.step_sent(
                    self.now_s, speaking=step.utterance_id != 0 and not step.last
                )
                frames = [str(step.epoch).encode()] * 4
                self.playout.push(
                    VideoChunk(
                        "s",
                        step.epoch,
                        step.chunk_index,
                        frames,
                        step.voice_48k,
                        step.utterance_id,
                        step.utterance_offset_ms,
                        step.last,
                        4,
                        1.0,
                        1.0,
                    ),
                    self.now_s,
                )
            if self.playout.can_start:
                self.playout.start(self.packet * 24 // 50 + 1)
            self.packets.append(self.playout.packet(self.packet))
            slot = self.packet * 24 // 50
            if len(self.epochs) <= slot:
                shown = self.playout.picture(slot)
                self.epochs.append(int(shown) if shown else 0)
            self.packet += 1
            self.talk.follow(self.now_s)

    def speak(self, number: int, seconds: float, text: str = "", *, last: bool = True) -> None:
        pcm = np.full(round(24_000 * seconds), 6000, np.int16).tobytes()
        self.talk.agent(AgentAudio("s", number, 24_000, pcm, text, last), self.now_s)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        read = [json.loads(text) for text in self.sent]
        return [event for event in read if not kind or event["type"] == kind]

    def reports(self) -> list[tuple[str, int]]:
        return [(m.event, m.utterance_id) for m in self.told if isinstance(m, Playback)]


def test_captions_and_states_follow_the_voice() -> None:
    rig = Rig()
    rig.run(1)
    rig.speak(1, 1.0, "Hello.", last=False)
    rig.speak(1, 1.0, "How are you?")
    assert rig.events() == []
    rig.run(0.9)
    assert [e["type"] for e in rig.events()] == ["bot-started-speaking", "bot-transcription"]
    rig.run(1.0)
    assert [e["data"]["text"] for e in rig.events("bot-transcription")] == [
        "Hello.",
        "How are you?",
    ]
    rig.run(1.0)
    assert rig.events()[-1]["type"] == "bot-stopped-speaking"
    assert rig.events()[-1]["data"] == {"interrupted": False, "position_ms": 2000}
    assert rig.reports() == [("started", 1), ("finished", 1)]


def test_many_small_pieces_are_one_utterance_and_so_are_two_minutes() -> None:
    rig = Rig()
    rig.run(1)
    for number in range(150):
        rig.speak(1, 0.02, last=number == 149)
    rig.run(4)
    rig.speak(2, 120.0)
    rig.run(122)
    assert rig.reports() == [("started", 1), ("finished", 1), ("started", 2), ("finished", 2)]
    ends = [e["data"]["position_ms"] for e in rig.events("bot-stopped-speaking")]
    assert ends == [3000, 120_000]


def test_barge_in_tells_everybody_where_the_voice_was() -> None:
    rig = Rig()
    rig.run(1)
    rig.speak(1, 5.0, "A long story.")
    rig.speak(2, 1.0, "And another.")
    rig.run(2)
    rig.talk.agent(UserSpeech("s", True, True), rig.now_s)
    kinds = [event["type"] for event in rig.events()]
    assert kinds[-3:] == ["user-started-speaking", "bot-interrupted", "bot-stopped-speaking"]
    position_ms = rig.events()[-1]["data"]["position_ms"]
    assert 1500 < position_ms < 2000
    assert rig.reports() == [("started", 1), ("interrupted", 1), ("interrupted", 2)]
    assert [m.utterance_id for m in rig.told if isinstance(m, AgentInterrupt)] == [2]
    rig.speak(2, 1.0, "too late")
    rig.run(1)
    rig.talk.agent(UserSpeech("s", False, False), rig.now_s)
    rig.speak(3, 1.0, "Sorry?")
    rig.run(3)
    assert rig.reports()[3:] == [("started", 3), ("finished", 3)]
    assert [e["data"]["text"] for e in rig.events("bot-transcription")] == [
        "A long story.",
        "Sorry?",
    ]


def test_the_voice_waits_for_what_may_be_speech_and_goes_on_when_it_was_none() -> None:
    rig = Rig()
    rig.run(1)
    rig.speak(1, 3.0)
    rig.run(2)
    before = len(rig.packets)
    rig.talk.agent(UserSpeech("s", True, False), rig.now_s)
    assert rig.events("server-message")[-1]["data"] == {"kind": "voice-waits"}
    rig.run(0.24)
    waiting = np.concatenate(rig.packets[before:])
    assert not waiting[48 * 50 :].any()
    rig.run(3)
    rig.talk.agent(UserSpeech("s", False, False), rig.now_s)
    assert rig.events("server-message")[-1]["data"] == {"kind": "voice-goes-on"}
    assert rig.reports() == [("started", 1), ("finished", 1)]
    assert rig.events("bot-interrupted") == []
    spoken_s = float((np.abs(rig.sound) > 3000).sum()) / 48_000
    assert 3.0 <= spoken_s <= 3.15  # the last eighth of a second twice


def test_speech_that_is_confirmed_finds_the_voice_silent_already() -> None:
    rig = Rig()
    rig.run(1)
    rig.speak(1, 3.0)
    rig.run(2)
    rig.talk.agent(UserSpeech("s", True, False), rig.now_s)
    rig.run(0.06)
    before = len(rig.packets)
    rig.talk.agent(UserSpeech("s", True, True), rig.now_s)
    rig.run(3)
    assert np.abs(np.concatenate(rig.packets[before:])).max() < 10  # a resampler's last bits
    assert rig.reports() == [("started", 1), ("interrupted", 1)]
    assert len(rig.events("bot-interrupted")) == 1


def test_a_voice_that_may_not_be_interrupted_does_not_wait() -> None:
    rig = Rig(hesitates=False)
    rig.run(1)
    rig.speak(1, 2.0)
    rig.run(1.5)
    rig.talk.agent(UserSpeech("s", True, False), rig.now_s)
    rig.run(2)
    assert rig.events("server-message") == []
    assert float((np.abs(rig.sound) > 3000).sum()) / 48_000 == pytest.approx(2.0, abs=0.01)


def begin_nothing(rig: Rig) -> None:
    """The utterance is queued; no step has carried it."""
    rig.speak(1, 5.0)


def begin_a_word(rig: Rig) -> None:
    rig.speak(1, 5.0)
    rig.run(0.9)


def begin_the_end(rig: Rig) -> None:
    """All of it is in the playout."""
    rig.speak(1, 1.0)
    rig.run(1.1)
    assert rig.playout.utterance_id == 1 and not rig.chunker.speaking


def begin_two(rig: Rig) -> None:
    rig.speak(1, 5.0)
    rig.speak(2, 5.0)
    rig.run(0.9)


def by_speech(rig: Rig) -> None:
    rig.talk.agent(UserSpeech("s", True, True), rig.now_s)


def by_button(rig: Rig) -> None:
    rig.talk.interrupt(rig.now_s)


def by_agent(rig: Rig) -> None:
    rig.talk.agent(AgentClear("s"), rig.now_s)


def twice(rig: Rig) -> None:
    """Within 10 ms: no packet lies between."""
    by_button(rig)
    by_speech(rig)


@pytest.mark.parametrize("interrupt", [by_speech, by_button, by_agent, twice])
@pytest.mark.parametrize("begin", [begin_nothing, begin_a_word, begin_the_end, begin_two])
def test_an_interruption_at_any_moment(
    begin: Callable[[Rig], None], interrupt: Callable[[Rig], None]
) -> None:
    rig = Rig()
    rig.run(0.4)
    begin(rig)
    spoken = rig.chunker.latest_utterance_id
    handed_out, shown, heard = len(rig.sound), len(rig.epochs), rig.playout.utterance_id
    position_ms = rig.playout.position_ms if heard else 0.0
    interrupt(rig)
    epoch = rig.chunker.epoch
    rig.speak(spoken, 1.0, "what was still on its way")
    rig.run(0.6)
    # A packet that fades; then silence, whatever was buffered, queued or on its way.
    assert np.abs(rig.sound[handed_out + 480 :]).max() <= 3  # the resampler rings at the cut
    assert np.abs(np.diff(rig.sound[max(0, handed_out - 960) :].astype(np.int32))).max() < 100
    # The picture goes on; two chunks after the one on screen it is that of somebody who listens.
    assert sum(each < epoch for each in rig.epochs[shown:]) < 4 + 8
    assert rig.playout.held_slots == 0
    rig.speak(spoken + 1, 1.0, "Yes?")
    rig.run(1.6)
    assert np.count_nonzero(np.abs(rig.sound[handed_out + 480 :]) > 3000) == pytest.approx(
        48_000, abs=200
    )
    ends = [m for m in rig.told if isinstance(m, Playback) and m.event != "started"]
    assert [m.utterance_id for m in ends] == [*range(1, spoken + 1), spoken + 1]
    assert [m.event for m in ends] == ["interrupted"] * spoken + ["finished"]
    assert ends[0].played_ms == pytest.approx(position_ms)
    assert {m.played_ms for m in ends[1:spoken]} <= {0.0}
    starts = [number for kind, number in rig.reports() if kind == "started"]
    assert starts == ([heard] if heard else []) + [spoken + 1]
    stops = [event["data"]["interrupted"] for event in rig.events("bot-stopped-speaking")]
    assert stops == ([True] if heard else []) + [False]


def test_a_turn_is_measured_from_the_real_end_of_speech_to_the_first_sound() -> None:
    rig = Rig()
    rig.run(1)
    rig.talk.agent(UserSpeech("s", True, False), rig.now_s)
    rig.run(1)
    rig.talk.stamp("step", rig.now_s)  # of what was said before
    rig.talk.agent(UserSpeech("s", False, False), rig.now_s)  # its silence took 500 ms
    rig.run(0.1)
    rig.talk.agent(TurnTiming("s", 1, {"end_of_turn": 500.0, "first_audio": 600.0}), rig.now_s)
    rig.speak(1, 1.0)
    rig.talk.stamp("step", rig.now_s + 0.05)
    rig.talk.stamp("step", rig.now_s + 0.2)  # the second of the same answer
    rig.run(1)
    observed = rig.counters.take().observations
    latencies = observed["turn_latency_ms"]
    assert observed["turn_stage_ms_end_of_turn"] == [500.0]
    assert observed["turn_stage_ms_voice"] == [pytest.approx(latencies[0], abs=0.1)]
    assert len(latencies) == 1 and 600 < latencies[0] < 600 + 350
    data = rig.events("metrics")[0]["data"]
    assert data["turn"]["first_audio"] == 600.0 and data["turn"]["voice"] > 600
    assert data["turn"]["queued"] == pytest.approx(600, abs=1)
    assert data["turn"]["step"] == pytest.approx(650, abs=1)
    voice_ms = data["turn"]["voice"]
    for ago_s in (0.02, 0.0):  # only the first report counts
        rig.talk.heard(rig.now_s - ago_s, rig.now_s)
    (heard,) = [e["data"]["turn"] for e in rig.events("metrics") if "heard" in e["data"]["turn"]]
    assert heard == {**data["turn"], "heard": heard["heard"]} and heard["heard"] > voice_ms
    assert rig.counters.take().observations["turn_stage_ms_heard"] == [heard["heard"]]
    rig.speak(2, 1.0)
    rig.run(1)
    rig.talk.heard(rig.now_s, rig.now_s)
    assert (
        rig.counters.take().observations.keys() & {"turn_latency_ms", "turn_stage_ms_heard"}
        == set()
    )


def test_what_is_heard_of_another_turn_is_not_measured() -> None:
    rig = Rig()
    rig.run(1)
    for speaking in (True, False):
        rig.talk.agent(UserSpeech("s", speaking, False), rig.now_s)
    rig.speak(1, 1.0)
    rig.run(1)
    rig.talk.agent(UserSpeech("s", True, False), rig.now_s)  # has gone on before it was told
    rig.talk.heard(rig.now_s, rig.now_s)
    assert "turn_stage_ms_heard" not in rig.counters.take().observations


def test_the_clients_wishes_reach_the_agent() -> None:
    rig = Rig()
    rig.talk.say("Good evening.", 1.0)
    rig.talk.typed("Who are you?", 2.0)
    rig.talk.microphone(bytes(640))
    kinds = [type(message) for message in rig.told]
    assert kinds == [AgentSay, AgentInterrupt, UserText, UserAudio]
    # What is thought but not heard of yet is dropped too.
    assert rig.told[1] == AgentInterrupt("s", 1)


def test_marks_come_back_when_the_voice_has_come_to_them() -> None:
    rig = Rig()

    def marks() -> list[str]:
        return [message.name for message in rig.told if isinstance(message, MarkReached)]

    rig.run(1)
    rig.talk.agent(AgentMark("s", 0, 0.0, "nothing to wait for"), rig.now_s)
    assert marks() == ["nothing to wait for"]
    rig.speak(1, 1.0, last=False)
    rig.talk.agent(AgentMark("s", 1, 1000.0, "middle"), rig.now_s)
    rig.speak(1, 1.0)
    rig.talk.agent(AgentMark("s", 1, 2000.0, "end"), rig.now_s)
    rig.run(0.9)
    assert marks()[1:] == []
    rig.run(0.6)
    assert marks()[1:] == ["middle"]
    rig.run(1.5)
    assert marks()[1:] == ["middle", "end"]
    rig.speak(2, 2.0)
    rig.talk.agent(AgentMark("s", 2, 2000.0, "cleared"), rig.now_s)
    rig.run(1)
    rig.talk.agent(AgentClear("s"), rig.now_s)
    rig.talk.agent(AgentMark("s", 2, 2000.0, "too late to wait"), rig.now_s)
    assert rig.reports()[-2:] == [("started", 2), ("interrupted", 2)]
    assert marks()[3:] == ["too late to wait"]
    rig.run(3)
    assert marks()[4:] == []


def test_transcripts_and_errors_are_passed_on() -> None:
    rig = Rig()
    rig.talk.agent(Transcript("s", "user", "hi", False, 1), 0.0)
    rig.talk.agent(Transcript("s", "character", "hello", True, 1), 0.0)
    rig.talk.agent(AgentError("s", "no chat"), 0.0)
    assert [(e["type"], e["data"]) for e in rig.events()] == [
        ("user-transcription", {"text": "hi", "final": False}),
        ("error", {"message": "no chat", "fatal": False}),
    ]


def test_a_function_call_reaches_the_client() -> None:
    rig = Rig()
    rig.talk.agent(ToolCall("s", "c", "open_door", '{"wide": true}'), 0.0)
    (call,) = rig.events("llm-function-call")
    assert call["data"] == {
        "function_name": "open_door",
        "tool_call_id": "c",
        "args": {"wide": True},
    }


def test_listening_energy_is_there_while_the_user_speaks() -> None:
    rig = Rig()
    loud = np.full(320, 4000, np.int16).tobytes()
    rig.talk.microphone(loud)
    assert rig.talk.listening_energy == 0
    rig.talk.agent(UserSpeech("s", True, False), 0.0)
    for _ in range(50):
        rig.talk.microphone(loud)
    assert rig.talk.listening_energy == pytest.approx(1, abs=0.01)
