"""In: sessions that found no free group, and the time. Out: whose turn it is, and who must leave.

First come, first served, within bounds. Pure: every call carries its time. Knows no group; a place
is kept by asking after it, so that a client which is gone holds up nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# A waiting client is told to ask again after this long; one that was silent for the longer is gone.
POLL_S = 2.0
SILENCE_S = 10.0

WAITED_TOO_LONG = "no character became free while it waited in the queue"
VANISHED = "nobody asked after its place in the queue"


@dataclass(slots=True)
class _Place:
    joined_s: float
    heard_s: float


class WaitingQueue:
    """size 0 is no queue at all: nobody may join."""

    def __init__(self, size: int, patience_s: float) -> None:
        self.size = size
        self._patience_s = patience_s
        self._places: OrderedDict[str, _Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def has_room(self) -> bool:
        return len(self._places) < self.size

    def join(self, session_id: str, now_s: float) -> bool:
        """False when the queue is full."""
        if session_id in self._places:
            raise ValueError(f"{session_id} is in the queue already")
        if not self.has_room:
            return False
        self._places[session_id] = _Place(now_s, now_s)
        return True

    def heard(self, session_id: str, now_s: float) -> None:
        """The client has asked after its place."""
        if session_id in self._places:
            self._places[session_id].heard_s = now_s

    def leave(self, session_id: str) -> bool:
        """Its turn has come, or it gave up; True when it was in the queue."""
        return self._places.pop(session_id, None) is not None

    def first(self) -> str | None:
        return next(iter(self._places), None)

    def position(self, session_id: str) -> int | None:
        """1 is the next; None is not in the queue."""
        return next((n for n, waiting in enumerate(self._places, 1) if waiting == session_id), None)

    def overdue(self, now_s: float) -> list[tuple[str, str]]:
        """(session, why) of those who must leave now."""
        late: list[tuple[str, str]] = []
        for session_id, place in self._places.items():
            if now_s - place.joined_s >= self._patience_s:
                late.append((session_id, WAITED_TOO_LONG))
            elif now_s - place.heard_s >= SILENCE_S:
                late.append((session_id, VANISHED))
        return late
