"""What a sender on the media clock sends once, again, twice and not at all."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from aiortc import RTCPeerConnection, RTCRtpCodecParameters
from aiortc.mediastreams import (
    AudioStreamTrack,
    MediaStreamError,
    MediaStreamTrack,
    VideoStreamTrack,
)
from aiortc.rtcrtpparameters import RTCRtpHeaderExtensionParameters, RTCRtpParameters
from aiortc.rtp import (
    RTCP_RTPFB_NACK,
    HeaderExtensionsMap,
    RtcpPacket,
    RtcpReceiverInfo,
    RtcpRrPacket,
    RtcpRtpfbPacket,
    RtcpSrPacket,
    RtpPacket,
)

from characters_serve.session import aiortc_patches, arrivals
from characters_serve.session.aiortc_patches import HISTORY_PACKETS, adopt_sender, hear_arrivals
from characters_serve.session.clock import AUDIO_RATE, PACKET_SAMPLES, MediaClock
from characters_serve.session.rate import RateBounds, RateControl, _Probe
from tests.relay import Conditions, Link
from tests.unit.session_rig import HandClock
from tests.unit.test_session_arrivals import feedback
from tests.unit.test_session_encoders import picture

VP8 = RTCRtpCodecParameters(mimeType="video/VP8", clockRate=90_000, payloadType=97)
OPUS = RTCRtpCodecParameters(mimeType="audio/opus", clockRate=48_000, channels=2, payloadType=96)
RTX = 98
FPS = 24


class Recorded:
    """Hands out what it was given, then ends."""

    def __init__(self, frames: list[Any]) -> None:
        self._frames = iter(frames)

    def stop(self) -> None: ...

    async def recv(self) -> Any:
        try:
            return next(self._frames)
        except StopIteration:
            raise MediaStreamError from None


class Sender:
    """A sender of a peer connection that is connected to nothing; keeps what it sends."""

    def __init__(self, track: MediaStreamTrack | None = None, *, repeats: bool = True) -> None:
        self.pc = RTCPeerConnection()
        self.rate = RateControl(RateBounds(1200, 300, 3000))
        self.sender: Any = adopt_sender(
            self.pc.addTrack(track or VideoStreamTrack()),
            media_clock=MediaClock(0.0, 0.0, 24),
            rate=self.rate,
            voice_kbps=48,
            executor=ThreadPoolExecutor(1),
        )
        self.sent: list[bytes] = []
        self.extensions: HeaderExtensionsMap = self.sender.private("rtp_header_extensions_map")
        extension = RTCRtpHeaderExtensionParameters(id=5, uri=arrivals.EXTENSION)
        self.extensions.configure(RTCRtpParameters(headerExtensions=[extension]))
        if repeats and self.sender.kind == "video":
            self.sender.set_private("rtx_payload_type", RTX)

        async def send(data: bytes) -> None:
            self.sent.append(data)

        transport: Any = self.sender.transport
        transport._send_rtp = send

    async def send(self, count: int) -> None:
        await self.sender._send_payloads(VP8, [bytes(1200)] * count, 0)

    def parsed(self) -> list[RtpPacket]:
        return [RtpPacket.parse(data, self.extensions) for data in self.sent]

    async def asked_for(self, numbers: list[int]) -> int:
        """How many packets are repeated."""
        before = len(self.sent)
        nack = RtcpRtpfbPacket(
            fmt=RTCP_RTPFB_NACK, ssrc=1, media_ssrc=self.sender._ssrc, lost=numbers
        )
        await self.sender._handle_rtcp_packet(nack)
        return len(self.sent) - before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """The senders' time."""
    clock = HandClock(1000.0)
    monkeypatch.setattr(aiortc_patches, "time", clock)
    return clock


async def test_repeats_are_few_and_what_is_refused_becomes_a_keyframe(clock: HandClock) -> None:
    video = Sender()
    first = video.sender._sequence_number
    numbers = [(first + n) % 65_536 for n in range(100)]
    await video.send(100)
    assert await video.asked_for(numbers[:5]) == 5
    assert await video.asked_for(numbers[:5]) == 0  # they are on their way
    assert not video.sender._keyframe_wanted
    assert await video.asked_for(numbers[5:]) == 15
    assert video.sender._keyframe_wanted
    video.sender._keyframe_wanted = False
    clock.now_s += 1.5
    assert await video.asked_for([numbers[99]]) == 0
    assert video.sender._keyframe_wanted
    await video.pc.close()


