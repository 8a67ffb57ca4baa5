"""In: what happens to groups and sessions. Out: who holds which group. Knows no process, no clock.

A pure state machine. A group is taken by `reserve`, which counts before anything is built, and
every lease carries the group's epoch: whoever acts on an older epoch is turned away, so a zombie
can neither feed nor free a group that has moved on.

    starting -> warming -> ready -> reserved -> live -> resetting -> ready
    any -> unhealthy -> starting (rebuilt)        any -> draining, once its session is over
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

GroupState = Literal[
    "starting", "warming", "ready", "reserved", "live", "resetting", "draining", "unhealthy"
]
GROUP_STATES: tuple[GroupState, ...] = get_args(GroupState)
_HELD: tuple[GroupState, ...] = ("reserved", "live", "resetting")


@dataclass(frozen=True, slots=True)
class Lease:
    group_id: str
    session_id: str
    epoch: int


@dataclass(slots=True)
class _Slot:
    state: GroupState = "starting"
    epoch: int = 0
    lease: Lease | None = None
    expires_s: float = 0.0
    reason: str = ""
    degraded: str = ""


class Pool:
    def __init__(self, reserve_ttl_s: float) -> None:
        self._reserve_ttl_s = reserve_ttl_s
        self._slots: dict[str, _Slot] = {}
        self.draining = False

    # ------------------------------------------------------------ what groups do

    def add(self, group_id: str) -> None:
        """A group that is being started; also a rebuilt one, under its old name."""
        slot = self._slots.setdefault(group_id, _Slot())
        if slot.lease is not None:
            raise ValueError(f"{group_id} is still held by a session")
        slot.state = "starting"
        slot.epoch += 1
        slot.reason = ""
        slot.degraded = ""

    def warming(self, group_id: str) -> None:
        """Everything is loaded; the group now shows that it delivers."""
        slot = self._slots[group_id]
        if slot.state == "starting":
            slot.state = "warming"

    def started(self, group_id: str, degraded: str = "") -> None:
        """degraded: why the group cannot keep its rate; it serves when no better one is free."""
        slot = self._slots[group_id]
        if slot.state in ("starting", "warming"):
            slot.state = "draining" if self.draining else "ready"
            slot.degraded = degraded

    def fail(self, group_id: str, reason: str) -> Lease | None:
        """The group is gone; returns the lease that went with it."""
        slot = self._slots[group_id]
        lease, slot.lease = slot.lease, None
        slot.state = "unhealthy"
        slot.epoch += 1
        slot.reason = reason
        return lease

    def reset_done(self, lease: Lease) -> bool:
        slot = self._current(lease)
        if slot is None or slot.state != "resetting":
            return False
        slot.lease = None
        slot.state = "draining" if self.draining else "ready"
        return True

    # ------------------------------------------------------------ what sessions do

    def reserve(self, session_id: str, now_s: float) -> Lease | None:
        """One ready group for this session, or None; it is taken when this returns."""
        if self.draining:
            return None
        ready = [group_id for group_id, slot in self._slots.items() if slot.state == "ready"]
        if not ready:
            return None
        group_id = min(ready, key=lambda ready_id: self._slots[ready_id].degraded != "")
        slot = self._slots[group_id]
        slot.epoch += 1
        slot.state = "reserved"
        slot.expires_s = now_s + self._reserve_ttl_s
        slot.lease = Lease(group_id, session_id, slot.epoch)
        return slot.lease

    def attach(self, lease: Lease) -> bool:
        """The group holds the session's character now; False when the lease is no longer good."""
        slot = self._current(lease)
        if slot is None or slot.state != "reserved":
            return False
        slot.state = "live"
        return True

    def release(self, lease: Lease) -> bool:
        """The session is over and its group must be cleaned; True for the first caller only."""
        slot = self._current(lease)
        if slot is None or slot.state not in ("reserved", "live"):
            return False
        slot.state = "resetting"
        return True

    def expired(self, now_s: float) -> list[Lease]:
        """Reservations that nothing came of in time; they are to be released."""
        return [
            slot.lease
            for slot in self._slots.values()
            if slot.state == "reserved" and slot.lease is not None and now_s >= slot.expires_s
        ]

    def drain(self) -> None:
        """No reservation from now on; free groups drain at once, held ones after their reset."""
        self.draining = True
        for slot in self._slots.values():
            if slot.state == "ready":
                slot.state = "draining"

    # ------------------------------------------------------------ what can be seen

    def holds(self, lease: Lease) -> bool:
        return self._current(lease) is not None

    def lease_of(self, group_id: str) -> Lease | None:
        return self._slots[group_id].lease

    def state_of(self, group_id: str) -> GroupState:
        return self._slots[group_id].state

    def reasons(self) -> dict[str, str]:
        """Why each unhealthy group is so."""
        return {g: slot.reason for g, slot in self._slots.items() if slot.state == "unhealthy"}

    def degraded(self) -> dict[str, str]:
        """Why each group that is too slow is so; it serves all the same."""
        return {
            g: slot.degraded
            for g, slot in self._slots.items()
            if slot.degraded and slot.state != "unhealthy"
        }

    def counts(self) -> dict[GroupState, int]:
        counts = dict.fromkeys(GROUP_STATES, 0)
        for slot in self._slots.values():
            counts[slot.state] += 1
        return counts

    @property
    def serving(self) -> bool:
        """Whether some group can serve, now or once its session is over."""
        return not self.draining and any(
            slot.state == "ready" or slot.state in _HELD for slot in self._slots.values()
        )

    def _current(self, lease: Lease) -> _Slot | None:
        slot = self._slots.get(lease.group_id)
        return slot if slot is not None and slot.lease == lease else None
