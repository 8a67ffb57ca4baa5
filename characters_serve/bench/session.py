"""Measures a running server's delivery: viewers without a screen join, watch, and report.

    python -m characters_serve.bench.session --url http://127.0.0.1:8080 --viewers 2 --seconds 30

Each viewer is a WebRTC client of its own session, so the server needs as many groups. With
`engine.kind=pattern` the pictures are read as well: repeated and skipped frames, and the distance
from flash to beep. Where the server is on this machine, so are its processor time and memory. The
last line of the output is one JSON object. Viewers decode what they receive: leave them a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.contrib.media import MediaPlayer
from aiortc.mediastreams import AudioStreamTrack, MediaStreamError
from aiortc.rtp import RtcpSrPacket, RtpPacket

from characters_serve.bench.cores import usage
from characters_serve.bench.origin import origin
from characters_serve.engine.pattern import read_counter, read_flash

Kind = Literal["audio", "video"]

CLOCK_RATES: Final[dict[Kind, int]] = {"audio": 48_000, "video": 90_000}
FREEZE_S: Final = 0.15
PAIR_S: Final = 0.5
ONSET_LEVEL: Final = 1000
ONSET_QUIET_S: Final = 0.3
ONSET_STEP: Final = 48  # samples: 1 ms
READY_S: Final = 120.0
JOIN_S: Final = 30.0
PING_S: Final = 1.0
NTP_UNIX_OFFSET_S: Final = 2_208_988_800


@dataclass(frozen=True, slots=True)
class Packet:
    """One RTP packet as it arrived; repeats are retransmissions, in a stream of their own."""

    at_s: float
    sequence: int
    timestamp: int
    size: int
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """A sender report: this RTP timestamp is due at this Unix time."""

    unix_s: float
    timestamp: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded picture; counter is None where it shows no legible pattern."""

    at_s: float
    timestamp: int
    counter: int | None
    flash: bool


@dataclass(slots=True)
class Reception:
    """All that one viewer has seen; monotonic times."""

    offered_s: float
    packets: dict[Kind, list[Packet]] = field(default_factory=lambda: {"audio": [], "video": []})
    reports: dict[Kind, list[Report]] = field(default_factory=lambda: {"audio": [], "video": []})
    pictures: list[Picture] = field(default_factory=list)
    onsets: list[int] = field(default_factory=list)
    pings_ms: list[float] = field(default_factory=list)
    turns_ms: list[float] = field(default_factory=list)


# ---------------------------------------------------------------- what it means


def summary(seen: Reception) -> dict[str, Any]:
    """One viewer's figures. Raises ValueError where nothing was shown."""
    if len(seen.pictures) < 2:
        raise ValueError("the viewer was shown no pictures")
    shown_s = [picture.at_s for picture in seen.pictures]
    watched_s = shown_s[-1] - shown_s[0]
    gaps_s = [after - before for before, after in pairwise(shown_s)]
    limit_s = statistics.mean(gaps_s) + FREEZE_S
    frozen_s = [gap for gap in gaps_s if gap >= limit_s]
    lost = {kind: lost_packets(seen.packets[kind]) for kind in CLOCK_RATES}
    return {
        "join_s": round(shown_s[0] - seen.offered_s, 3),
        "watched_s": round(watched_s, 2),
        "fps": round((len(shown_s) - 1) / watched_s, 2),
        "longest_gap_ms": round(max(gaps_s) * 1000, 1),
        "freezes": len(frozen_s),
        "frozen_share": round(sum(frozen_s) / watched_s, 4),
        "video_kbps": kbps(seen.packets["video"]),
        "audio_kbps": kbps(seen.packets["audio"]),
        "video_lost_share": round(lost["video"][0], 4),
        "audio_lost_share": round(lost["audio"][0], 4),
        "audio_longest_loss_ms": 20 * lost["audio"][1],
        "av_lead_ms": rounded(av_lead_ms(seen)),
        "rtt_ms": rounded(statistics.median(seen.pings_ms) if seen.pings_ms else None),
        "turn_latency_ms": seen.turns_ms,
        **pattern_figures(seen),
    }