async def test_what_was_lost_before_a_keyframe_is_not_repeated(clock: HandClock) -> None:
    video = Sender()
    first = video.sender._sequence_number
    await video.send(10)
    clock.now_s += 0.1
    video.sender._keyframe_s = clock.now_s
    await video.send(10)
    assert await video.asked_for([(first + 3) % 65_536]) == 0
    assert not video.sender._keyframe_wanted
    assert await video.asked_for([(first + 13) % 65_536]) == 1
    await video.pc.close()


@pytest.mark.parametrize("dark_s", [3, 10, 40])
async def test_after_a_blackout_the_next_picture_is_a_keyframe(
    clock: HandClock, dark_s: int
) -> None:
    """Whether or not what is asked for is kept still, no keyframe request has to come."""
    video = Sender()
    first = video.sender._sequence_number
    video.sender._keyframe_s = clock.now_s
    for _ in range(dark_s * FPS):
        clock.now_s += 1 / FPS
        await video.send(8)
    assert (dark_s * FPS * 8 > HISTORY_PACKETS) == (dark_s > 3)
    await video.asked_for([(first + n) % 65_536 for n in range(200)])
    assert video.sender._keyframe_wanted
    await video.pc.close()


async def test_what_is_gone_and_asked_for_just_after_a_keyframe_costs_no_other(
    clock: HandClock,
) -> None:
    video = Sender()
    first = video.sender._sequence_number
    for _ in range(HISTORY_PACKETS + 1):
        await video.send(1)
    video.sender._keyframe_s = clock.now_s
    clock.now_s += 0.3
    assert await video.asked_for([first]) == 0
    assert not video.sender._keyframe_wanted
    await video.pc.close()


async def test_what_feedback_misses_is_repeated_once_though_nobody_asks(clock: HandClock) -> None:
    video = Sender()
    await video.send(4)
    first = video.parsed()[0].sequence_number

    async def repeated(number: int, *arrived: bool) -> list[int]:
        clock.now_s += 0.1
        before = len(video.sent)
        news = arrivals.Arrivals(number, [clock.now_s if each else None for each in arrived])
        await video.sender.arrived(news)
        return [int.from_bytes(each.payload[:2]) - first for each in video.parsed()[before:]]

    assert await repeated(0, True, False, False, True) == [1, 2]  # as numbers 4 and 5
    assert await repeated(0, True, False, False, True) == []
    assert await repeated(4, True, False) == [2]
    assert await repeated(6, True) == []
    await video.pc.close()


async def test_where_packets_are_lost_a_repeat_goes_again_with_the_next_picture(
    clock: HandClock,
) -> None:
    """Not beside the first: a burst takes both. Nor once the first is known to have arrived."""
    video = Sender()
    video.rate._loss = 0.05
    await video.send(4)
    first = video.parsed()[0].sequence_number
    missed = [(first + n) % 65_536 for n in (1, 2)]
    assert await video.asked_for(missed) == 2
    await video.sender.arrived(arrivals.Arrivals(4, [clock.now_s, None]))
    clock.now_s += 1 / FPS
    await video.send(1)
    repeats = [p for p in video.parsed() if p.payload_type == RTX]
    assert [int.from_bytes(p.payload[:2]) for p in repeats] == [*missed, missed[1]]
    await video.send(1)
    assert len(video.sent) == 4 + 2 + 1 + 1 + 1
    await video.pc.close()


