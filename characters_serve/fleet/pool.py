"""In: what happens to groups and sessions. Out: who holds which group. Knows no process, no clock.

A pure state machine. A group is taken by `reserve`, which counts before anything is built, and
every lease carries the group's epoch: whoever acts on an older epoch is turned away, so a zombie
can neither feed nor free a group that has moved on. No call looks at all groups: thousands of
them cost a decision no more than one does.

    starting -> warming -> ready -> reserved -> live -> resetting -> ready
    any -> unhealthy -> starting (rebuilt)        any -> draining, once its session is over

Whether a live group still delivers is seen where its chunks arrive (session/live.py); a group
that does not is reported here by `fail`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, get_args

GroupState = Literal[
    "starting", "warming", "ready", "reserved", "live", "resetting", "draining", "unhealthy"
]
GROUP_STATES: tuple[GroupState, ...] = get_args(GroupState)
_HELD: tuple[GroupState, ...] = ("reserved", "live", "resetting")

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# A group that served this long before it died starts again with the shortest back-off.
STEADY_S = 60.0


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
    added_s: float = 0.0
    backoff_s: float = 0.0


class Pool:
    def __init__(self, reserve_ttl_s: float) -> None:
        self._reserve_ttl_s = reserve_ttl_s
        self._slots: dict[str, _Slot] = {}
        self._counts: dict[GroupState, int] = dict.fromkeys(GROUP_STATES, 0)
        # Who has waited longest is first; an OrderedDict also gives its first in constant time.
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._ready_degraded: OrderedDict[str, None] = OrderedDict()
        self._reserved: OrderedDict[str, None] = OrderedDict()
        self.draining = False

    # ------------------------------------------------------------ what groups do

    def add(self, group_id: str, now_s: float) -> None:
        """A group that is being started; also a rebuilt one, under its old name."""
        slot = self._slots.get(group_id)
        if slot is None:
            slot = self._slots[group_id] = _Slot()
            self._counts["starting"] += 1
        if slot.lease is not None:
            raise ValueError(f"{group_id} is still held by a session")
        slot.epoch += 1
        slot.reason = ""
        slot.degraded = ""
        slot.added_s = now_s
        self._enter(group_id, slot, "starting")

    def warming(self, group_id: str) -> None:
        """Everything is loaded; the group now shows that it delivers."""
        slot = self._slots[group_id]
        if slot.state == "starting":
            self._enter(group_id, slot, "warming")

    def started(self, group_id: str, degraded: str = "") -> None:
        """degraded: why the group cannot keep its rate; it serves when no better one is free."""
        slot = self._slots[group_id]
        if slot.state in ("starting", "warming"):
            slot.degraded = degraded
            self._enter(group_id, slot, "draining" if self.draining else "ready")

    def fail(self, group_id: str, reason: str, now_s: float) -> Lease | None:
        """The group is gone; returns the lease that went with it. Only the first word of it counts.

        It may be added again after `backoff_s`, which doubles until the group has served a while.
        """
        slot = self._slots[group_id]
        if slot.state == "unhealthy":
            return None
        lease, slot.lease = slot.lease, None
        steady = now_s - slot.added_s >= STEADY_S
        longer_s = min(2 * slot.backoff_s, LONGEST_BACKOFF_S)
        slot.backoff_s = FIRST_BACKOFF_S if steady else max(FIRST_BACKOFF_S, longer_s)
        slot.epoch += 1
        slot.reason = reason
        self._enter(group_id, slot, "unhealthy")
        return lease

    def reset_done(self, lease: Lease) -> bool:
        slot = self._current(lease)
        if slot is None or slot.state != "resetting":
            return False
        slot.lease = None
        self._enter(lease.group_id, slot, "draining" if self.draining else "ready")
        return True

    # ------------------------------------------------------------ what sessions do

    def reserve(self, session_id: str, now_s: float) -> Lease | None:
        """One ready group for this session, or None; it is taken when this returns."""
        if self.draining or not (ready := self._ready or self._ready_degraded):
            return None
        group_id = next(iter(ready))
        slot = self._slots[group_id]
        slot.epoch += 1
        slot.expires_s = now_s + self._reserve_ttl_s
        slot.lease = Lease(group_id, session_id, slot.epoch)
        self._enter(group_id, slot, "reserved")
        return slot.lease

    def attach(self, lease: Lease) -> bool:
        """The group holds the session's character now; False when the lease is no longer good."""
        slot = self._current(lease)
        if slot is None or slot.state != "reserved":
            return False
        self._enter(lease.group_id, slot, "live")
        return True

    def release(self, lease: Lease) -> bool:
        """The session is over and its group must be cleaned; True for the first caller only."""
        slot = self._current(lease)
        if slot is None or slot.state not in ("reserved", "live"):
            return False
        self._enter(lease.group_id, slot, "resetting")
        return True

    def expired(self, now_s: float) -> list[Lease]:
        """Reservations that nothing came of in time; they are to be released."""
        leases: list[Lease] = []
        for group_id in self._reserved:  # oldest first, and all last equally long
            slot = self._slots[group_id]
            if slot.lease is None or now_s < slot.expires_s:
                break
            leases.append(slot.lease)
        return leases

    def drain(self) -> None:
        """No reservation from now on; free groups drain at once, held ones after their reset."""
        self.draining = True
        for group_id in [*self._ready, *self._ready_degraded]:
            self._enter(group_id, self._slots[group_id], "draining")

    # ------------------------------------------------------------ what can be seen

    def holds(self, lease: Lease) -> bool:
        return self._current(lease) is not None

    def lease_of(self, group_id: str) -> Lease | None:
        return self._slots[group_id].lease

    def state_of(self, group_id: str) -> GroupState:
        return self._slots[group_id].state

    def backoff_s(self, group_id: str) -> float:
        """How long a group that has failed stays away before it is added again."""
        return self._slots[group_id].backoff_s

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
        return dict(self._counts)

    @property
    def serving(self) -> bool:
        """Whether some group can serve, now or once its session is over."""
        return not self.draining and any(self._counts[state] for state in ("ready", *_HELD))

    def _enter(self, group_id: str, slot: _Slot, state: GroupState) -> None:
        self._counts[slot.state] -= 1
        self._counts[state] += 1
        slot.state = state
        for group_ids in (self._ready, self._ready_degraded, self._reserved):
            group_ids.pop(group_id, None)
        if state == "ready":
            (self._ready_degraded if slot.degraded else self._ready)[group_id] = None
        elif state == "reserved":
            self._reserved[group_id] = None

    def _current(self, lease: Lease) -> _Slot | None:
        slot = self._slots.get(lease.group_id)
        return slot if slot is not None and slot.lease == lease else None
