"""In: I420 pictures and 20 ms of PCM. Out: RTP payloads. Knows nothing of the network.

aiortc's own encoders have fixed bitrate bounds (VP8 up to 1.5 Mbit/s), a 30 fps assumption, stereo
voice, and x264's slow default preset; their packetizers are good and are used here.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Final, ParamSpec, TypeVar

import av
import av.video.frame
from aiortc.codecs.h264 import H264Encoder
from aiortc.codecs.vpx import Vp8Encoder

from characters_serve.session.clock import AUDIO_RATE

P = ParamSpec("P")
T = TypeVar("T")

VIDEO_CLOCK: Final = 90_000
_MAX_GOP: Final = 3000  # x264's 250 would force a keyframe every ten seconds
_LARGE_PICTURE: Final = 640 * 480
# libvpx's threads wait for each other by spinning: on two busy cores 1088x704 fell to 2 fps.
_SPARE_CORES: Final = (os.cpu_count() or 1) >= 8


class EncoderThread(ThreadPoolExecutor):
    """The one thread that encodes a peer's pictures, and how long each took."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="video-encoder")
        self._times_ms: list[float] = []

    def submit(
        self, fn: Callable[P, T], /, *arguments: P.args, **named: P.kwargs
    ) -> concurrent.futures.Future[T]:
        def timed() -> T:
            started_s = time.perf_counter()
            result = fn(*arguments, **named)
            self._times_ms.append((time.perf_counter() - started_s) * 1000)
            return result

        return super().submit(timed)

    def take_times_ms(self) -> list[float]:
        """Each time is handed out once."""
        taken, self._times_ms = self._times_ms, []
        return taken


class VideoEncoder:
    """One of VP8 and H.264. Calls are serial, in whichever thread the caller likes."""

    def __init__(self, codec: str, fps: int) -> None:
        self._codec = codec
        self._fps = fps
        self._context: av.VideoCodecContext | None = None
        self._picture_id = 0
        self._pictures = 0
        self.keyframes = 0

    def encode(self, frame: av.VideoFrame, kbps: int, keyframe: bool) -> list[bytes]:
        """The next picture. One that is left out is not made up for: libvpx would take the gap for
        a lower frame rate, and 6 of 50 pictures left out made 492 kbit/s of 300.
        """
        context = self._context
        if context is None or (context.width, context.height) != (frame.width, frame.height):
            context = self._open(frame.width, frame.height, kbps)
        elif context.bit_rate != kbps * 1000:
            if self._codec == "h264":
                context.bit_rate = kbps * 1000  # x264 takes it on the fly
            else:
                context = self._open(frame.width, frame.height, kbps)  # costs a keyframe
        kind = av.video.frame.PictureType
        frame.pict_type = kind.I if keyframe else kind.NONE
        frame.pts = self._pictures
        self._pictures += 1
        frame.time_base = Fraction(1, self._fps)
        packets = context.encode(frame)
        self.keyframes += sum(1 for packet in packets if packet.is_keyframe)
        data = b"".join(bytes(packet) for packet in packets)
        if self._codec == "h264":
            return list(H264Encoder._packetize(H264Encoder._split_bitstream(data)))
        self._picture_id = (self._picture_id + 1) % (1 << 15)
        return list(Vp8Encoder._packetize(data, self._picture_id))

    def _open(self, width: int, height: int, kbps: int) -> av.VideoCodecContext:
        rate = kbps * 1000
        context = av.CodecContext.create("libx264" if self._codec == "h264" else "libvpx", "w")
        context.width, context.height, context.pix_fmt = width, height, "yuv420p"
        context.bit_rate = rate
        context.gop_size = _MAX_GOP
        context.framerate = Fraction(self._fps, 1)
        context.time_base = Fraction(1, self._fps)
        context.thread_count = 2 if width * height > _LARGE_PICTURE and _SPARE_CORES else 1
        if self._codec == "h264":
            context.profile = "Baseline"
            context.options = {
                # superfast at 704x1088: 4.7 ms a frame, 6.4 ms at the 99th percentile
                "preset": "superfast",
                "tune": "zerolatency",
                "level": "31",
                "sc_threshold": "0",  # no keyframe of its own where the picture changes much
                "maxrate": str(rate),
                "bufsize": str(rate // 2),
            }
        else:
            context.qmin, context.qmax = 2, 56
            context.options = {
                "bufsize": str(rate),
                "minrate": str(rate),
                "maxrate": str(rate),
                "cpu-used": "-6",
                "deadline": "realtime",
                "lag-in-frames": "0",
                "max-intra-rate": "300",
                "overshoot-pct": "15",
                "undershoot-pct": "100",
                "static-thresh": "1",
            }
        self._context = context
        return context


class VoiceEncoder:
    """Opus, mono, with in-band error correction: at 10 % loss it conceals a third less."""

    def __init__(self, kbps: int) -> None:
        self._context = av.CodecContext.create("libopus", "w")
        self._context.format = "s16"
        self._context.layout = "mono"
        self._context.sample_rate = AUDIO_RATE
        self._context.time_base = Fraction(1, AUDIO_RATE)
        self._context.bit_rate = kbps * 1000
        self._context.options = {
            "application": "voip",
            "frame_duration": "20",
            "fec": "1",
            "packet_loss": "10",
        }

    def encode(self, frame: av.AudioFrame) -> list[bytes]:
        """One packet for each frame of 960 samples."""
        return [bytes(packet) for packet in self._context.encode(frame)]
