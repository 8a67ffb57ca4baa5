"""In: connections, heartbeats, speech and the time. Out: the session's state and when it must end.

Pure policy: every call carries its time. Knows nothing of peers, messages or processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

HEARTBEAT_LOST_S: Final = 5.0

State = Literal["ready", "live", "reconnecting"]


@dataclass(frozen=True, slots=True)
class Limits:
    max_duration_s: float
    idle_timeout_s: float
    connect_timeout_s: float
    reconnect_grace_s: float
    ending_notice_s: float


@dataclass(frozen=True, slots=True)
class Changed:
    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class EndingSoon:
    reason: str
    in_ms: float


@dataclass(frozen=True, slots=True)
class Over:
    reason: str


Verdict = Changed | EndingSoon | Over


class Lifecycle:
    """max_duration_s counts from the first media, so that a slow start costs nobody time."""

    def __init__(self, limits: Limits, now_s: float) -> None:
        self.state: State = "ready"
        self._limits = limits
        self._waiting_since_s = now_s
        self._first_media_s: float | None = None
        self._last_activity_s = now_s
        self._last_beat_s: float | None = None
        self._has_peer = False
        self._noticed: set[str] = set()
        self._ends: tuple[float, str] | None = None

    def connected(self, now_s: float) -> list[Verdict]:
        self._has_peer = True
        self._last_beat_s = None
        if self._first_media_s is None:
            self._first_media_s = now_s
            self._last_activity_s = now_s
        return self._enter("live", "")

    def beat(self, now_s: float) -> list[Verdict]:
        """A heartbeat came; a peer that was only silent is live again."""
        self._last_beat_s = now_s
        if self.state == "reconnecting" and self._has_peer:
            return self._enter("live", "")
        return []

    def lost(self, now_s: float, reason: str) -> list[Verdict]:
        self._has_peer = False
        if self.state == "live":
            self._waiting_since_s = now_s
            return self._enter("reconnecting", reason)
        return []

    def activity(self, now_s: float) -> None:
        """Someone spoke at that time, which may have passed."""
        if now_s > self._last_activity_s:
            self._last_activity_s = now_s
            self._noticed.discard("idle timeout")

    def end_within(self, now_s: float, reason: str, left_s: float) -> list[Verdict]:
        """The server leaves: whatever else would end the session later does not matter now."""
        self._ends = (now_s + left_s, reason)
        return [EndingSoon(reason, left_s * 1000)]

    def tick(self, now_s: float) -> list[Verdict]:
        if self._ends is not None and now_s >= self._ends[0]:
            return [Over(self._ends[1])]
        limits, waited_s = self._limits, now_s - self._waiting_since_s
        if self.state == "ready" and waited_s > limits.connect_timeout_s:
            return [Over("no client connected in time")]
        if self.state == "reconnecting" and waited_s > limits.reconnect_grace_s:
            return [Over("the client did not come back")]
        verdicts: list[Verdict] = []
        if (
            self.state == "live"
            and self._last_beat_s is not None
            and now_s - self._last_beat_s > HEARTBEAT_LOST_S
        ):
            self._waiting_since_s = now_s
            verdicts += self._enter("reconnecting", "no heartbeat from the client")
        if self._first_media_s is not None:
            started_s, active_s = self._first_media_s, self._last_activity_s
            verdicts += self._deadline(now_s, "maximum duration", started_s, limits.max_duration_s)
            verdicts += self._deadline(now_s, "idle timeout", active_s, limits.idle_timeout_s)
        return verdicts

    def _deadline(
        self, now_s: float, reason: str, since_s: float, allowed_s: float
    ) -> list[Verdict]:
        left_s = since_s + allowed_s - now_s
        if left_s <= 0:
            return [Over(reason)]
        notice_s = min(self._limits.ending_notice_s, allowed_s / 2)
        if left_s <= notice_s and reason not in self._noticed:
            self._noticed.add(reason)
            return [EndingSoon(reason, left_s * 1000)]
        return []

    def _enter(self, state: State, reason: str) -> list[Verdict]:
        if self.state == state:
            return []
        self.state = state
        return [Changed(state, reason)]
