"""In: one aiortc sender or receiver. Out: the same object, sending on the session's media clock.

The one place that reaches into aiortc, for the asserted version only:
- sender reports carry media time. aiortc's carry the time of sending, so a picture that spends
  60 ms in encoding is played 60 ms off its voice;
- video runs through an encoder of ours at a rate of ours, in a thread of its own, its keyframes
  spread out; keyframe requests are answered once a second at most;
- video packets are numbered for transport-wide feedback, and the client is asked for it;
- 1024 packets are kept for retransmission instead of 128 (0.4 s at 3 Mbit/s), which is rationed;
  what feedback misses is repeated unasked, and where packets are lost repeats and voice go twice;
- the first report leaves with the first packet: a browser aligns picture and voice by the second,
  and its round trip is that of a link that is still empty;
- the microphone has no jitter buffer: aiortc's holds 80 ms, and 280 after the first loss;
- datagrams that aiortc fails at are dropped: an empty one, from anybody, ended the session;
- data comes from addresses that ICE has checked: a stranger's DTLS hello or alert, in time, took
  the place of the client's handshake.
Knows nothing of what is sent.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import aiortc
import aiortc.rtcrtpsender as aiortc_sender
from aiortc import RTCRtpTransceiver
from aiortc import clock as aiortc_clock
from aiortc.codecs import is_rtx
from aiortc.jitterbuffer import MAX_MISORDER, JitterFrame
from aiortc.mediastreams import MediaStreamError
from aiortc.rtcrtpparameters import RTCRtcpFeedback
from aiortc.rtp import (
    RTCP_PSFB_APP,
    RTCP_PSFB_FIR,
    RTCP_PSFB_PLI,
    RTCP_RTPFB_NACK,
    RtcpByePacket,
    RtcpPsfbPacket,
    RtcpRrPacket,
    RtcpRtpfbPacket,
    RtcpSdesPacket,
    RtcpSenderInfo,
    RtcpSourceInfo,
    RtcpSrPacket,
    RtpPacket,
    unpack_remb_fci,
    wrap_rtx,
)
from aiortc.sdp import SessionDescription
from aiortc.utils import random32, uint16_add, uint32_add

from characters_serve.session import arrivals
from characters_serve.session.clock import AUDIO_RATE, MediaClock
from characters_serve.session.encoders import VIDEO_CLOCK, VideoEncoder, VoiceEncoder
from characters_serve.session.pacing import VOICE_COPY_PACKETS, Resending, departures_s, goes_twice
from characters_serve.session.rate import NUMBERS, RateControl

log = logging.getLogger(__name__)

SUPPORTED_AIORTC: Final = "1.16.0"
HISTORY_PACKETS: Final = 1024
STUN_COOKIE: Final = bytes.fromhex("2112a442")
TIMER_S: Final = 0.001  # no timer of the event loop is finer
KEYFRAME_INTERVAL_S: Final = 1.0
REPORTS_KEPT: Final = 16
FIRST_REPORT_S: Final = 0.02
LONGEST_PROBE_PACKETS: Final = 64  # after one picture

# A line for each packet of the client's that is no Opus would fill a disk.
logging.getLogger("aiortc.rtcrtpreceiver").setLevel(logging.ERROR)

if aiortc.__version__ != SUPPORTED_AIORTC:
    raise ImportError(f"aiortc {aiortc.__version__} is not the supported {SUPPORTED_AIORTC}")


@dataclass(slots=True)
class _Sent:
    packet: RtpPacket
    sent_s: float
    repeated_s: float = float("-inf")
    arrived: bool = False


@dataclass(slots=True)
class _Copy:
    """One time that a packet was sent; number: that of the transport-wide feedback."""

    number: int
    sent: _Sent
    sent_s: float


class MediaSender(aiortc.RTCRtpSender):
    """An `RTCRtpSender` whose time is its track's: made by `adopt_sender`, never constructed."""

    media_clock: MediaClock
    rate: RateControl
    voice_kbps: int
    fps: int
    executor: ThreadPoolExecutor
    _history: dict[int, _Sent]
    _copies: dict[int, _Copy]
    _resending: Resending
    _again: list[_Sent]
    _last_pts: int | None
    _reports_s: OrderedDict[int, float]
    _keyframe_wanted: bool
    _keyframe_s: float
    _reported_on: bool
    _timestamp_origin: int
    _sequence_number: int

    def private(self, name: str) -> Any:
        return getattr(self, f"_RTCRtpSender__{name}")

    def set_private(self, name: str, value: Any) -> None:
        setattr(self, f"_RTCRtpSender__{name}", value)

    async def _run_rtp(self, codec: Any) -> None:
        self.private("rtp_started").set()
        try:
            if self.kind == "video":
                await self._run_video(codec)
            else:
                await self._run_voice(codec)
        except (asyncio.CancelledError, ConnectionError, MediaStreamError):
            pass
        except Exception:
            # stop() waits for rtp_exited, so whatever happens here must end below.
            log.exception("%s sender failed", self.kind)
        track = self.private("track")
        if track is not None:
            track.stop()
            self.set_private("track", None)
        self.private("rtp_exited").set()

    async def _run_video(self, codec: Any) -> None:
        loop = asyncio.get_running_loop()
        encoder = VideoEncoder("h264" if codec.name == "H264" else "vp8", self.fps)
        while True:
            frame = await self.private("track").recv()
            pts = frame.pts
            now_s = time.monotonic()
            if self.rate.pauses(now_s):
                continue
            keyframe = self._keyframe_wanted and now_s - self._keyframe_s >= KEYFRAME_INTERVAL_S
            keyframes = encoder.keyframes
            payloads = await loop.run_in_executor(
                self.executor, encoder.encode, frame, self.rate.kbps, keyframe
            )
            if encoder.keyframes > keyframes:
                self._keyframe_wanted = False
                self._keyframe_s = now_s
            await self._send_payloads(codec, payloads, pts)
            await self._probe()

    async def _run_voice(self, codec: Any) -> None:
        if codec.name != "opus":
            raise ValueError(f"unexpected audio codec {codec.name}")
        encoder = VoiceEncoder(self.voice_kbps)
        while True:
            frame = await self.private("track").recv()
            # 0.3 ms: a thread would cost as much.
            await self._send_payloads(codec, encoder.encode(frame), frame.pts)
            if goes_twice(self.rate.loss):
                earlier = uint16_add(self._sequence_number, -1 - VOICE_COPY_PACKETS)
                if (sent := self._find(earlier)) is not None:
                    await self._repeat(sent)

    async def _send_payloads(self, codec: Any, payloads: list[bytes], pts: int) -> None:
        timestamp = uint32_add(self._timestamp_origin, pts & 0xFFFFFFFF)
        waits_s = [0.0] * len(payloads)
        if self.kind == "video":
            waits_s = departures_s([len(each) for each in payloads], self.rate.kbps, self.fps)
        began_s = time.monotonic()
        for index, (payload, wait_s) in enumerate(zip(payloads, waits_s, strict=True)):
            early_s = began_s + wait_s - time.monotonic()
            if early_s > TIMER_S:
                await asyncio.sleep(early_s)
            packet = RtpPacket(
                payload_type=codec.payloadType,
                sequence_number=self._sequence_number,
                timestamp=timestamp,
            )
            packet.ssrc = self._ssrc
            packet.payload = payload
            packet.marker = int(index == len(payloads) - 1)
            packet.extensions.abs_send_time = (aiortc_clock.current_ntp_time() >> 14) & 0x00FFFFFF
            packet.extensions.mid = self.private("mid")
            sent = _Sent(packet, time.monotonic())
            self._history[packet.sequence_number % HISTORY_PACKETS] = sent
            await self._send_packet(packet, sent)
            self._sequence_number = uint16_add(self._sequence_number, 1)
            self.set_private("packet_count", self.private("packet_count") + 1)
            self.set_private("octet_count", self.private("octet_count") + len(payload))
        if payloads:
            self._last_pts = pts
        again, self._again = self._again, []
        for sent in again:
            if not sent.arrived:
                await self._repeat(sent)

    def _find(self, sequence_number: int) -> _Sent | None:
        sent = self._history.get(sequence_number % HISTORY_PACKETS)
        known = sent is not None and sent.packet.sequence_number == sequence_number
        return sent if known else None

    async def _send_packet(self, packet: RtpPacket, sent: _Sent) -> None:
        """The first packet, or one that repeats it."""
        if self.kind == "video":
            now_s = time.monotonic()
            number = self.rate.sent(now_s, len(packet.payload))
            packet.extensions.transport_sequence_number = number
            self._copies[number % HISTORY_PACKETS] = _Copy(number, sent, now_s)
        await self._transmit(packet)

    async def _transmit(self, packet: RtpPacket) -> None:
        await self.transport._send_rtp(packet.serialize(self.private("rtp_header_extensions_map")))

    async def _probe(self) -> None:
        """Repeats the last packets, as many as the rate control asks for."""
        if self.private("rtx_payload_type") is None:
            return  # they would arrive nowhere
        newest = uint16_add(self._sequence_number, -1)
        for back in range(LONGEST_PROBE_PACKETS):
            sent = self._find(uint16_add(newest, -back))
            if sent is None or not self.rate.probes(time.monotonic(), len(sent.packet.payload)):
                return
            await self._repeat(sent)

    async def arrived(self, news: arrivals.Arrivals) -> None:
        """Repeats what is missing: a client asks again after 0.1 s only, and that is lost, too."""
        self.rate.arrived(time.monotonic(), news.first, news.times_s)
        missing = []
        for offset, arrived_s in enumerate(news.times_s):
            number = (news.first + offset) % NUMBERS
            copy = self._copies.get(number % HISTORY_PACKETS)
            if copy is None or copy.number != number:
                continue
            if arrived_s is None:
                missing.append(copy)
            else:
                copy.sent.arrived = True
        for copy in missing:
            if not copy.sent.arrived and copy.sent.repeated_s <= copy.sent_s:
                await self._resend(copy.sent)

    def want_keyframe(self) -> None:
        self._keyframe_wanted = True

    def sender_report(self) -> RtcpSrPacket | None:
        """Where the last frame sent lies on the media clock; None before the first."""
        if self._last_pts is None:
            return None
        rate = VIDEO_CLOCK if self.kind == "video" else AUDIO_RATE
        return RtcpSrPacket(
            ssrc=self._ssrc,
            sender_info=RtcpSenderInfo(
                ntp_timestamp=self.media_clock.ntp(float(Fraction(self._last_pts, rate))),
                rtp_timestamp=uint32_add(self._timestamp_origin, self._last_pts & 0xFFFFFFFF),
                packet_count=self.private("packet_count") & 0xFFFFFFFF,
                octet_count=self.private("octet_count") & 0xFFFFFFFF,
            ),
        )

    async def _run_rtcp(self) -> None:
        self.private("rtcp_started").set()
        try:
            while True:
                first = not self._reports_s
                await asyncio.sleep(FIRST_REPORT_S if first else 0.5 + random.random())
                report = self.sender_report()
                if report is None:
                    continue
                ntp = report.sender_info.ntp_timestamp
                self._reports_s[(ntp >> 16) & 0xFFFFFFFF] = time.monotonic()
                if len(self._reports_s) > REPORTS_KEPT:
                    self._reports_s.popitem(last=False)
                cname = self.private("cname").encode()
                names = RtcpSdesPacket(chunks=[RtcpSourceInfo(ssrc=self._ssrc, items=[(1, cname)])])
                await self._send_rtcp([report, names])
        except asyncio.CancelledError:
            pass
        await self._send_rtcp([RtcpByePacket(sources=[self._ssrc])])
        self.private("rtcp_exited").set()

    async def _handle_rtcp_packet(self, packet: Any) -> None:
        now_s = time.monotonic()
        match packet:
            case RtcpRrPacket() | RtcpSrPacket():
                for report in packet.reports:
                    if report.ssrc == self._ssrc:
                        rtt_s = None
                        # On a full link the answer to a report comes after the next report.
                        if report.lsr in self._reports_s and report.dlsr:
                            sent_s = self._reports_s[report.lsr]
                            rtt_s = max(0.0, now_s - sent_s - report.dlsr / 65536)
                        if self.kind == "video":
                            lost, highest = report.packets_lost, report.highest_sequence
                            self.rate.report(now_s, lost, highest, rtt_s)
                            if not self._reported_on:
                                self._reported_on = True
                                self.want_keyframe()  # the first may have come too early for it
            case RtcpRtpfbPacket(fmt=fmt) if fmt == RTCP_RTPFB_NACK:
                for sequence_number in packet.lost:
                    if (sent := self._find(sequence_number)) is not None:
                        await self._resend(sent)
                    elif now_s - self._keyframe_s > KEYFRAME_INTERVAL_S:
                        self.want_keyframe()  # a blackout was longer than the history
            case RtcpPsfbPacket(fmt=fmt) if fmt in (RTCP_PSFB_FIR, RTCP_PSFB_PLI):
                self.want_keyframe()
            case RtcpPsfbPacket(fmt=fmt) if fmt == RTCP_PSFB_APP:
                try:
                    bits_per_s, ssrcs = unpack_remb_fci(packet.fci)
                except ValueError:
                    return
                if self._ssrc in ssrcs and self.kind == "video":
                    self.rate.remb(bits_per_s)

    async def _resend(self, sent: _Sent) -> None:
        now_s, size = time.monotonic(), len(sent.packet.payload)
        if self.kind == "video":
            if sent.sent_s < self._keyframe_s:
                return  # the keyframe does without it
            if self._resending.is_underway(now_s, sent.repeated_s, self.rate.rtt_s):
                return
            if self._resending.is_late(now_s, sent.sent_s) or not self._resending.allows(
                now_s, size, self.rate.kbps
            ):
                self.want_keyframe()
                return
        sent.repeated_s = now_s
        await self._repeat(sent)
        if goes_twice(self.rate.loss) and self._resending.allows(now_s, size, self.rate.kbps):
            self._again.append(sent)

    async def _repeat(self, sent: _Sent) -> None:
        payload_type = self.private("rtx_payload_type")
        if payload_type is None:
            # To the byte: SRTP encrypts what has the same sequence number with the same nonce.
            await self._transmit(sent.packet)
            return
        rtx_sequence_number = self.private("rtx_sequence_number")
        repeat = wrap_rtx(
            sent.packet,
            payload_type=payload_type,
            sequence_number=rtx_sequence_number,
            ssrc=self._rtx_ssrc,
        )
        self.set_private("rtx_sequence_number", uint16_add(rtx_sequence_number, 1))
        await self._send_packet(repeat, sent)


