"""The pool: every lease is held once, and nothing stale can act on a group."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from characters_serve.fleet.pool import GROUP_STATES, Lease, Pool

TTL_S = 30.0


def ready_pool(groups: int = 1) -> Pool:
    pool = Pool(TTL_S)
    for index in range(groups):
        pool.add(f"g{index}")
        pool.started(f"g{index}")
    return pool


def take(pool: Pool, session_id: str = "a", now_s: float = 0.0) -> Lease:
    lease = pool.reserve(session_id, now_s)
    assert lease is not None
    return lease


def test_a_reservation_counts_before_anything_is_built() -> None:
    pool = ready_pool()
    assert pool.reserve("a", 0.0) is not None
    assert [pool.reserve(f"other{i}", 0.0) for i in range(7)] == [None] * 7


def test_a_group_serves_one_session_after_another() -> None:
    pool = ready_pool()
    first = take(pool)
    assert pool.attach(first) and pool.release(first)
    assert pool.reserve("b", 0.0) is None, "not before it is clean"
    assert pool.reset_done(first)
    second = take(pool, "b")
    assert second.epoch > first.epoch


def test_an_old_lease_can_do_nothing() -> None:
    pool = ready_pool()
    old = take(pool)
    pool.release(old)
    pool.reset_done(old)
    new = take(pool, "b")
    assert not pool.holds(old)
    assert not pool.attach(old)
    assert not pool.release(old)
    assert not pool.reset_done(old)
    assert pool.holds(new)


def test_only_the_first_release_counts() -> None:
    pool = ready_pool()
    lease = take(pool)
    assert [pool.release(lease), pool.release(lease)] == [True, False]


def test_an_unused_reservation_expires_and_a_used_one_does_not() -> None:
    pool = ready_pool(2)
    unused, used = take(pool, "a", 0.0), take(pool, "b", 0.0)
    pool.attach(used)
    assert pool.expired(TTL_S - 0.1) == []
    assert pool.expired(TTL_S) == [unused]


def test_a_dead_group_returns_its_lease_and_comes_back() -> None:
    pool = ready_pool()
    lease = take(pool)
    pool.attach(lease)
    assert pool.fail("g0", "killed") == lease
    assert pool.reasons() == {"g0": "killed"} and not pool.serving
    assert not pool.release(lease) and not pool.reset_done(lease)
    pool.add("g0")
    assert pool.reserve("b", 0.0) is None, "not before it has started"
    pool.started("g0")
    assert take(pool, "b").epoch > lease.epoch


def test_draining_lets_held_groups_finish_and_frees_none() -> None:
    pool = ready_pool(2)
    lease = take(pool)
    pool.drain()
    assert pool.reserve("b", 0.0) is None
    assert pool.attach(lease) and pool.release(lease) and pool.reset_done(lease)
    assert pool.counts()["draining"] == 2 and not pool.serving


def test_a_group_that_starts_while_draining_stays_out() -> None:
    pool = Pool(TTL_S)
    pool.add("g0")
    pool.drain()
    pool.started("g0")
    assert pool.reserve("a", 0.0) is None


def test_a_held_group_cannot_be_added_again() -> None:
    pool = ready_pool()
    take(pool)
    with pytest.raises(ValueError, match="still held"):
        pool.add("g0")


def test_a_group_warms_up_before_it_is_ready() -> None:
    pool = Pool(TTL_S)
    pool.add("g0")
    pool.warming("g0")
    assert pool.counts()["warming"] == 1 and not pool.serving
    assert pool.reserve("a", 0.0) is None
    pool.started("g0")
    pool.warming("g0")
    assert pool.state_of("g0") == "ready", "late news changes nothing"


def test_a_slow_group_is_taken_last_and_forgets_its_slowness_when_rebuilt() -> None:
    pool = Pool(TTL_S)
    for group_id, degraded in (("g0", "a chunk takes 200 ms"), ("g1", "")):
        pool.add(group_id)
        pool.started(group_id, degraded)
    assert take(pool, "a").group_id == "g1"
    assert pool.degraded() == {"g0": "a chunk takes 200 ms"}
    slow = take(pool, "b")
    assert slow.group_id == "g0"
    pool.fail("g0", "died")
    assert pool.degraded() == {}
    pool.add("g0")
    pool.started("g0")
    assert pool.degraded() == {}


def test_a_hundred_thousand_events_lose_no_group_and_give_none_twice() -> None:
    """Eight groups, sessions and faults in any order, stale leases included."""
    chance = random.Random(2026)
    pool, groups = ready_pool(8), [f"g{index}" for index in range(8)]
    held: dict[str, Lease] = {}
    old: deque[Lease] = deque(maxlen=200)
    released: set[Lease] = set()
    now_s, served = 0.0, 0
    for event in range(100_000):
        now_s += chance.expovariate(1.0)
        leases = list(old) if old and chance.random() < 0.2 else list(held.values())
        lease = chance.choice(leases) if leases else None
        group_id = chance.choice(groups)
        match chance.choices(range(8), (30, 20, 20, 20, 1, 20, 20, 10))[0]:
            case 0:
                free = pool.counts()["ready"]
                taken = pool.reserve(f"s{event}", now_s)
                assert (taken is not None) == (free > 0)
                if taken is not None:
                    assert taken.group_id not in held
                    held[taken.group_id] = taken
                    old.append(taken)
                    served += 1
            case 1 if lease is not None:
                if pool.attach(lease):
                    assert held[lease.group_id] == lease
            case 2 if lease is not None:
                if pool.release(lease):
                    assert held[lease.group_id] == lease and lease not in released
                    released.add(lease)
            case 3 if lease is not None:
                if pool.reset_done(lease):
                    assert held.pop(lease.group_id) == lease
                    assert lease in released, "free before it was cleaned"
            case 4:
                assert pool.fail(group_id, "died") == held.pop(group_id, None)
            case 5 if pool.state_of(group_id) == "unhealthy":
                pool.add(group_id)
                pool.warming(group_id)
            case 6 if pool.state_of(group_id) == "warming":
                pool.started(group_id, chance.choice(("", "slow")))
            case 7:
                for expired in pool.expired(now_s):
                    assert held[expired.group_id] == expired and pool.release(expired)
                    released.add(expired)
        counts = pool.counts()
        assert sum(counts.values()) == len(groups)
        assert counts["reserved"] + counts["live"] + counts["resetting"] == len(held)
    assert served > 5_000
    for lease in list(held.values()):
        pool.release(lease)
        assert pool.reset_done(lease)
    for group_id in groups:
        if pool.state_of(group_id) in ("unhealthy", "warming"):
            pool.add(group_id)
            pool.started(group_id)
    assert pool.counts()["ready"] == len(groups), "every group can serve again"


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, with leases of any age."""

    group = st.sampled_from(["g0", "g1", "g2"])

    def __init__(self) -> None:
        super().__init__()
        self.pool = ready_pool(3)
        self.leases: list[Lease] = []
        self.now_s = 0.0
        self.sessions = 0
        self.held: dict[str, Lease] = {}

    def a_lease(self, data: st.DataObject) -> Lease | None:
        return data.draw(st.sampled_from(self.leases)) if self.leases else None

    @rule()
    def reserve(self) -> None:
        self.sessions += 1
        lease = self.pool.reserve(f"s{self.sessions}", self.now_s)
        if lease is not None:
            assert lease.group_id not in self.held, "a held group was given away"
            self.held[lease.group_id] = lease
            self.leases.append(lease)

    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        lease = self.a_lease(data)
        if lease is not None and self.pool.attach(lease):
            assert self.held[lease.group_id] == lease

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.a_lease(data)
        if lease is not None and self.pool.release(lease):
            assert self.held[lease.group_id] == lease

    @rule(data=st.data())
    def reset_done(self, data: st.DataObject) -> None:
        lease = self.a_lease(data)
        if lease is not None and self.pool.reset_done(lease):
            assert self.held.pop(lease.group_id) == lease

    @rule(group=group)
    def fail(self, group: str) -> None:
        assert self.pool.fail(group, "died") == self.held.pop(group, None)

    @rule(group=group)
    def rebuild(self, group: str) -> None:
        if self.pool.state_of(group) == "unhealthy":
            self.pool.add(group)

    @rule(group=group)
    def warm(self, group: str) -> None:
        self.pool.warming(group)

    @rule(group=group, degraded=st.sampled_from(["", "slow"]))
    def started(self, group: str, degraded: str) -> None:
        before = self.pool.state_of(group)
        self.pool.started(group, degraded)
        if before not in ("starting", "warming"):
            assert self.pool.state_of(group) == before

    @rule(seconds=st.floats(0, 60))
    def expire(self, seconds: float) -> None:
        self.now_s += seconds
        for lease in self.pool.expired(self.now_s):
            assert self.held[lease.group_id] == lease
            assert self.pool.release(lease)

    @invariant()
    def every_group_is_counted_once(self) -> None:
        counts = self.pool.counts()
        assert set(counts) == set(GROUP_STATES) and sum(counts.values()) == 3
        assert counts["reserved"] + counts["live"] + counts["resetting"] == len(self.held)

    @invariant()
    def the_held_are_exactly_the_leased(self) -> None:
        for group in ("g0", "g1", "g2"):
            assert self.pool.lease_of(group) == self.held.get(group)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