class LossyLink:
    """A sender, a link that loses in both directions, and a viewer that asks as Chromium does.

    Which asks for a gap at once and every 0.1 s again, where it knows no round trip, tells arrivals
    every 0.1 s, and shows pictures in order, 0.1 s after their time or as soon as they are whole.
    """

    DELAY_S, AGAIN_S, BUFFER_S, PACKETS = 0.02, 0.1, 0.1, 3

    def __init__(self, clock: HandClock, loss: float, burst: float) -> None:
        self.video = Sender()
        self.video.sender.transport._send_rtp = self._leaves
        self._clock = clock
        self._down, self._up = Link(1), Link(2)
        self._down.conditions = self._up.conditions = Conditions(loss=loss, burst=burst)
        self._began_s = clock.now_s
        self._highest = self._first = self.video.sender._sequence_number
        self._arrived_s: dict[int, float] = {}
        self._asked_s: dict[int, float] = {}
        self._copies: list[bool] = []
        self._told = self._pictures = self._count = 0
        self._events: list[tuple[float, int, Callable[[], Awaitable[object]]]] = []
        for act in (self._picture, self._voices, self._ask_again, self._tell):
            self._in(0.0, act)

    async def frozen_share(self, seconds: float) -> float:
        """As browsers count: a picture that is shown for 0.15 s too long."""
        while self._events[0][0] < self._began_s + seconds:
            self._clock.now_s, _, act = heapq.heappop(self._events)
            await act()
        shown_s = [0.0]
        for number in range(self._pictures - 3 * FPS):
            first = self._first + number * self.PACKETS
            whole_s = max(self._arrived_s[first + n] for n in range(self.PACKETS))
            due_s = self._began_s + number / FPS + self.BUFFER_S
            shown_s.append(max(due_s, whole_s, shown_s[-1]))
        waits_s = np.diff(shown_s[1:])
        return float(waits_s[waits_s > 1 / FPS + 0.15].sum() / seconds)

    def _in(self, wait_s: float, act: Callable[[], Awaitable[object]]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._clock.now_s + wait_s, self._count, act))

    def _passes(self, link: Link) -> bool:
        return bool(link.carry(self._clock.now_s, 1200))

    async def _voices(self) -> None:
        """The character's, which goes twice, and the viewer's: a burst is of packets."""
        self._in(0.02, self._voices)
        for link in (self._down, self._down, self._up):
            self._passes(link)

    async def _picture(self) -> None:
        self._in(1 / FPS, self._picture)
        self._pictures += 1
        await self.video.send(self.PACKETS)

    async def _leaves(self, data: bytes) -> None:
        packet = RtpPacket.parse(data, self.video.extensions)
        number = packet.sequence_number
        if packet.payload_type == RTX:
            number = int.from_bytes(packet.payload[:2])
        # Sequence numbers are of 16 bits, and a minute has fewer.
        number = self._first + (number - self._first) % 65_536
        self._copies.append(False)
        if self._passes(self._down):
            self._in(self.DELAY_S, partial(self._arrives, number, len(self._copies) - 1))

    async def _arrives(self, number: int, copy: int) -> None:
        self._copies[copy] = True
        self._arrived_s.setdefault(number, self._clock.now_s)
        self._asked_s.pop(number, None)
        gap = [n for n in range(self._highest, number) if n not in self._arrived_s]
        self._highest = max(self._highest, number)
        self._ask([n for n in gap if n not in self._asked_s])

    def _ask(self, numbers: list[int]) -> None:
        self._asked_s.update(dict.fromkeys(numbers, self._clock.now_s))
        if numbers and self._passes(self._up):
            lost = [number % 65_536 for number in numbers]
            self._in(self.DELAY_S, partial(self.video.asked_for, lost))

    async def _ask_again(self) -> None:
        self._in(0.02, self._ask_again)
        now_s = self._clock.now_s
        self._ask([n for n, at_s in self._asked_s.items() if now_s - at_s >= self.AGAIN_S])

    async def _tell(self) -> None:
        """Up to the last that arrived."""
        self._in(0.1, self._tell)
        end = max((n + 1 for n, arrived in enumerate(self._copies) if arrived), default=0)
        times_s = [self._clock.now_s if each else None for each in self._copies[self._told : end]]
        news = arrivals.Arrivals(self._told % 65_536, times_s)
        self._told = max(end, self._told)
        if times_s and self._passes(self._up):
            self._in(self.DELAY_S, partial(self.video.sender.arrived, news))


@pytest.mark.parametrize(
    ("loss", "burst", "frozen_share"), [(0.05, 1, 0.005), (0.1, 1, 0.005), (0.1, 4, 0.025)]
)
async def test_loss_in_both_directions_freezes_few_pictures(
    clock: HandClock, loss: float, burst: float, frozen_share: float
) -> None:
    link = LossyLink(clock, loss, burst)
    assert await link.frozen_share(120) < frozen_share
    await link.video.pc.close()


async def test_repeats_reach_a_client_without_retransmission_streams_to_the_byte(
    clock: HandClock,
) -> None:
    """SRTP uses the same nonce for the same sequence number."""
    video = Sender(repeats=False)
    await video.send(3)
    assert await video.asked_for([video.parsed()[1].sequence_number]) == 1
    assert video.sent[3] == video.sent[1]
    video.rate._probe = _Probe(kbps=960, began_s=clock.now_s)
    clock.now_s += 0.031
    await video.sender._probe()
    assert len(video.sent) == 4  # such a client drops what it has
    await video.pc.close()


