"""In: a picture's packets; packets that are missed. Out: when each leaves, which of those are worth
repeating, and what goes twice.

Pure policy. Knows nothing of the rate's reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

USUAL_PICTURE: Final = 1.5
PACING: Final = 2.5
LONGEST_SPREAD_S: Final = 0.03

RESEND_SHARE: Final = 0.3
RESEND_BURST_BYTES: Final = 24_000
RESEND_AGE_S: Final = 1.0
RESEND_PAUSE_S: Final = 0.02

TWICE_LOSS: Final = 0.01
VOICE_COPY_PACKETS: Final = 2  # 40 ms later: beyond most bursts, within the buffer of client.js


def goes_twice(loss: float) -> bool:
    """Whether repeats of pictures, and the voice, are sent twice, given the share that is lost.

    Of voice nothing is asked for again: its second packet stands in where the first was lost, and
    SRTP drops it elsewhere. Pictures asked for and repeated once, at 10 % loss of both directions,
    stood still for 7 % of the time (of a simulated browser, which asks again every 0.1 s). A second
    repeat goes with the next picture: one at once is lost in the same burst (with 10 % lost in
    bursts of 4, 3.9 % of the time instead of 1.8).
    """
    return loss > TWICE_LOSS


def departures_s(sizes: Sequence[int], kbps: int, fps: int) -> list[float]:
    """When each packet of a picture leaves, from the picture's time on, given their bytes.

    An ordinary picture leaves at once; what a keyframe has beyond its share is spread out, so that
    a link that is nearly full does not queue all of it.
    """
    at_once = USUAL_PICTURE * kbps * 125 / fps
    beyond = max(0.0, sum(sizes) - at_once)
    bytes_per_s = max(PACING * kbps * 125, beyond / LONGEST_SPREAD_S)
    times_s, before = [], 0
    for size in sizes:
        before += size
        times_s.append(max(0.0, before - at_once) / bytes_per_s)
    return times_s


class Resending:
    """Repeats take their share of the rate and no more: on a full link they would be all there is.

    Measured at 1.2 Mbit/s on a link of 1: repeats without a limit were ten times what the link
    carries, and 6 pictures a second came through.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._at_s = float("-inf")

    def allows(self, now_s: float, size: int, kbps: int) -> bool:
        """Whether one packet of that size may be repeated now."""
        bytes_per_s = RESEND_SHARE * kbps * 125
        self._bytes = min(RESEND_BURST_BYTES, self._bytes + (now_s - self._at_s) * bytes_per_s)
        self._at_s = now_s
        if size > self._bytes:
            return False
        self._bytes -= size
        return True

    @staticmethod
    def is_late(now_s: float, sent_s: float) -> bool:
        """A keyframe serves the viewer better than what was sent that long ago."""
        return now_s - sent_s > RESEND_AGE_S

    @staticmethod
    def is_underway(now_s: float, repeated_s: float, rtt_s: float | None) -> bool:
        """Asked for again before the last repeat can have arrived."""
        return now_s - repeated_s < max(RESEND_PAUSE_S, 0.8 * (rtt_s or 0.0))
