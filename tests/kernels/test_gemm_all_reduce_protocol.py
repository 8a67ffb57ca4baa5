"""The fused kernel's flags, explored: whatever the ranks' speed, and whenever a store is seen.

A model of `_gemm_all_reduce_kernel`: each rank has a program that multiplies and one that adds. A
value in memory is the call that it is of. A store may be seen at any time between its program's
statement and that program's next release, or its launch's end, and stores pass each other. Values
of calls count from the slowest rank's, so that finitely many states are all calls there ever are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest

Store = tuple[str, int, int, int]
"""Into "partial" or "sums", of which rank, of which tile: what."""
WRONG = -1_000_000


class Violation(Exception):
    pass


class Program(NamedTuple):
    """step: multiply, wait, tell, finish, end or done; at: a tile or the rank that is
    told next. unseen: stores that others may not see yet."""

    step: str
    at: int = 0
    unseen: frozenset[Store] = frozenset()
    after_telling: str = ""


class Rank(NamedTuple):
    """clean: what it multiplies follows from right sums alone. waits: it had not been told that
    somebody had waited in vain, when the call began."""

    call: int
    clean: bool
    waits: bool
    alive: bool
    programs: tuple[Program, ...]
    tickets: int
    partial: tuple[int, ...]
    sums: tuple[int, ...]
    flags: tuple[int, ...]
    finished: int
    in_vain: bool


State = tuple[Rank, ...]


@dataclass(frozen=True)
class Protocol:
    """all_add: the program that multiplies adds, too, once it has no tile left. calls: of each
    rank, or without end. impatient: a wait may end in vain. dies: a rank may be gone at any time.
    broken: which of the kernel's rules is left out."""

    size: int
    tiles: int
    all_add: bool = False
    calls: int = 0
    impatient: bool = False
    dies: bool = False
    broken: str = ""

    @property
    def adding(self) -> int:
        return 2 if self.all_add else 1

    def owned(self, rank: int) -> int:
        return len(range(rank, self.tiles, self.size))

    def first(self) -> State:
        none = (0,) * self.tiles
        rank = Rank(0, True, True, True, (), 0, none, none, none, 0, False)
        return tuple(self._launched(number, rank) for number in range(self.size))

    def _launched(self, number: int, rank: Rank) -> Rank:
        begun = rank._replace(call=rank.call + 1, waits=not rank.in_vain)
        multiplying = self._multiplying(number, begun, 0, frozenset())
        begun, adding = self._drawn(number, begun, Program("", 1))
        return begun._replace(programs=(multiplying, adding))

    def _multiplying(self, number: int, rank: Rank, tile: int, unseen: frozenset[Store]) -> Program:
        value = rank.call if rank.clean else WRONG
        return Program("multiply", tile, unseen | {("partial", number, tile, value)})

    def _drawn(self, number: int, rank: Rank, program: Program) -> tuple[Rank, Program]:
        """What a program that adds does next, by its ticket."""
        slices = self.owned(number)
        ticket = rank.tickets - (rank.call - 1) * (slices + self.adding)
        rank = rank._replace(tickets=rank.tickets + 1)
        if ticket < slices:
            return rank, program._replace(step="wait", at=ticket * self.size + number)
        return rank, program._replace(step="finish", at=0)

    def next(self, state: State) -> Iterator[State]:
        for number, rank in enumerate(state):
            if not rank.alive or (self.calls and rank.call > self.calls):
                continue
            if all(program.step == "done" and not program.unseen for program in rank.programs):
                yield changed(state, number, self._launched(number, self._read(number, rank)))
            for index, program in enumerate(rank.programs):
                for store in program.unseen:
                    seen = program._replace(unseen=program.unseen - {store})
                    yield stored(with_program(state, number, index, seen), store)
                yield from self._step(state, number, index, program)
            if self.dies and all(other.alive for other in state):
                yield changed(state, number, rank._replace(alive=False))

    def _read(self, number: int, rank: Rank) -> Rank:
        """What follows on the stream: the sums, and whether they may be used."""
        right = all(value == rank.call for value in rank.sums)
        if not (right and rank.clean) and not rank.in_vain:
            raise Violation(f"rank {number} takes wrong sums for right: {rank}")
        if rank.tickets != rank.call * (self.owned(number) + self.adding):
            raise Violation(f"tickets of rank {number}: {rank}")
        return rank._replace(clean=rank.clean and right)

    def _step(self, state: State, number: int, index: int, program: Program) -> Iterator[State]:
        rank, size = state[number], self.size
        may_give_up = self.impatient or not rank.waits
        match program.step:
            case "multiply" if not program.unseen or self.broken == "flag passes stores":
                tile = program.at
                owner = state[tile % size]
                flags = put(owner.flags, tile, owner.flags[tile] + 1)
                state = changed(state, tile % size, owner._replace(flags=flags))
                rank = state[number]
                if tile + 1 < self.tiles:
                    program = self._multiplying(number, rank, tile + 1, program.unseen)
                elif self.all_add:
                    rank, program = self._drawn(number, rank, program)
                else:
                    program = program._replace(step="done")
                yield with_program(changed(state, number, rank), number, index, program)
            case "wait":
                calls = 1 if self.broken == "flags without calls" else rank.call
                if rank.flags[program.at] >= calls * size:
                    parts = {other.partial[program.at] for other in state}
                    value = rank.call if parts == {rank.call} else WRONG
                    sums = {("sums", other, program.at, value) for other in range(size)}
                    program = program._replace(unseen=program.unseen | sums)
                    rank, program = self._drawn(number, rank, program)
                    yield with_program(changed(state, number, rank), number, index, program)
                elif may_give_up and self.broken == "nobody is told":
                    rank, program = self._drawn(number, rank, program)
                    yield with_program(changed(state, number, rank), number, index, program)
                elif may_give_up:
                    telling = program._replace(step="tell", at=0, after_telling="draw")
                    yield with_program(state, number, index, telling)
            case "tell":
                if program.at < size:
                    other = state[program.at]._replace(in_vain=True)
                    state = changed(state, program.at, other)
                    program = program._replace(at=program.at + 1)
                elif program.after_telling == "draw":
                    rank, program = self._drawn(number, rank, program)
                    state = changed(state, number, rank)
                else:
                    program = program._replace(step="done")
                yield with_program(state, number, index, program)
            case "finish" if not program.unseen or self.broken == "finish passes stores":
                state = tuple(each._replace(finished=each.finished + 1) for each in state)
                last = index == len(rank.programs) - 1
                waits = last and self.broken != "nobody waits for the others' end"
                program = program._replace(step="end" if waits else "done")
                yield with_program(state, number, index, program)
            case "end":
                if rank.finished >= rank.call * size * self.adding:
                    yield with_program(state, number, index, program._replace(step="done"))
                elif may_give_up:
                    telling = program._replace(step="tell", at=0, after_telling="done")
                    yield with_program(state, number, index, telling)

    def has_ended(self, state: State) -> bool:
        return bool(self.calls) and all(rank.call > self.calls or not rank.alive for rank in state)