@pytest.mark.parametrize("loss", [0.0, 0.05])
async def test_where_packets_are_lost_the_voice_goes_twice(loss: float) -> None:
    voice = Sender(AudioStreamTrack())
    voice.rate._loss = loss
    frames = []
    for number in range(6):
        frame = av.AudioFrame.from_ndarray(
            np.full((1, PACKET_SAMPLES), 1000, np.int16), format="s16", layout="mono"
        )
        frame.sample_rate, frame.pts = AUDIO_RATE, number * PACKET_SAMPLES
        frame.time_base = Fraction(1, AUDIO_RATE)
        frames.append(frame)
    voice.sender.set_private("track", Recorded(frames))
    with pytest.raises(MediaStreamError):
        await voice.sender._run_voice(OPUS)
    numbers = [
        packet.sequence_number - voice.parsed()[0].sequence_number for packet in voice.parsed()
    ]
    assert numbers == ([0, 1, 2, 0, 3, 1, 4, 2, 5, 3] if loss else [0, 1, 2, 3, 4, 5])
    assert len(set(voice.sent)) == 6  # to the byte, so that SRTP drops the second
    await voice.pc.close()


async def test_a_probe_repeats_the_newest_packets_each_with_a_number_of_its_own(
    clock: HandClock,
) -> None:
    video = Sender()
    await video.send(5)
    await video.sender._probe()
    assert len(video.sent) == 5  # none was asked for
    video.rate._probe = _Probe(kbps=960, began_s=clock.now_s)
    clock.now_s += 0.031  # 3720 bytes
    await video.sender._probe()
    packets = video.parsed()
    assert [packet.extensions.transport_sequence_number for packet in packets] == list(range(8))
    newest = [packet.sequence_number for packet in packets[4:1:-1]]
    assert [int.from_bytes(packet.payload[:2]) for packet in packets[5:]] == newest
    assert {packet.payload_type for packet in packets[5:]} == {RTX}
    await video.pc.close()


async def test_feedback_reaches_the_rate_and_the_rest_of_its_datagram_the_sender(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = Sender()
    heard: list[tuple[int, list[float | None]]] = []
    monkeypatch.setattr(
        video.rate, "arrived", lambda now_s, first, times_s: heard.append((first, times_s))
    )
    rest: list[bytes] = []

    async def handle(data: bytes) -> None:
        rest.append(data)

    transport: Any = video.sender.transport
    transport._handle_rtcp_data = handle
    hear_arrivals(video.sender)
    report = bytes(RtcpRrPacket(ssrc=1, reports=[]))
    news = feedback(7, [4, None], reference=1, vectors=False)
    await transport._handle_rtcp_data(report + news)
    await transport._handle_rtcp_data(news)
    assert heard == [(7, [0.065, None])] * 2
    assert rest == [report]
    await video.pc.close()


async def test_a_picture_is_left_out_while_the_queue_drains(clock: HandClock) -> None:
    video = Sender()
    pauses = iter([False, True, True, False])
    video.rate.pauses = lambda now_s: next(pauses)  # type: ignore[method-assign]
    video.sender.set_private("track", Recorded([picture(slot) for slot in range(4)]))
    with pytest.raises(MediaStreamError):
        await video.sender._run_video(VP8)
    times = {RtpPacket.parse(data).timestamp for data in video.sent}
    assert len(times) == 2 and max(times) - min(times) in (3 * 3750, 2**32 - 3 * 3750)
    await video.pc.close()


async def test_a_report_that_comes_after_the_next_one_was_sent_has_a_round_trip(
    clock: HandClock,
) -> None:
    video = Sender()
    video.sender._reports_s.update({1000: clock.now_s - 1.5, 2000: clock.now_s - 0.5})
    about = RtcpReceiverInfo(
        ssrc=video.sender._ssrc,
        fraction_lost=0,
        packets_lost=0,
        highest_sequence=10,
        jitter=0,
        lsr=1000,
        dlsr=65536,
    )
    await video.sender._handle_rtcp_packet(RtcpRrPacket(ssrc=1, reports=[about]))
    assert video.rate.rtt_s == pytest.approx(0.5)
    await video.pc.close()


async def test_the_first_report_leaves_with_the_first_packet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later_reports = SimpleNamespace(random=lambda: 60.0)
    monkeypatch.setattr(aiortc_patches, "random", later_reports)
    video = Sender()
    video.sender.set_private("cname", "a name")
    reporting = asyncio.create_task(video.sender._run_rtcp())
    await asyncio.sleep(0.05)
    assert video.sent == []  # there is nothing to report on
    await video.send(1)
    async with asyncio.timeout(15):
        while len(video.sent) < 2:
            await asyncio.sleep(0.005)
    assert isinstance(RtcpPacket.parse(video.sent[1])[0], RtcpSrPacket)
    reporting.cancel()
    await asyncio.gather(reporting, return_exceptions=True)
    await video.pc.close()