def lost_packets(packets: Sequence[Packet]) -> tuple[float, int]:
    """The share that never came, and the longest run of them; retransmissions fill no gap here."""
    numbers = unwrapped([packet.sequence for packet in packets if not packet.repeats], 16)
    if not numbers:
        return 0.0, 0
    came = sorted(set(numbers))
    expected = came[-1] - came[0] + 1
    longest = max((after - before - 1 for before, after in pairwise(came)), default=0)
    return 1 - len(came) / expected, longest


def unwrapped(values: Sequence[int], bits: int) -> list[int]:
    """Counters of that many bits on one line, each the nearest to the one before it."""
    half, whole = 1 << (bits - 1), 1 << bits
    line: list[int] = []
    for value in values:
        if not line:
            line.append(value)
            continue
        line.append(line[-1] + (value - line[-1] + half) % whole - half)
    return line


def kbps(packets: Sequence[Packet]) -> float | None:
    if len(packets) < 2 or packets[-1].at_s <= packets[0].at_s:
        return None
    bits = 8 * sum(packet.size for packet in packets)
    return round(bits / (packets[-1].at_s - packets[0].at_s) / 1000, 1)


def due_unix_s(seen: Reception, kind: Kind, timestamp: int) -> float | None:
    """When the sender's clock says that this timestamp is due; None before a sender report."""
    if not seen.reports[kind]:
        return None
    report = seen.reports[kind][-1]
    _, distance = unwrapped([report.timestamp, timestamp], 32)
    return report.unix_s + (distance - report.timestamp) / CLOCK_RATES[kind]


def av_lead_ms(seen: Reception) -> float | None:
    """How much sooner the voice arrives than the picture due at the same time.

    A player evens it out by holding the voice back, which is what the sender reports are for.
    """
    late_s: dict[Kind, float] = {}
    for kind in CLOCK_RATES:
        firsts = {packet.timestamp: packet.at_s for packet in reversed(seen.packets[kind])}
        found = [
            at_s - due_s
            for timestamp, at_s in firsts.items()
            if (due_s := due_unix_s(seen, kind, timestamp)) is not None
        ]
        if not found:
            return None
        late_s[kind] = statistics.median(found)
    return (late_s["video"] - late_s["audio"]) * 1000


def pattern_figures(seen: Reception) -> dict[str, Any]:
    """Empty unless most pictures show the test pattern."""
    legible = [picture for picture in seen.pictures if picture.counter is not None]
    if len(legible) < len(seen.pictures) / 2:
        return {}
    numbers = unwrapped([picture.counter or 0 for picture in legible], 16)
    steps = [after - before for before, after in pairwise(numbers)]
    offsets = content_offsets_ms(seen)
    return {
        "illegible": len(seen.pictures) - len(legible),
        "repeated": steps.count(0),
        "skipped": sum(step - 1 for step in steps if step > 1),
        "backward": sum(step < 0 for step in steps),
        "content_av_ms": rounded(statistics.median(offsets) if offsets else None),
        "content_av_worst_ms": rounded(max(offsets, key=abs) if offsets else None),
    }


def content_offsets_ms(seen: Reception) -> list[float]:
    """From each flash to its beep by the sender's clock; positive: the sound is due later."""
    beeps_s = [due_unix_s(seen, "audio", onset) for onset in seen.onsets]
    offsets = []
    for before, picture in pairwise(seen.pictures):
        if before.flash or not picture.flash or before.counter is None or picture.counter is None:
            continue
        if (picture.counter - before.counter) % (1 << 16) != 1:
            continue  # the flash may have begun in a picture that was not seen
        flash_s = due_unix_s(seen, "video", picture.timestamp)
        if flash_s is None:
            continue
        found = [beep_s - flash_s for beep_s in beeps_s if beep_s is not None]
        nearest_s = min(found, key=abs, default=PAIR_S)
        if abs(nearest_s) < PAIR_S:
            offsets.append(nearest_s * 1000)
    return offsets


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


