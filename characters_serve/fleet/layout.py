"""In: hosts with GPUs, and the shape of a group. Out: which GPUs each group gets, or why none.

A group is its ranks and a decoder, all in one NVLink domain: the ranks reduce over it 240 times a
step. A decoder's GPU may serve several groups of its domain. Pure; knows no process and no driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GroupShape:
    """ranks: GPUs of the diffusion model. decoder: whether it has a GPU of its own, which
    `shared_by` groups use together; without one the ranks decode."""

    ranks: int
    decoder: bool = True
    shared_by: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.shared_by < 1:
            raise ValueError("ranks and shared_by are at least 1")
        if self.shared_by > 1 and not self.decoder:
            raise ValueError("there is no decoder to be shared")

    @property
    def gpus(self) -> int:
        """What the first group of a domain takes."""
        return self.ranks + self.decoder

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank" + ("s" if self.ranks > 1 else "")
        if not self.decoder:
            return ranks
        if self.shared_by == 1:
            return f"{ranks} and a decoder"
        return f"{ranks} and a decoder shared by {self.shared_by}"


@dataclass(frozen=True, slots=True)
class Host:
    """domains: the GPUs by number, those joined by NVLink together."""

    name: str
    domains: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        numbers = [gpu for domain in self.domains for gpu in domain]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"{self.name}: a GPU is named twice")


def uniform_host(name: str, gpus: int, per_domain: int) -> Host:
    """A host whose GPUs 0, 1, ... are joined by NVLink `per_domain` at a time."""
    firsts = range(0, gpus, per_domain)
    return Host(name, tuple(tuple(range(f, min(f + per_domain, gpus))) for f in firsts))


@dataclass(frozen=True, slots=True)
class Placement:
    host: str
    ranks: tuple[int, ...]
    decoder: int | None

    @property
    def gpus(self) -> tuple[int, ...]:
        return self.ranks if self.decoder is None else (*self.ranks, self.decoder)


class CannotPlace(ValueError):
    """No place for a group; the message says why in words."""


@dataclass(slots=True)
class _Domain:
    host: str
    size: int
    free: list[int]
    # decoder's GPU -> (what it serves, how many groups it serves now)
    decoders: dict[int, tuple[GroupShape, int]] = field(default_factory=dict)

    def decoder_with_room(self, shape: GroupShape) -> int | None:
        for gpu, (served, users) in self.decoders.items():
            if served == shape and users < shape.shared_by:
                return gpu
        return None

    def needs(self, shape: GroupShape) -> int:
        """Free GPUs that one more such group takes."""
        shared = shape.decoder and self.decoder_with_room(shape) is not None
        return shape.ranks if shared else shape.gpus


class Layout:
    """Fills one domain before it opens the next, so that large groups find whole ones."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self._domains = [
            _Domain(host.name, len(gpus), sorted(gpus)) for host in hosts for gpus in host.domains
        ]
        # For each shape, the first domain that may still have room: thousands are not walked again.
        self._from: dict[GroupShape, int] = {}
        self._placed: dict[Placement, tuple[int, GroupShape]] = {}

    @property
    def gpus(self) -> int:
        return sum(domain.size for domain in self._domains)

    @property
    def free_gpus(self) -> int:
        return sum(len(domain.free) for domain in self._domains)

    def place(self, shape: GroupShape) -> Placement:
        """Raises CannotPlace."""
        start = self._from.get(shape, 0)
        for index in range(start, len(self._domains)):
            domain = self._domains[index]
            if len(domain.free) >= domain.needs(shape):
                self._from[shape] = index
                return self._take(index, shape)
        self._from[shape] = len(self._domains)
        raise CannotPlace(self._why_not(shape))

    def remove(self, placement: Placement) -> None:
        """Gives a group's GPUs back; a shared decoder's when its last group goes."""
        index, shape = self._placed.pop(placement)
        domain = self._domains[index]
        domain.free += placement.ranks
        if placement.decoder is not None:
            _, users = domain.decoders[placement.decoder]
            domain.decoders[placement.decoder] = (shape, users - 1)
            if users == 1:
                del domain.decoders[placement.decoder]
                domain.free.append(placement.decoder)
        domain.free.sort()
        self._from = {shape: min(first, index) for shape, first in self._from.items()}

    def _take(self, index: int, shape: GroupShape) -> Placement:
        domain = self._domains[index]
        ranks, domain.free = tuple(domain.free[: shape.ranks]), domain.free[shape.ranks :]
        decoder = domain.decoder_with_room(shape) if shape.decoder else None
        if shape.decoder and decoder is None:
            decoder = domain.free.pop(0)
            domain.decoders[decoder] = (shape, 0)
        if decoder is not None:
            domain.decoders[decoder] = (shape, domain.decoders[decoder][1] + 1)
        placement = Placement(domain.host, ranks, decoder)
        self._placed[placement] = (index, shape)
        return placement

    def _why_not(self, shape: GroupShape) -> str:
        wants = f"a group of {shape} needs {shape.gpus} GPUs that NVLink joins"
        if not self._domains:
            return f"{wants}; there are no GPUs"
        largest = max(self._domains, key=lambda domain: domain.size)
        if largest.size < shape.gpus:
            return f"{wants}; the most that any host joins is {largest.size} ({largest.host})"
        freest = max(self._domains, key=lambda domain: len(domain.free))
        free, needs = len(freest.free), freest.needs(shape)
        words = f"{wants}; the most that are free is {free} of {freest.size} ({freest.host})"
        if needs < shape.gpus:
            words += f", which has room in a decoder but not for {needs} ranks"
        elsewhere = self.free_gpus - free
        if self.free_gpus >= shape.gpus:
            words += f"; the other {elsewhere} free GPUs are in other domains"
        return words


def place_all(hosts: Iterable[Host], shape: GroupShape, groups: int) -> list[Placement]:
    """Raises CannotPlace, which says how many of them found room."""
    layout = Layout(hosts)
    placements: list[Placement] = []
    for number in range(groups):
        try:
            placements.append(layout.place(shape))
        except CannotPlace as error:
            raise CannotPlace(f"{number} of {groups} groups have room: {error}") from None
    return placements


def place_as_many(hosts: Sequence[Host], shape: GroupShape) -> list[Placement]:
    """Groups until nothing more fits; raises CannotPlace when not even one does."""
    layout = Layout(hosts)
    placements = [layout.place(shape)]
    while True:
        try:
            placements.append(layout.place(shape))
        except CannotPlace:
            return placements
