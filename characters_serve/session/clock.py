"""In: a monotonic reading. Out: video slots, audio packets and NTP time on one media time line.

A session has one clock and both tracks read it: video slot n is due at t0 + n / fps, audio packet
k at t0 + k x 20 ms. Wall time is read once, for the sender reports. Knows nothing of content.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

AUDIO_RATE: Final = 48_000
PACKET_SAMPLES: Final = 960
PACKET_S: Final = PACKET_SAMPLES / AUDIO_RATE

# Seconds from 1900 (NTP) to 1970 (Unix).
_NTP_UNIX_OFFSET_S: Final = 2_208_988_800


@dataclass(frozen=True, slots=True)
class MediaClock:
    """t0_s: monotonic seconds of media time 0; wall0_s: Unix seconds of the same instant."""

    t0_s: float
    wall0_s: float
    fps: int

    def video_due_s(self, slot: int) -> float:
        return self.t0_s + slot / self.fps

    def audio_due_s(self, packet: int) -> float:
        return self.t0_s + packet * PACKET_S

    def slot_at(self, now_s: float) -> int:
        """The slot whose picture is on screen at now_s."""
        return math.floor((now_s - self.t0_s) * self.fps + 1e-6)

    def packet_at(self, now_s: float) -> int:
        return math.floor((now_s - self.t0_s) / PACKET_S + 1e-6)

    def media_ms(self, now_s: float) -> float:
        return (now_s - self.t0_s) * 1000.0

    def ntp(self, media_s: float) -> int:
        """64-bit NTP time of an instant of the media time line."""
        return round((self.wall0_s + media_s + _NTP_UNIX_OFFSET_S) * (1 << 32))