class OnsetFinder:
    """The timestamps at which sound begins after at least 0.3 s of quiet."""

    def __init__(self) -> None:
        self._quiet_since: int | None = None

    def find(self, samples: np.ndarray[Any, np.dtype[np.int16]], timestamp: int) -> list[int]:
        onsets = []
        for first in range(0, len(samples), ONSET_STEP):
            at = timestamp + first
            if self._quiet_since is None:
                self._quiet_since = at
            if np.abs(samples[first : first + ONSET_STEP].astype(np.int32)).max() < ONSET_LEVEL:
                continue
            if at - self._quiet_since >= ONSET_QUIET_S * CLOCK_RATES["audio"]:
                onsets.append(at % (1 << 32))
            self._quiet_since = at + ONSET_STEP
        return onsets


# ---------------------------------------------------------------- one viewer


class Viewer:
    """One session of its own, from its creation to its end."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        character: str = "mira",
        microphone: str | None = None,
        rewrite_answer: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        self.seen = Reception(offered_s=0.0)
        self.shown = asyncio.Event()
        self._http = http
        self._character = character
        self._microphone = microphone
        self._rewrite_answer = rewrite_answer
        self._tasks: list[asyncio.Task[None]] = []
        self._pings: deque[tuple[int, float]] = deque(maxlen=32)
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._path = ""
        self._headers: dict[str, str] = {}

    async def join(self) -> None:
        """Returns once the first picture is shown."""
        created = await self._http.post("/v1/sessions", json={"character": self._character})
        created.raise_for_status()
        session = created.json()
        self._path = f"/v1/sessions/{session['id']}"
        self._headers = {"Authorization": f"Bearer {session['client_secret']['value']}"}
        await self._ready(session["status"])
        pc = self._pc
        microphone = MediaPlayer(self._microphone).audio if self._microphone else None
        pc.addTrack(microphone or AudioStreamTrack())
        pc.addTransceiver("video", direction="recvonly")
        for transceiver in pc.getTransceivers():
            self._tap(transceiver.receiver, "audio" if transceiver.kind == "audio" else "video")
        pc.on("track", self._watch)
        events = pc.createDataChannel("events")
        events.on("message", self._event)
        probe = pc.createDataChannel("probe", ordered=False, maxRetransmits=0)
        probe.on("message", self._pong)
        self._start(self._ping(probe))
        await pc.setLocalDescription(await pc.createOffer())
        self.seen.offered_s = time.monotonic()
        answered = await self._http.post(
            f"{self._path}/webrtc",
            content=pc.localDescription.sdp,
            headers={"Content-Type": "application/sdp", **self._headers},
        )
        answered.raise_for_status()
        self._headers = {"Authorization": f"Bearer {answered.headers['Resume-Token']}"}
        sdp = answered.text
        if self._rewrite_answer:
            sdp = await self._rewrite_answer(sdp)
        await pc.setRemoteDescription(RTCSessionDescription(sdp, "answer"))
        await asyncio.wait_for(self.shown.wait(), JOIN_S)

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pc.close()
        if self._path:
            await self._http.delete(self._path, headers=self._headers)

    async def _ready(self, status: str) -> None:
        async with asyncio.timeout(READY_S):
            while status != "ready":
                if status not in ("queued", "starting"):
                    raise RuntimeError(f"the session is {status}")
                await asyncio.sleep(0.1)
                told = await self._http.get(self._path, headers=self._headers)
                status = told.raise_for_status().json()["status"]

    def _start(self, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _tap(self, receiver: Any, kind: Kind) -> None:
        """Notes packets and sender reports on their way into aiortc's receiver."""
        take_rtp, take_rtcp = receiver._handle_rtp_packet, receiver._handle_rtcp_packet
        packets, reports = self.seen.packets[kind], self.seen.reports[kind]
        own: list[int] = []

        async def rtp(packet: RtpPacket, arrival_time_ms: int) -> None:
            now_s = time.monotonic()
            if not own:
                own.append(packet.ssrc)  # a retransmission is never the first
            size, repeats = len(packet.payload), packet.ssrc != own[0]
            packets.append(Packet(now_s, packet.sequence_number, packet.timestamp, size, repeats))
            await take_rtp(packet, arrival_time_ms=arrival_time_ms)

        async def rtcp(packet: Any) -> None:
            if isinstance(packet, RtcpSrPacket):
                info = packet.sender_info
                unix_s = info.ntp_timestamp / (1 << 32) - NTP_UNIX_OFFSET_S
                reports.append(Report(unix_s, info.rtp_timestamp))
            await take_rtcp(packet)

        receiver._handle_rtp_packet = rtp
        receiver._handle_rtcp_packet = rtcp

    def _watch(self, track: Any) -> None:
        receiver = next(t.receiver for t in self._pc.getTransceivers() if t.kind == track.kind)
        work = self._see if track.kind == "video" else self._hear
        self._start(work(track, receiver))

    async def _see(self, track: Any, receiver: Any) -> None:
        with contextlib.suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                now_s = time.monotonic()
                plane = frame.planes[0]
                rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
                luma = rows[: frame.height, : frame.width]
                timestamp = (frame.pts + self._origin(receiver)) % (1 << 32)
                flash = read_flash(luma)
                self.seen.pictures.append(Picture(now_s, timestamp, read_counter(luma), flash))
                self.shown.set()

    async def _hear(self, track: Any, receiver: Any) -> None:
        finder = OnsetFinder()
        with contextlib.suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                channels = len(frame.layout.channels)
                samples = frame.to_ndarray().reshape(-1)[::channels]
                timestamp = frame.pts + self._origin(receiver)
                self.seen.onsets += finder.find(samples, timestamp)

    @staticmethod
    def _origin(receiver: Any) -> int:
        """aiortc counts pts from the first timestamp that it decoded."""
        return int(receiver._RTCRtpReceiver__timestamp_mapper._origin)

    def _event(self, text: str) -> None:
        data = json.loads(text).get("data") or {}
        if "turn_latency_ms" in data:
            self.seen.turns_ms.append(data["turn_latency_ms"])

    async def _ping(self, probe: Any) -> None:
        number = 0
        while True:
            if probe.readyState == "open":
                number += 1
                self._pings.append((number, time.monotonic()))
                probe.send(json.dumps({"t": "ping", "id": number, "c": 0.0}))
            await asyncio.sleep(PING_S)

    def _pong(self, text: str) -> None:
        sent_s = dict(self._pings).get(json.loads(text)["id"])
        if sent_s is not None:
            self.seen.pings_ms.append((time.monotonic() - sent_s) * 1000)