def adopt_sender(
    sender: aiortc.RTCRtpSender,
    *,
    media_clock: MediaClock,
    rate: RateControl,
    voice_kbps: int,
    executor: ThreadPoolExecutor,
) -> MediaSender:
    """Turns a sender that has not started into one on the media clock."""
    sender.__class__ = MediaSender
    assert isinstance(sender, MediaSender)
    sender.media_clock = media_clock
    sender.rate = rate
    sender.voice_kbps = voice_kbps
    sender.fps = media_clock.fps
    sender.executor = executor
    sender._history = {}
    sender._copies = {}
    sender._last_pts = None
    sender._resending = Resending()
    sender._again = []
    sender._reports_s = OrderedDict()
    sender._keyframe_wanted = False
    sender._keyframe_s = float("-inf")
    sender._reported_on = False
    sender._timestamp_origin = random32()
    sender._sequence_number = aiortc_sender.random_sequence_number()
    return sender


def ask_for_arrivals(transceiver: RTCRtpTransceiver, offer: str) -> None:
    """Between an offer and its answer: the client tells when each video packet arrives, if it can.

    It sends no REMB then.
    """
    media = next(media for media in SessionDescription.parse(offer).media if media.kind == "video")
    extensions = [each for each in media.rtp.headerExtensions if each.uri == arrivals.EXTENSION]
    feedback = RTCRtcpFeedback(type=arrivals.FEEDBACK)
    if not extensions or not any(feedback in codec.rtcpFeedback for codec in media.rtp.codecs):
        return
    transceiver._headerExtensions.append(extensions[0])
    for codec in transceiver._codecs:
        if not is_rtx(codec):
            codec.rtcpFeedback.append(feedback)


