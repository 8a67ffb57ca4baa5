"""Encoders at rates of our own, and a microphone without a jitter buffer."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from aiortc import RTCPeerConnection
from aiortc.rtp import RtpPacket

from characters_serve.session.aiortc_patches import remove_jitter_buffer
from characters_serve.session.encoders import VIDEO_CLOCK, VideoEncoder, VoiceEncoder


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