def put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def changed(state: State, number: int, rank: Rank) -> State:
    return (*state[:number], rank, *state[number + 1 :])


def with_program(state: State, number: int, index: int, program: Program) -> State:
    programs = state[number].programs
    programs = (*programs[:index], program, *programs[index + 1 :])
    return changed(state, number, state[number]._replace(programs=programs))


def stored(state: State, store: Store) -> State:
    where, number, tile, value = store
    rank = state[number]
    if where == "sums":
        return changed(state, number, rank._replace(sums=put(rank.sums, tile, value)))
    return changed(state, number, rank._replace(partial=put(rank.partial, tile, value)))


def from_the_slowest(protocol: Protocol, state: State) -> State:
    """The same state, of earlier calls."""
    by = min(rank.call for rank in state) - 1
    if by == 0:
        return state

    def moved(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(value - by for value in values)

    def program_moved(program: Program) -> Program:
        unseen = frozenset((*where, value - by) for *where, value in program.unseen)
        return program._replace(unseen=unseen)  # type: ignore[arg-type]

    size, adding = protocol.size, protocol.adding
    return tuple(
        rank._replace(
            call=rank.call - by,
            programs=tuple(map(program_moved, rank.programs)),
            tickets=rank.tickets - by * (protocol.owned(number) + adding),
            partial=moved(rank.partial),
            sums=moved(rank.sums),
            flags=tuple(
                flag - by * size * (tile % size == number) for tile, flag in enumerate(rank.flags)
            ),
            finished=rank.finished - by * size * adding,
        )
        for number, rank in enumerate(state)
    )


def explore(protocol: Protocol) -> int:
    """How many states there are; raises Violation."""
    seen = {protocol.first()}
    left = list(seen)
    while left:
        state = left.pop()
        following = list(protocol.next(state))
        if not following and not protocol.has_ended(state):
            raise Violation(f"nobody can go on: {state}")
        for after in following:
            if not protocol.calls:
                after = from_the_slowest(protocol, after)
                if max(rank.call for rank in after) > 2:
                    raise Violation(f"a rank is two calls ahead: {after}")
            if after not in seen:
                seen.add(after)
                left.append(after)
    return len(seen)


def walk(protocol: Protocol, seed: int) -> None:
    """One of the ways to the end, where all would take too long; raises Violation."""
    choose, state = random.Random(seed), protocol.first()
    while not protocol.has_ended(state):
        following = list(protocol.next(state))
        if not following:
            raise Violation(f"nobody can go on: {state}")
        state = choose.choice(following)


@pytest.mark.parametrize("all_add", [False, True])
@pytest.mark.parametrize(("size", "tiles"), [(2, 3), (3, 2), (4, 1)])
def test_no_number_of_calls_leads_to_a_wrong_sum_or_to_a_stop(
    size: int, tiles: int, all_add: bool
) -> None:
    """More tiles than ranks, and fewer, so that a rank owns none."""
    assert explore(Protocol(size, tiles, all_add)) > 300


def test_whoever_waits_in_vain_tells_all_that_could_use_a_wrong_sum() -> None:
    explore(Protocol(2, 1, calls=2, impatient=True, dies=True))
    for size in (2, 3, 4):
        for seed in range(24):
            all_add, dies = bool(seed & 1), bool(seed & 2)
            walk(Protocol(size, size + 1, all_add, calls=3, impatient=True, dies=dies), seed)


@pytest.mark.parametrize(
    "broken",
    [
        "flag passes stores",
        "finish passes stores",
        "flags without calls",
        "nobody waits for the others' end",
    ],
)
def test_each_rule_is_needed(broken: str) -> None:
    with pytest.raises(Violation, match="takes wrong sums for right"):
        explore(Protocol(2, 2, broken=broken))


def test_a_rank_that_is_gone_must_be_given_up_and_all_told() -> None:
    with pytest.raises(Violation, match="nobody can go on"):
        explore(Protocol(2, 1, calls=1, dies=True))
    with pytest.raises(Violation, match="takes wrong sums for right"):
        explore(Protocol(2, 1, calls=2, impatient=True, broken="nobody is told"))
