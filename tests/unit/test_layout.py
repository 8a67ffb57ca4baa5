"""Which GPUs groups get: none twice, none apart, and words where there is no room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from characters_serve.fleet.layout import (
    CannotPlace,
    GroupShape,
    Host,
    Layout,
    Placement,
    place_all,
    place_as_many,
    uniform_host,
)

EIGHT = uniform_host("h0", 8, 8)


def test_two_groups_of_three_and_two_decoders_fill_eight_gpus() -> None:
    assert place_all([EIGHT], GroupShape(3), 2) == [
        Placement("h0", (0, 1, 2), 3),
        Placement("h0", (4, 5, 6), 7),
    ]


def test_a_shared_decoder_saves_the_eighth() -> None:
    seven = uniform_host("h0", 7, 7)
    assert place_all([seven], GroupShape(3, shared_by=2), 2) == [
        Placement("h0", (0, 1, 2), 3),
        Placement("h0", (4, 5, 6), 3),
    ]
    with pytest.raises(CannotPlace, match="1 of 2 groups have room"):
        place_all([seven], GroupShape(3), 2)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        (GroupShape(4), 1),
        (GroupShape(7), 1),
        (GroupShape(8, decoder=False), 1),
        (GroupShape(2, shared_by=3), 3),
        (GroupShape(1, shared_by=4), 6),
        (GroupShape(2), 2),
        (GroupShape(1, decoder=False), 8),
    ],
)
def test_how_many_groups_eight_gpus_hold(shape: GroupShape, groups: int) -> None:
    assert len(place_as_many([EIGHT], shape)) == groups


@pytest.mark.parametrize(
    ("hosts", "shape", "says"),
    [
        ([], GroupShape(1), "there are no GPUs"),
        ([uniform_host("h0", 8, 4)], GroupShape(4), "the most that any host joins is 4 (h0)"),
        ([uniform_host("h0", 8, 8)], GroupShape(8), "needs 9 GPUs"),
    ],
)
def test_what_can_never_be_placed_is_said_in_words(
    hosts: list[Host], shape: GroupShape, says: str
) -> None:
    with pytest.raises(CannotPlace) as caught:
        Layout(hosts).place(shape)
    assert says in str(caught.value)


def test_why_there_is_no_room_now() -> None:
    layout = Layout([uniform_host("h0", 8, 8), uniform_host("h1", 8, 8)])
    for _ in range(2):
        layout.place(GroupShape(4))
    with pytest.raises(CannotPlace) as caught:
        layout.place(GroupShape(4))
    assert str(caught.value) == (
        "a group of 4 ranks and a decoder needs 5 GPUs that NVLink joins; the most that are free "
        "is 3 of 8 (h0); the other 3 free GPUs are in other domains"
    )
    shared = Layout([uniform_host("h0", 5, 5)])
    shared.place(GroupShape(3, shared_by=2))
    with pytest.raises(CannotPlace, match="room in a decoder but not for 3 ranks"):
        shared.place(GroupShape(3, shared_by=2))


@pytest.mark.parametrize("wrong", [(0, True, 1), (1, True, 0), (1, False, 2)])
def test_a_shape_that_cannot_be(wrong: tuple[int, bool, int]) -> None:
    with pytest.raises(ValueError, match=r"ranks and shared_by|no decoder"):
        GroupShape(*wrong)


def test_a_gpu_has_one_place() -> None:
    with pytest.raises(ValueError, match="named twice"):
        Host("h0", ((0, 1), (1, 2)))


shapes = st.builds(GroupShape, st.integers(1, 5), st.just(True), st.integers(1, 3)) | st.builds(
    GroupShape, st.integers(1, 8), st.just(False)
)
fleets = st.lists(st.tuples(st.integers(1, 8), st.sampled_from([2, 4, 8])), min_size=1, max_size=4)


@given(fleets, st.lists(st.tuples(st.booleans(), shapes, st.integers(0, 1000)), max_size=60))
def test_no_gpu_is_given_twice_and_no_group_lies_in_two_domains(
    fleet: list[tuple[int, int]], acts: list[tuple[bool, GroupShape, int]]
) -> None:
    hosts = [uniform_host(f"h{n}", gpus, domain) for n, (gpus, domain) in enumerate(fleet)]
    domains = {
        (h.name, gpu): index for h in hosts for index, d in enumerate(h.domains) for gpu in d
    }
    layout = Layout(hosts)
    placed: list[tuple[Placement, GroupShape]] = []
    for remove, shape, pick in acts:
        if remove and placed:
            gone, _ = placed.pop(pick % len(placed))
            layout.remove(gone)
        else:
            try:
                placed.append((layout.place(shape), shape))
            except CannotPlace:
                assert layout.free_gpus < layout.gpus or all(
                    len(d) < shape.gpus for h in hosts for d in h.domains
                )
        ranks = [(p.host, gpu) for p, _ in placed for gpu in p.ranks]
        assert len(set(ranks)) == len(ranks), "a rank's GPU was given twice"
        users: dict[tuple[str, int], list[GroupShape]] = {}
        for p, shape_of in placed:
            assert len(p.ranks) == shape_of.ranks and (p.decoder is not None) == shape_of.decoder
            assert len({domains[p.host, gpu] for gpu in p.gpus}) == 1, "it lies in two domains"
            if p.decoder is not None:
                users.setdefault((p.host, p.decoder), []).append(shape_of)
        assert not set(users) & set(ranks), "a decoder's GPU was given to a rank"
        for served in users.values():
            assert len(set(served)) == 1 and len(served) <= served[0].shared_by
        assert layout.free_gpus == layout.gpus - len(ranks) - len(users)
    for gone, _ in placed:
        layout.remove(gone)
    assert layout.free_gpus == layout.gpus


def test_a_group_that_fits_is_placed_wherever_it_fits() -> None:
    """A removal opens an earlier domain again."""
    layout = Layout([uniform_host(f"h{n}", 4, 4) for n in range(3)])
    placements = [layout.place(GroupShape(3)) for _ in range(3)]
    with pytest.raises(CannotPlace):
        layout.place(GroupShape(3))
    layout.remove(placements[0])
    assert layout.place(GroupShape(3)) == placements[0]