def hear_arrivals(video: aiortc.RTCRtpSender) -> None:
    """For an adopted one whose transport is not hardened yet. aiortc would read a NACK."""
    assert isinstance(video, MediaSender)
    transport: Any = video.transport
    handle = transport._handle_rtcp_data

    async def handle_others(data: bytes) -> None:
        others, news = arrivals.split(data)
        for each in news:
            await video.arrived(each)
        if others:
            await handle(others)

    transport._handle_rtcp_data = handle_others


class NoJitterBuffer:
    """For a voice, each packet of which is a whole frame: it need not wait for the next one.

    A packet that another has overtaken is dropped, as if lost.
    """

    def __init__(self) -> None:
        self._latest: int | None = None

    def add(self, packet: RtpPacket) -> tuple[bool, JitterFrame | None]:
        """Whether a keyframe is needed, and the packet's frame."""
        number = packet.sequence_number
        late = self._latest is not None and uint16_add(self._latest, -number) < MAX_MISORDER
        if late or not packet.payload:
            return False, None
        self._latest = number
        data: bytes = packet._data  # type: ignore[attr-defined]
        return False, JitterFrame(data, packet.timestamp)


def remove_jitter_buffer(receiver: aiortc.RTCRtpReceiver) -> None:
    """Of a receiver of sound."""
    buffer = NoJitterBuffer()
    setattr(receiver, "_RTCRtpReceiver__jitter_buffer", buffer)  # noqa: B010 (a mangled name)


