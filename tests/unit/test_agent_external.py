"""The external agent's protocol: what its frames become, however they are cut."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from characters_serve.agent.base import AgentEvent
from characters_serve.agent.external import ExternalAgent
from characters_serve.messages import (
    AgentAudio,
    AgentClear,
    AgentInterrupt,
    AgentMark,
    AgentSay,
    Done,
    ExternalClose,
    ExternalInput,
    ExternalOpen,
    ExternalOutput,
    ExternalRoom,
    Message,
    Playback,
    Refused,
    UserAudio,
    UserSpeech,
)
from characters_serve.session import external_link
from characters_serve.session.external_link import ExternalLink


class Rig:
    def __init__(self) -> None:
        self.events: list[AgentEvent] = []
        self.sent: list[str | bytes] = []
        self.agent = ExternalAgent("s", self.events.append, self.sent.append)
        self.agent.connect()

    def tell(self, kind: str, **fields: object) -> None:
        self.agent.text(json.dumps({"type": kind, **fields}))

    def start(self, sample_rate: int = 16_000, **fields: object) -> None:
        self.tell("start", sample_rate=sample_rate, **fields)

    @property
    def audio(self) -> list[AgentAudio]:
        return [event for event in self.events if isinstance(event, AgentAudio)]

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(frame) for frame in self.sent if isinstance(frame, str)]


@given(
    encoding=st.sampled_from(["pcm_s16le", "pcm_f32le"]),
    channels=st.sampled_from([1, 2]),
    data=st.binary(max_size=400),
    cuts=st.lists(st.integers(0, 400), max_size=20),
)
@example(encoding="pcm_f32le", channels=1, data=b"\x00\x00\x81\x7f", cuts=[])  # signalling NaN
def test_pcm_is_the_same_however_it_is_cut(
    encoding: str, channels: int, data: bytes, cuts: list[int]
) -> None:
    whole, pieces = Rig(), Rig()
    for rig in (whole, pieces):
        rig.start(encoding=encoding, channels=channels)
    whole.agent.pcm(data)
    for begin, end in pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
        pieces.agent.pcm(data[begin:end])
    for rig in (whole, pieces):
        rig.tell("end")
    joined = [b"".join(piece.pcm for piece in rig.audio) for rig in (whole, pieces)]
    size = channels * (2 if encoding == "pcm_s16le" else 4)
    assert joined[0] == joined[1]
    assert len(joined[0]) == 2 * (len(data) // size)
    for rig in (whole, pieces):
        assert [piece.last for piece in rig.audio].count(True) == int(len(data) >= size)


def test_every_encoding_says_the_same() -> None:
    voice = (np.sin(np.arange(800) * 0.1) * 20_000).astype("<i2")
    stereo = np.repeat(voice, 2)
    forms = {
        ("pcm_s16le", 1): voice.tobytes(),
        ("pcm_s16le", 2): stereo.tobytes(),
        ("pcm_f32le", 1): (voice / 32767).astype("<f4").tobytes(),
        ("pcm_f32le", 2): (stereo / 32767).astype("<f4").tobytes(),
    }
    for (encoding, channels), data in forms.items():
        rig = Rig()
        rig.start(22_050, encoding=encoding, channels=channels)
        rig.agent.pcm(data)
        assert rig.audio[0].pcm == voice.tobytes() and rig.audio[0].sample_rate == 22_050
    rig = Rig()
    rig.start(encoding="pcm_f32le")
    rig.agent.pcm(np.array([np.nan, np.inf, -np.inf, 9.0], "<f4").tobytes())
    assert np.frombuffer(rig.audio[0].pcm, "<i2").tolist() == [0, 32767, -32767, 32767]


def test_utterances_are_numbered_and_end_once() -> None:
    rig = Rig()
    rig.start()
    for _ in range(2):
        rig.agent.pcm(b"\1\1")
        rig.agent.pcm(b"\2\2")
        rig.tell("end")
        rig.tell("end")
    rig.agent.pcm(b"\3\3\3")  # cut within a sample by a start at another rate
    rig.start(48_000)
    rig.agent.pcm(b"\4\4")
    rig.agent.disconnect()
    assert [(a.utterance_id, a.sample_rate, a.pcm, a.last) for a in rig.audio] == [
        (1, 16_000, b"\1\1", False),
        (1, 16_000, b"\2\2", False),
        (1, 16_000, b"", True),
        (2, 16_000, b"\1\1", False),
        (2, 16_000, b"\2\2", False),
        (2, 16_000, b"", True),
        (3, 16_000, b"\3\3", False),
        (3, 16_000, b"", True),
        (4, 48_000, b"\4\4", False),
        (4, 48_000, b"", True),
    ]


def test_the_rest_of_an_interrupted_utterance_is_dropped() -> None:
    rig = Rig()
    rig.start()
    rig.agent.pcm(b"\1\1")
    rig.agent.interrupt(2)
    rig.agent.interrupt(2)
    rig.agent.pcm(b"\2\2")
    rig.tell("mark", name="never heard")
    rig.tell("end")
    rig.agent.pcm(b"\3\3")
    rig.tell("end")
    assert [(a.utterance_id, a.pcm, a.last) for a in rig.audio] == [
        (1, b"\1\1", False),
        (2, b"\3\3", False),
        (2, b"", True),
    ]
    assert [told["type"] for told in rig.told] == ["ready", "interrupted", "interrupted"]
    assert not any(isinstance(event, AgentMark) for event in rig.events)


def test_clear_begins_anew_at_once() -> None:
    rig = Rig()
    rig.start()
    rig.agent.pcm(b"\1\1\1")
    rig.agent.interrupt(2)
    rig.tell("clear")
    rig.agent.pcm(b"\2\2")
    assert rig.events[1] == AgentClear("s")
    assert rig.events[2] == AgentAudio("s", 2, 16_000, b"\2\2", "", False)


def test_marks_captions_and_ears() -> None:
    rig = Rig()
    rig.start(8_000)
    rig.tell("caption", text="Good")
    rig.tell("caption", text="day.")
    rig.agent.pcm(bytes(1600))
    rig.tell("mark", name="a")
    rig.tell("user_started_speaking")
    rig.tell("user_stopped_speaking")
    rig.agent.mark_reached("a")
    assert rig.audio[0].text == "Good day."
    assert rig.events[1:] == [
        AgentMark("s", 1, 100.0, "a"),
        UserSpeech("s", True, True),
        UserSpeech("s", False, False),
    ]
    assert rig.told[-1] == {"type": "mark", "name": "a"}


def test_the_agent_hears_of_the_playout_and_the_user() -> None:
    rig = Rig()
    rig.agent.hear(b"\0\0")  # before it has started, nothing is sent
    rig.start(microphone=False)
    rig.agent.hear(b"\0\0")
    rig.start()
    rig.agent.hear(b"\1\1")
    rig.agent.say("Hello.")
    rig.agent.read("Who is it?")
    rig.agent.playback(Playback("s", 1, "started", 0.0))
    rig.agent.playback(Playback("s", 1, "interrupted", 740.4))
    assert [frame for frame in rig.sent if isinstance(frame, bytes)] == [b"\1\1"]
    assert rig.told == [
        {"type": "ready", "sample_rate": 16_000},
        {"type": "say", "text": "Hello."},
        {"type": "user_text", "text": "Who is it?"},
        {"type": "playback_started", "utterance": 1},
        {"type": "playback_finished", "utterance": 1, "position_ms": 740, "interrupted": True},
    ]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("no JSON", "Invalid JSON"),
        ("[]", "object"),
        ('{"type": "sing"}', "type: unknown"),
        ("{}", "type: unknown"),
        ('{"type": "start"}', "sample_rate: Field required"),
        ('{"type": "start", "sample_rate": 96000}', "sample_rate: "),
        ('{"type": "start", "sample_rate": 16000, "channels": 6}', "channels: "),
        ('{"type": "start", "sample_rate": 16000, "encoding": "mp3"}', "encoding: "),
        ('{"type": "end", "now": true}', "now: "),
        ('{"type": "mark", "name": ""}', "name: "),
    ],
)
def test_a_bad_message_is_answered_and_harms_nothing(raw: str, words: str) -> None:
    rig = Rig()
    rig.agent.text(raw)
    assert rig.told[-1]["type"] == "error" and words in rig.told[-1]["message"]
    rig.agent.pcm(b"\0\0")
    rig.agent.pcm(b"\0\0")
    assert [told["type"] for told in rig.told] == ["ready", "error", "error"]
    rig.start()
    rig.agent.pcm(b"\1\1")
    assert len(rig.audio) == 1


# ---------------------------------------------------------------- the session's end of the socket


class LinkRig:
    def __init__(self) -> None:
        self.events: list[AgentEvent] = []
        self.posted: list[Message] = []
        self.queued_ms = 0.0
        self.link = ExternalLink(
            "s", self.events.append, lambda: self.queued_ms, self.posted.append
        )

    def text(self, socket_id: int, **fields: object) -> None:
        self.link.input(ExternalInput("s", socket_id, json.dumps(fields), b""))

    def pcm(self, socket_id: int, pcm: bytes) -> None:
        self.link.input(ExternalInput("s", socket_id, "", pcm))

    def posts(self, kind: type) -> list[Any]:
        return [message for message in self.posted if isinstance(message, kind)]


async def test_one_socket_at_a_time_and_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_link, "LEAVES_WITHIN_S", 0.01)
    rig = LinkRig()
    assert await rig.link.open(ExternalOpen(1, "s", False)) == Done(1)
    refused = await rig.link.open(ExternalOpen(2, "s", False))
    assert isinstance(refused, Refused) and refused.status == 409
    rig.text(1, type="start", sample_rate=8000)
    rig.pcm(1, b"\1\1")
    assert await rig.link.open(ExternalOpen(3, "s", True)) == Done(3)
    assert [close.socket_id for close in rig.posts(ExternalClose)] == [1]
    assert isinstance(rig.events[-1], AgentAudio) and rig.events[-1].last
    rig.pcm(1, b"\1\1")  # still on its way when it was replaced
    rig.link.lost(ExternalClose("s", 1, 1000, ""))
    assert rig.link.agent.connected
    rig.text(3, type="start", sample_rate=8000)
    rig.pcm(3, b"\2\2")
    assert rig.events[-1] == AgentAudio("s", 2, 8000, b"\2\2", "", False)
    rig.link.tell(AgentInterrupt("s", 3))
    rig.link.tell(AgentSay("s", "Hi."))
    rig.link.tell(UserAudio("s", b"\5\5"))
    outputs = [m.pcm or json.loads(m.text)["type"] for m in rig.posts(ExternalOutput)]
    assert outputs == ["ready", "ready", "interrupted", "say", b"\5\5"]
    await rig.link.close("over")
    assert rig.posts(ExternalClose)[-1] == ExternalClose("s", 3, 1000, "over")
    count = len(rig.posted)
    rig.link.tell(UserAudio("s", b"\5\5"))
    assert len(rig.posted) == count and rig.events[-1].last is False


async def test_who_is_back_before_the_old_socket_has_ended_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(external_link, "LEAVES_WITHIN_S", 60.0)
    rig = LinkRig()
    assert await rig.link.open(ExternalOpen(1, "s", False)) == Done(1)
    back, other = (asyncio.create_task(rig.link.open(ExternalOpen(n, "s", False))) for n in (2, 3))
    await asyncio.sleep(0)
    rig.link.lost(ExternalClose("s", 1, 1000, ""))
    assert await back == Done(2)
    rig.text(2, type="start", sample_rate=8000)
    rig.pcm(2, b"\1\1")
    assert isinstance(rig.events[-1], AgentAudio)
    assert not other.done()
    await rig.link.close("over")
    assert await other == Refused(3, 409, "the session is ending")
    assert [close.socket_id for close in rig.posts(ExternalClose)] == [2]


async def test_a_fast_sender_is_held_back_until_there_is_room() -> None:
    rig = LinkRig()
    await rig.link.open(ExternalOpen(1, "s", False))
    rig.text(1, type="start", sample_rate=8000)
    taken = sum(room.num_bytes for room in rig.posts(ExternalRoom))
    rig.pcm(1, bytes(1000))
    assert rig.posts(ExternalRoom)[-1].num_bytes == 1000
    rig.queued_ms = 60_000
    rig.pcm(1, bytes(3000))
    rig.pcm(1, bytes(2000))
    await asyncio.sleep(0.15)
    assert sum(room.num_bytes for room in rig.posts(ExternalRoom)) == taken + 1000
    assert sum(len(e.pcm) for e in rig.events if isinstance(e, AgentAudio)) == 6000
    rig.queued_ms = 59_000
    await asyncio.sleep(0.15)
    assert sum(room.num_bytes for room in rig.posts(ExternalRoom)) == taken + 6000
    await rig.link.close("over")
