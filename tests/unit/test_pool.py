"""The pool: every lease is held once, and nothing stale can act on a group."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from characters_serve.fleet.pool import (
    FIRST_BACKOFF_S,
    GROUP_STATES,
    LONGEST_BACKOFF_S,
    STEADY_S,
    Lease,
    Pool,
)
from characters_serve.fleet.queue import WaitingQueue

TTL_S = 30.0


def ready_pool(groups: int = 1) -> Pool:
    pool = Pool(TTL_S)
    for index in range(groups):
        pool.add(f"g{index}", 0.0)
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
    assert pool.fail("g0", "killed", 0.0) == lease
    assert pool.reasons() == {"g0": "killed"} and not pool.serving
    assert not pool.release(lease) and not pool.reset_done(lease)
    pool.add("g0", 0.0)
    assert pool.reserve("b", 0.0) is None, "not before it has started"
    pool.started("g0")
    assert take(pool, "b").epoch > lease.epoch


def test_the_first_word_of_a_death_counts() -> None:
    pool = ready_pool()
    assert pool.fail("g0", "exited with code 1", 1.0) is None
    assert pool.fail("g0", "and is gone", 2.0) is None
    assert pool.reasons() == {"g0": "exited with code 1"}
    assert pool.backoff_s("g0") == FIRST_BACKOFF_S


def test_backoff_doubles_to_a_limit_and_starts_over_after_a_steady_life() -> None:
    pool, now_s = Pool(TTL_S), 0.0
    seen: list[float] = []
    for _ in range(9):
        pool.add("g0", now_s)
        now_s += 1.0
        pool.fail("g0", "died", now_s)
        seen.append(pool.backoff_s("g0"))
        now_s += seen[-1]
    assert seen == [0.5, 1, 2, 4, 8, 16, 30, 30, 30] and seen[-1] == LONGEST_BACKOFF_S
    pool.add("g0", now_s)
    pool.fail("g0", "died", now_s + STEADY_S)
    assert pool.backoff_s("g0") == FIRST_BACKOFF_S


def test_groups_take_turns() -> None:
    pool = ready_pool(3)
    for expected in ("g0", "g1", "g2", "g0"):
        lease = take(pool)
        assert lease.group_id == expected
        assert pool.release(lease) and pool.reset_done(lease)


def test_draining_lets_held_groups_finish_and_frees_none() -> None:
    pool = ready_pool(2)
    lease = take(pool)
    pool.drain()
    assert pool.reserve("b", 0.0) is None
    assert pool.attach(lease) and pool.release(lease) and pool.reset_done(lease)
    assert pool.counts()["draining"] == 2 and not pool.serving


def test_a_group_that_starts_while_draining_stays_out() -> None:
    pool = Pool(TTL_S)
    pool.add("g0", 0.0)
    pool.drain()
    pool.started("g0")
    assert pool.reserve("a", 0.0) is None


def test_a_held_group_cannot_be_added_again() -> None:
    pool = ready_pool()
    take(pool)
    with pytest.raises(ValueError, match="still held"):
        pool.add("g0", 0.0)


def test_a_group_warms_up_before_it_is_ready() -> None:
    pool = Pool(TTL_S)
    pool.add("g0", 0.0)
    pool.warming("g0")
    assert pool.counts()["warming"] == 1 and not pool.serving
    assert pool.reserve("a", 0.0) is None
    pool.started("g0")
    pool.warming("g0")
    assert pool.state_of("g0") == "ready", "late news changes nothing"


def test_a_slow_group_is_taken_last_and_forgets_its_slowness_when_rebuilt() -> None:
    pool = Pool(TTL_S)
    for group_id, degraded in (("g0", "a chunk takes 200 ms"), ("g1", "")):
        pool.add(group_id, 0.0)
        pool.started(group_id, degraded)
    assert take(pool, "a").group_id == "g1"
    assert pool.degraded() == {"g0": "a chunk takes 200 ms"}
    slow = take(pool, "b")
    assert slow.group_id == "g0"
    pool.fail("g0", "died", 0.0)
    assert pool.degraded() == {}
    pool.add("g0", 0.0)
    pool.started("g0")
    assert pool.degraded() == {}


class World:
    """Groups, visitors and faults that know nothing of each other, under an invented clock.

    Each act may come at any time and with a lease of any age; `held` is what must be true.
    """

    PATIENCE_S = 40.0

    def __init__(self, groups: int, queue_size: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pool, self.queue = Pool(TTL_S), WaitingQueue(queue_size, self.PATIENCE_S)
        self.groups = [f"g{index}" for index in range(groups)]
        self.now_s = 0.0
        self.held: dict[str, Lease] = {}
        self.old: deque[Lease] = deque(maxlen=200)
        self.released: set[Lease] = set()
        self.epochs = dict.fromkeys(self.groups, 0)
        self.may_return_s = dict.fromkeys(self.groups, 0.0)
        self.arrived = self.served = self.refused = self.gave_up = 0
        for group_id in self.groups:
            self.pool.add(group_id, 0.0)

    def act(self) -> None:
        self.now_s += self.chance.expovariate(4.0)
        acts = (
            *((self.arrive, 30), (self.attach, 20), (self.release, 20), (self.clean, 20)),
            *((self.die, 1), (self.rebuild, 10), (self.warm, 20), (self.start, 20)),
            *((self.sweep, 10), (self.ask, 30), (self.leave, 3)),
        )
        self.chance.choices([act for act, _ in acts], [weight for _, weight in acts])[0]()
        self.admit()

    def a_lease(self) -> Lease | None:
        stale = self.old and self.chance.random() < 0.2
        leases = list(self.old) if stale else list(self.held.values())
        return self.chance.choice(leases) if leases else None

    def a_group(self) -> str:
        return self.chance.choice(self.groups)

    def arrive(self) -> None:
        self.arrived += 1
        self.refused += not self.queue.join(f"s{self.arrived}", self.now_s)

    def admit(self) -> None:
        while (session_id := self.queue.first()) is not None:
            free = self.pool.counts()["ready"]
            lease = self.pool.reserve(session_id, self.now_s)
            assert (lease is not None) == (free > 0), "nobody waits while a group is free"
            if lease is None:
                return
            assert self.queue.leave(session_id)
            assert lease.group_id not in self.held, "given twice"
            assert lease.epoch > self.epochs[lease.group_id], "an epoch came twice"
            self.epochs[lease.group_id] = lease.epoch
            self.held[lease.group_id] = lease
            self.old.append(lease)
            self.served += 1

    def attach(self) -> None:
        lease = self.a_lease()
        if lease is not None and self.pool.attach(lease):
            assert self.held[lease.group_id] == lease

    def release(self) -> None:
        lease = self.a_lease()
        if lease is not None and self.pool.release(lease):
            assert self.held[lease.group_id] == lease and lease not in self.released
            self.released.add(lease)

    def clean(self) -> None:
        lease = self.a_lease()
        if lease is not None and self.pool.reset_done(lease):
            assert self.held.pop(lease.group_id) == lease
            assert lease in self.released, "free before it was cleaned"

    def die(self) -> None:
        group_id = self.a_group()
        assert self.pool.fail(group_id, "died", self.now_s) == self.held.pop(group_id, None)
        backoff_s = self.pool.backoff_s(group_id)
        assert FIRST_BACKOFF_S <= backoff_s <= LONGEST_BACKOFF_S
        self.may_return_s[group_id] = self.now_s + backoff_s

    def rebuild(self) -> None:
        for group_id in self.groups:
            rested = self.now_s >= self.may_return_s[group_id]
            if rested and self.pool.state_of(group_id) == "unhealthy":
                self.pool.add(group_id, self.now_s)

    def warm(self) -> None:
        self.pool.warming(self.a_group())

    def start(self) -> None:
        group_id = self.a_group()
        before = self.pool.state_of(group_id)
        self.pool.started(group_id, self.chance.choice(("", "slow")))
        after = "ready" if before in ("starting", "warming") else before
        assert self.pool.state_of(group_id) == after

    def sweep(self) -> None:
        for lease in self.pool.expired(self.now_s):
            assert self.held[lease.group_id] == lease and self.pool.release(lease)
            self.released.add(lease)
        for session_id, _why in self.queue.overdue(self.now_s):
            assert self.queue.leave(session_id)
            self.gave_up += 1

    def ask(self) -> None:
        session_id = f"s{self.chance.randint(max(1, self.arrived - 30), self.arrived + 1)}"
        self.queue.heard(session_id, self.now_s)

    def leave(self) -> None:
        session_id = f"s{self.chance.randint(max(1, self.arrived - 30), self.arrived + 1)}"
        self.gave_up += self.queue.leave(session_id)

    def check(self) -> None:
        counts = self.pool.counts()
        assert sum(counts.values()) == len(self.groups), "a slot was lost"
        assert counts["reserved"] + counts["live"] + counts["resetting"] == len(self.held)
        assert all(self.pool.lease_of(g) == self.held.get(g) for g in self.groups)
        waiting = len(self.queue)
        assert waiting <= self.queue.size
        assert self.arrived == self.served + self.refused + self.gave_up + waiting


@pytest.mark.parametrize(("groups", "queue_size"), [(8, 5), (3, 1)])
def test_fifty_thousand_events_lose_no_group_and_give_none_twice(
    groups: int, queue_size: int
) -> None:
    """100,000 in all; afterwards, with no more faults, every group serves again."""
    world = World(groups, queue_size, seed=2026)
    for _ in range(50_000):
        world.act()
        world.check()
    assert world.served > 2_000 and world.refused > 100 and world.gave_up > 100
    world.now_s += LONGEST_BACKOFF_S
    world.rebuild()
    for lease in list(world.held.values()):
        world.pool.release(lease)
        world.released.add(lease)
        assert world.pool.reset_done(lease) and world.held.pop(lease.group_id) == lease
    for group_id in world.groups:
        world.pool.started(group_id)
    assert world.pool.counts()["ready"] == groups


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
        assert self.pool.fail(group, "died", self.now_s) == self.held.pop(group, None)

    @rule(group=group)
    def rebuild(self, group: str) -> None:
        if self.pool.state_of(group) == "unhealthy":
            self.pool.add(group, self.now_s)

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