# ---------------------------------------------------------------- the server's cost


def gateway_at(url: str) -> psutil.Process | None:
    """The process that listens there, where that is on this machine."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN
        if listens and getattr(connection.laddr, "port", 0) == port and connection.pid:
            return psutil.Process(connection.pid)
    return None


async def measure(
    url: str, viewers: int, seconds: float, character: str, microphone: str | None
) -> dict[str, Any]:
    server = gateway_at(url)
    key = os.environ.get("CHARACTERS_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        watching = [
            Viewer(http, character=character, microphone=microphone) for _ in range(viewers)
        ]
        try:
            await asyncio.gather(*(viewer.join() for viewer in watching))
            before, began_s = usage(server) if server else None, time.monotonic()
            await asyncio.sleep(seconds)
            elapsed_s = time.monotonic() - began_s
            after = usage(server) if server else None
        finally:
            await asyncio.gather(*(viewer.leave() for viewer in watching))
    result: dict[str, Any] = {"viewers": [summary(viewer.seen) for viewer in watching]}
    if before and after:
        cores = (after.cpu_s - before.cpu_s) / elapsed_s
        result["server_cores_per_session"] = round(cores / viewers, 3)
        result["server_rss_mb_per_session"] = round(after.resident / 1e6 / viewers, 1)
    return result


def circumstances() -> dict[str, Any]:
    """What every result carries: on which machine, how busy, and of which code."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": round(os.getloadavg()[0], 2),
        **origin(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the delivery of a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--viewers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--character", default="mira")
    parser.add_argument("--microphone", metavar="FILE", help="sound that each viewer speaks, once")
    options = parser.parse_args()
    try:
        result = asyncio.run(
            measure(
                options.url,
                options.viewers,
                options.seconds,
                options.character,
                options.microphone,
            )
        )
    except httpx.HTTPStatusError as error:
        sys.stderr.write(f"{error}\n{error.response.text[:500]}\n")
        return 1
    except (httpx.HTTPError, RuntimeError, TimeoutError, ValueError) as error:
        sys.stderr.write(f"no measurement: {error or type(error).__name__}\n")
        return 1
    sys.stdout.write(json.dumps({**result, **circumstances()}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
