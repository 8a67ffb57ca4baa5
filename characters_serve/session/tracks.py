"""In: the playout and the media clock. Out: two aiortc tracks that hand out media on time.

Each recv() waits for its own absolute deadline; what is late by more than it can catch up is
skipped, and the timestamps stay on the clock. Knows nothing of encoders or the network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
from aiortc.mediastreams import MediaStreamTrack

from characters_serve.session.clock import AUDIO_RATE, PACKET_S, PACKET_SAMPLES, MediaClock
from characters_serve.session.encoders import VIDEO_CLOCK
from characters_serve.session.playout import Playout

# Three packets may leave in a burst; what is later than that was a stall of this process.
MAX_BURST_S = 3 * PACKET_S


class Delivery:
    """Both tracks of one peer. They begin together, at one slot, once the playout has its depth."""

    def __init__(
        self,
        clock: MediaClock,
        playout: Playout,
        width: int,
        height: int,
        on_pulled: Callable[[], None],
    ) -> None:
        self.clock = clock
        self.playout = playout
        self.width = width
        self.height = height
        self.on_pulled = on_pulled
        self.frames_sent = 0
        self.slots_skipped = 0
        self.stalls = 0
        self.first_slot = 0
        self.started = asyncio.Event()
        self._asked: set[str] = set()
        self._counted = (0, 0)
        self.video = VideoTrack(self)
        self.audio = AudioTrack(self)

    def try_start(self) -> None:
        """Called whenever a track asks or a chunk arrives."""
        if self.started.is_set() or len(self._asked) < 2 or not self.playout.can_start:
            return
        self.first_slot = self.clock.slot_at(time.monotonic()) + 1
        self.playout.start(self.first_slot)
        self.started.set()

    async def wait_started(self, kind: str) -> None:
        self._asked.add(kind)
        self.try_start()
        await self.started.wait()

    def take_counts(self) -> tuple[int, int]:
        """Frames sent and slots skipped since the last call."""
        counts = self.frames_sent - self._counted[0], self.slots_skipped - self._counted[1]
        self._counted = (self.frames_sent, self.slots_skipped)
        return counts

    def stop(self) -> None:
        self.video.stop()
        self.audio.stop()
        self.playout.pause()


class VideoTrack(MediaStreamTrack):
    kind = "video"

    def __init__(self, delivery: Delivery) -> None:
        super().__init__()
        self._delivery = delivery
        self._slot: int | None = None

    async def recv(self) -> av.VideoFrame:
        delivery, clock = self._delivery, self._delivery.clock
        if self._slot is None:
            await delivery.wait_started("video")
            self._slot = delivery.first_slot
        present = clock.slot_at(time.monotonic())
        if present > self._slot:
            delivery.slots_skipped += present - self._slot
            self._slot = present
        await asyncio.sleep(clock.video_due_s(self._slot) - time.monotonic())
        picture = delivery.playout.picture(self._slot)
        planes = np.frombuffer(picture, np.uint8)
        frame = av.VideoFrame.from_ndarray(
            planes.reshape(delivery.height * 3 // 2, delivery.width), format="yuv420p"
        )
        frame.pts = self._slot * VIDEO_CLOCK // clock.fps
        frame.time_base = Fraction(1, VIDEO_CLOCK)
        self._slot += 1
        delivery.frames_sent += 1
        delivery.on_pulled()
        return frame


class AudioTrack(MediaStreamTrack):
    kind = "audio"

    def __init__(self, delivery: Delivery) -> None:
        super().__init__()
        self._delivery = delivery
        self._packet: int | None = None

    async def recv(self) -> av.AudioFrame:
        delivery, clock = self._delivery, self._delivery.clock
        if self._packet is None:
            await delivery.wait_started("audio")
            self._packet = delivery.first_slot * AUDIO_RATE // clock.fps // PACKET_SAMPLES
        now_s = time.monotonic()
        if now_s - clock.audio_due_s(self._packet) > MAX_BURST_S:
            self._packet = clock.packet_at(now_s)
            delivery.playout.skip_to(clock.slot_at(now_s))
            delivery.stalls += 1
        await asyncio.sleep(clock.audio_due_s(self._packet) - now_s)
        samples = delivery.playout.packet(self._packet)
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate = AUDIO_RATE
        frame.pts = self._packet * PACKET_SAMPLES
        frame.time_base = Fraction(1, AUDIO_RATE)
        self._packet += 1
        delivery.on_pulled()
        return frame
