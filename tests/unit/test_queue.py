"""The waiting queue: first come, first served; a place that nobody asks after is given up."""

from __future__ import annotations

import pytest

from characters_serve.fleet.queue import SILENCE_S, VANISHED, WAITED_TOO_LONG, WaitingQueue


def queue_of(*session_ids: str, size: int = 3, patience_s: float = 60.0) -> WaitingQueue:
    queue = WaitingQueue(size, patience_s)
    for session_id in session_ids:
        assert queue.join(session_id, 0.0)
    return queue


def test_a_queue_of_no_size_takes_nobody() -> None:
    assert not WaitingQueue(0, 60.0).join("a", 0.0)


def test_places_move_up_as_others_leave() -> None:
    queue = queue_of("a", "b", "c")
    assert not queue.join("d", 0.0) and queue.position("d") is None
    assert [queue.position(name) for name in "abc"] == [1, 2, 3]
    assert queue.leave("b") and not queue.leave("b")
    assert queue.first() == "a" and queue.position("c") == 2
    assert queue.join("d", 1.0) and queue.position("d") == 3


def test_nobody_joins_twice() -> None:
    with pytest.raises(ValueError, match="already"):
        queue_of("a").join("a", 1.0)


def test_a_client_that_no_longer_asks_is_gone() -> None:
    queue = queue_of("asks", "silent")
    queue.heard("asks", SILENCE_S / 2)
    queue.heard("stranger", SILENCE_S / 2)
    assert queue.overdue(SILENCE_S - 0.1) == []
    assert queue.overdue(SILENCE_S) == [("silent", VANISHED)]


def test_nobody_waits_for_ever() -> None:
    queue = queue_of("a", patience_s=60.0)
    for now_s in range(1, 61):
        queue.heard("a", float(now_s))
        assert queue.overdue(now_s) == ([("a", WAITED_TOO_LONG)] if now_s == 60 else [])
