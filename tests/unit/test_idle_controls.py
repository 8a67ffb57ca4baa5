"""Idle controls: determinism, independence of chunking, ranges and rates."""

import numpy as np
import pytest

from characters_serve.model.idle_controls import CONTROL_NAMES, IdleControls, neutral

FPS = 24
BLINK = CONTROL_NAMES.index("blink")


def test_same_seed_gives_the_same_stream_and_another_seed_does_not() -> None:
    first = IdleControls(7, FPS).next(200, speaking=True)
    again = IdleControls(7, FPS).next(200, speaking=True)
    other = IdleControls(8, FPS).next(200, speaking=True)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_stream_does_not_depend_on_chunking(chunk: int) -> None:
    whole = IdleControls(3, FPS)
    parts = IdleControls(3, FPS)
    expected = [
        whole.next(84, speaking=False, listening_energy=0.6),
        whole.next(84, speaking=True),
    ]
    got = [parts.next(chunk, speaking=False, listening_energy=0.6) for _ in range(84 // chunk)]
    got += [parts.next(chunk, speaking=True) for _ in range(84 // chunk)]
    np.testing.assert_array_equal(np.concatenate(expected), np.concatenate(got))


@pytest.mark.parametrize("speaking", [False, True])
def test_ranges_and_blink_rate(speaking: bool) -> None:
    minutes = 3
    for seed in range(4):
        rows = IdleControls(seed, FPS).next(minutes * 60 * FPS, speaking=speaking)
        assert rows.shape == (minutes * 60 * FPS, 7)
        assert rows.dtype == np.float32
        assert np.abs(rows).max() <= 1.0
        assert rows[:, BLINK].min() == 0.0
        assert rows[:, BLINK].max() > 0.9
        closed = rows[:, BLINK] > 0.5
        starts = np.count_nonzero(closed[1:] & ~closed[:-1])
        assert 10 <= starts / minutes <= 34
        looking_at_viewer = (np.abs(rows[:, 4:6]) < 0.12).all(axis=1).mean()
        assert looking_at_viewer > 0.5


def test_motion_is_smooth_and_speaking_moves_more() -> None:
    quiet = np.concatenate([IdleControls(s, FPS).next(1440, speaking=False) for s in range(8)])
    lively = np.concatenate([IdleControls(s, FPS).next(1440, speaking=True) for s in range(8)])
    steps = np.abs(np.diff(IdleControls(1, FPS).next(1440, speaking=True)[:, :3], axis=0))
    assert steps.max() < 0.2
    assert lively[:, 1].std() > quiet[:, 1].std()


def test_listening_nods() -> None:
    still = IdleControls(5, FPS).next(480, speaking=False)
    heard = IdleControls(5, FPS).next(480, speaking=False, listening_energy=0.8)
    assert (heard[:, 1] - still[:, 1]).max() > 0.15


def test_who_listens_looks_at_the_user_with_raised_brows() -> None:
    def rows(energy: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        streams = [IdleControls(seed, FPS) for seed in range(6)]
        return np.concatenate(
            [s.next(720, speaking=False, listening_energy=energy)[48:] for s in streams]
        )

    still, heard = rows(0.0), rows(0.8)

    def at_viewer(rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float:
        return float((np.abs(rows[:, 4:6]) < 0.12).all(axis=1).mean())

    assert at_viewer(heard) > at_viewer(still) + 0.1
    assert heard[:, 6].mean() > still[:, 6].mean() + 0.1
    assert np.abs(heard).max() <= 1.0


def test_it_nods_as_the_user_falls_silent_unless_it_speaks() -> None:
    nods = [0, 0]
    for seed in range(20):
        streams = [IdleControls(seed, FPS) for _ in range(2)]
        for stream in streams:
            stream.next(30, speaking=False, listening_energy=0.8)
        for index, (stream, speaking) in enumerate(zip(streams, (False, True), strict=True)):
            stream.next(36, speaking=speaking)
            nods[index] += int(stream._nod_age < 36 / FPS)
    assert nods[0] >= 10 and nods[1] == 0


def test_neutral_is_zero() -> None:
    assert neutral().shape == (len(CONTROL_NAMES),)
    assert not neutral().any()
