"""Encoders at rates of our own, what a sender repeats, and a microphone without a jitter buffer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from aiortc import RTCPeerConnection, RTCRtpCodecParameters
from aiortc.mediastreams import MediaStreamError, VideoStreamTrack
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

from characters_serve.session import arrivals, rtcp_clock
from characters_serve.session.clock import MediaClock
from characters_serve.session.encoders import VIDEO_CLOCK, VideoEncoder, VoiceEncoder
from characters_serve.session.rate import RateBounds, RateControl, _Probe
from characters_serve.session.rtcp_clock import (
    adopt_sender,
    hear_arrivals,
    remove_jitter_buffer,
)
from tests.unit.session_rig import HandClock
from tests.unit.test_session_arrivals import feedback


def picture(slot: int) -> av.VideoFrame:
    rng = np.random.default_rng(slot)
    planes = rng.integers(100, 156, (128 * 3 // 2, 192), np.uint8)
    frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
    frame.pts = slot * 3750
    frame.time_base = Fraction(1, VIDEO_CLOCK)
    return frame


@pytest.mark.parametrize("codec", ["vp8", "h264"])
def test_bitrates_are_kept_and_change_when_asked(codec: str) -> None:
    encoder = VideoEncoder(codec, 24)
    sizes: list[int] = []
    for slot in range(144):
        payloads = encoder.encode(picture(slot), 2400 if slot < 72 else 600, False)
        assert payloads and all(len(payload) <= 1300 for payload in payloads)
        sizes.append(sum(map(len, payloads)))
    high = sum(sizes[24:72]) * 8 / 2 / 1000
    low = sum(sizes[96:144]) * 8 / 2 / 1000
    assert high == pytest.approx(2400, rel=0.35) and low == pytest.approx(600, rel=0.35)
    # x264 changes its rate on the fly; libvpx has to begin anew.
    assert encoder.keyframes == (2 if codec == "vp8" else 1)


@pytest.mark.parametrize("codec", ["vp8", "h264"])
def test_keyframes_come_only_when_asked(codec: str) -> None:
    encoder = VideoEncoder(codec, 24)
    for slot in range(400):
        encoder.encode(picture(slot % 7 + slot), 1200, slot == 200)
    assert encoder.keyframes == 2


def test_pictures_that_are_left_out_are_not_made_up_for() -> None:
    encoder = VideoEncoder("vp8", 24)
    shown = [slot for slot in range(240) if slot % 40 >= 6]
    sizes = [sum(map(len, encoder.encode(picture(slot), 600, False))) for slot in shown]
    # Each second's worth of pictures that are shown.
    seconds = [8 * sum(sizes[first : first + 24]) / 1000 for first in range(24, 168, 24)]
    assert max(seconds) < 1.2 * 600


def test_one_packet_for_each_20_ms() -> None:
    encoder = VoiceEncoder(48)
    rng = np.random.default_rng(0)
    sizes = []
    for index in range(100):
        samples = (rng.normal(size=(1, 960)) * 3000).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 48_000
        frame.pts = index * 960 + (480_000 if index > 50 else 0)  # the clock may jump
        frame.time_base = Fraction(1, 48_000)
        packets = encoder.encode(frame)
        assert len(packets) == 1
        sizes.append(len(packets[0]))
    assert sum(sizes) * 8 / 2 / 1000 == pytest.approx(48, rel=0.2)


@pytest.mark.parametrize(
    ("arrive", "dropped"),
    [
        (list(range(40)), set()),
        ([0, 1, 2, 4, 5, 6], set()),  # 3 is lost
        ([65_534, 65_535, 0, 1], set()),
        ([0, 1, 3, 2, 4, 5, 5], {3, 6}),  # 2 was overtaken, and 5 came twice
        ([9, 10, 40_000, 40_001, 5, 6], set()),  # the browser began anew, twice
    ],
)
async def test_no_packet_of_the_microphone_waits_for_another(
    arrive: list[int], dropped: set[int]
) -> None:
    pc = RTCPeerConnection()
    receiver: Any = pc.addTransceiver("audio").receiver
    remove_jitter_buffer(receiver)
    buffer = receiver._RTCRtpReceiver__jitter_buffer
    for place, number in enumerate(arrive):
        packet = RtpPacket(sequence_number=number, timestamp=960 * place, payload=b"x")
        packet._data = b"x"  # type: ignore[attr-defined]
        _, frame = buffer.add(packet)
        assert (frame is None) == (place in dropped)
        assert frame is None or frame.timestamp == 960 * place
    await pc.close()


class VideoSender:
    """A video sender of a peer connection that is connected to nothing; keeps what it sends."""

    def __init__(self) -> None:
        self.pc = RTCPeerConnection()
        self.rate = RateControl(RateBounds(1200, 300, 3000))
        self.sender: Any = adopt_sender(
            self.pc.addTrack(VideoStreamTrack()),
            media_clock=MediaClock(0.0, 0.0, 24),
            rate=self.rate,
            voice_kbps=48,
            executor=ThreadPoolExecutor(1),
        )
        self.sent: list[bytes] = []

        async def send(data: bytes) -> None:
            self.sent.append(data)

        transport: Any = self.sender.transport
        transport._send_rtp = send

    async def send(self, count: int) -> None:
        codec = RTCRtpCodecParameters(mimeType="video/VP8", clockRate=90_000, payloadType=97)
        await self.sender._send_payloads(codec, [bytes(1200)] * count, 0)

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
    monkeypatch.setattr(rtcp_clock, "time", clock)
    return clock


async def test_repeats_are_few_and_what_is_refused_becomes_a_keyframe(clock: HandClock) -> None:
    video = VideoSender()
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
    video = VideoSender()
    first = video.sender._sequence_number
    await video.send(10)
    clock.now_s += 0.1
    video.sender._keyframe_s = clock.now_s
    await video.send(10)
    assert await video.asked_for([(first + 3) % 65_536]) == 0
    assert not video.sender._keyframe_wanted
    assert await video.asked_for([(first + 13) % 65_536]) == 1
    await video.pc.close()


async def test_a_probe_repeats_the_newest_packets_each_with_a_number_of_its_own(
    clock: HandClock,
) -> None:
    video = VideoSender()
    extension = RTCRtpHeaderExtensionParameters(id=5, uri=arrivals.EXTENSION)
    extensions: HeaderExtensionsMap = video.sender.private("rtp_header_extensions_map")
    extensions.configure(RTCRtpParameters(headerExtensions=[extension]))
    video.sender.set_private("rtx_payload_type", 98)
    await video.send(5)
    await video.sender._probe()
    assert len(video.sent) == 5  # none was asked for
    video.rate._probe = _Probe(kbps=960, began_s=clock.now_s)
    clock.now_s += 0.031  # 3720 bytes
    await video.sender._probe()
    packets = [RtpPacket.parse(data, extensions) for data in video.sent]
    assert [packet.extensions.transport_sequence_number for packet in packets] == list(range(8))
    newest = [packet.sequence_number for packet in packets[4:1:-1]]
    assert [int.from_bytes(packet.payload[:2]) for packet in packets[5:]] == newest
    assert {packet.payload_type for packet in packets[5:]} == {98}
    await video.pc.close()


async def test_feedback_reaches_the_rate_and_the_rest_of_its_datagram_the_sender(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = VideoSender()
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
    video = VideoSender()
    pauses = iter([False, True, True, False])
    video.rate.pauses = lambda now_s: next(pauses)  # type: ignore[method-assign]
    pictures = iter([picture(slot) for slot in range(4)])

    class Track:
        def stop(self) -> None: ...

        async def recv(self) -> av.VideoFrame:
            try:
                return next(pictures)
            except StopIteration:
                raise MediaStreamError from None

    video.sender.set_private("track", Track())
    codec = RTCRtpCodecParameters(mimeType="video/VP8", clockRate=90_000, payloadType=97)
    with pytest.raises(MediaStreamError):
        await video.sender._run_video(codec)
    times = {RtpPacket.parse(data).timestamp for data in video.sent}
    assert len(times) == 2 and max(times) - min(times) in (3 * 3750, 2**32 - 3 * 3750)
    await video.pc.close()


async def test_a_report_that_comes_after_the_next_one_was_sent_has_a_round_trip(
    clock: HandClock,
) -> None:
    video = VideoSender()
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
    monkeypatch.setattr(rtcp_clock, "random", SimpleNamespace(random=lambda: 60.0))  # the others
    video = VideoSender()
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