def harden_transport(transport: Any) -> None:
    """An `RTCDtlsTransport` that no single datagram can end. Called before it starts."""
    ice = transport.transport
    receive = ice._recv

    async def receive_something() -> bytes:
        while not (data := bytes(await receive())):
            pass  # aiortc reads the first byte of what is not there
        return data

    ice._recv = receive_something
    for name in ("_handle_rtp_data", "_handle_rtcp_data"):
        setattr(transport, name, _dropping(getattr(transport, name)))


def close_to_strangers(transport: Any) -> None:
    """For an `RTCDtlsTransport` whose candidates are gathered. STUN has passwords of its own."""
    connection = transport.transport._connection

    def is_checked(address: tuple[str, int]) -> bool:
        nominated = list(connection._nominated.values())
        pairs = nominated + [p for p in connection._check_list if p.state is p.State.SUCCEEDED]
        return any(pair.remote_addr == address for pair in pairs)

    for protocol in connection._protocols:
        protocol.datagram_received = _admitting(protocol.datagram_received, is_checked)


def _admitting(
    receive: Callable[[bytes, tuple[Any, ...]], None],
    is_checked: Callable[[tuple[str, int]], bool],
) -> Callable[[bytes, tuple[Any, ...]], None]:
    def receive_checked(data: bytes, address: tuple[Any, ...]) -> None:
        is_stun = data[4:8] == STUN_COOKIE and data[0] < 4
        if is_stun or is_checked((address[0], address[1])):
            receive(data, address)

    return receive_checked


def _dropping(handle: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """An error in handling a packet would end the whole transport; it is logged once."""
    failed = False

    async def handle_or_drop(*arguments: Any, **named: Any) -> None:
        nonlocal failed
        try:
            await handle(*arguments, **named)
        except ConnectionError:
            raise
        except Exception:
            if not failed:
                log.exception("a packet was dropped")
            failed = True

    return handle_or_drop
