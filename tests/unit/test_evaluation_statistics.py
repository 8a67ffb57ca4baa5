"""Paired differences, trends and what a report concludes from them, on known cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from characters_serve.config import Config
from characters_serve.evaluation.clips import Score
from characters_serve.evaluation.lse import LipSync
from characters_serve.evaluation.report import Report, draw, make_report
from characters_serve.evaluation.run import Plan, Scores, looks_file
from characters_serve.evaluation.statistics import (
    ROOM,
    Interval,
    band_of,
    mean_interval,
    paired_difference,
    psnr,
    trend_per_minute,
)


def test_a_constant_difference_is_known_for_sure() -> None:
    clips = np.random.default_rng(1).normal(7, 2, 51)
    found = paired_difference(clips.tolist(), (clips + 0.25).tolist())
    assert [found.mean, found.low, found.high] == pytest.approx([0.25] * 3)


def test_the_interval_is_that_of_the_normal_theory() -> None:
    values = np.random.default_rng(2).normal(0.3, 1.0, 400)
    found = mean_interval(values)
    half = 1.96 * values.std() / 400**0.5
    assert found.mean == pytest.approx(values.mean())
    assert found.high - found.mean == pytest.approx(half, rel=0.08)
    assert found.mean - found.low == pytest.approx(half, rel=0.08)


def test_it_covers_the_truth_in_most_cases() -> None:
    generator = np.random.default_rng(3)
    intervals = [mean_interval(generator.normal(1.0, 1.0, 51)) for _ in range(100)]
    covered = sum(found.low <= 1.0 <= found.high for found in intervals)
    assert 86 <= covered <= 100


def test_clips_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 3 clips"):
        paired_difference([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="no clips"):
        mean_interval([])


def test_a_trend_is_a_slope_per_minute() -> None:
    times_s = [0.0, 10.0, 20.0, 30.0]
    found = trend_per_minute(times_s, [[5 + 0.02 * t for t in times_s]] * 8)
    assert [found.mean, found.low, found.high] == pytest.approx([1.2] * 3)
    flat = trend_per_minute(times_s, np.random.default_rng(6).normal(7, 0.1, (30, 4)).tolist())
    assert flat.low < 0 < flat.high


def test_psnr() -> None:
    black, grey = np.zeros((4, 4), np.uint8), np.full((4, 4), 51, np.uint8)
    assert psnr(black, grey) == pytest.approx(20 * np.log10(5))
    assert psnr(black, black) == 100


def test_the_band_is_the_reach_of_the_reruns() -> None:
    reruns = [Interval(0.0, -0.02, 0.02), Interval(-0.03, -0.08, 0.01)]
    assert band_of(reruns) == pytest.approx(ROOM * 0.08)


def _report(
    tmp_path: Path, worse_by: float, late_by: int = 0, windows: int = 0, width: int = 8
) -> Report:
    """Fifty clips; the reruns differ by chance, `changed` also by what is asked for."""
    config = Config()
    plan = Plan({"plain": config, "changed": config}, tmp_path, clips=50, reruns=4)
    generator = np.random.default_rng(5)
    clips = generator.normal(7, 1, 50)
    scores: Scores = {}
    (tmp_path / "looks").mkdir()
    for name, run in plan.runs:
        more, late = (worse_by, late_by) if name == "changed" else (0.0, 0)
        runs = clips + generator.normal(0, 0.1, 50) + more
        scores[name, run] = [
            Score(
                LipSync(distance, 12 - distance, 1 + late),
                [LipSync(distance + 0.1 * at, 5, 1) for at in range(windows)],
            )
            for distance in runs.tolist()
        ]
        for number in range(5):
            columns = width if name == "changed" else 8
            looks = generator.integers(0, 255, (3, 8, columns), np.uint8)
            np.save(looks_file(plan, name, run, number), looks)
    return make_report(plan, scores)


def test_an_unchanged_configuration_passes(tmp_path: Path) -> None:
    report = _report(tmp_path, worse_by=0.0)
    assert report.failures() == []
    assert report.table().count("plain, again") == 4
    assert {label: len(curve) for label, curve in report.psnr_db.items()} == {
        "again": 3,
        "changed": 3,
    }


def test_pictures_of_another_size_are_not_compared_by_their_pixels(tmp_path: Path) -> None:
    assert list(_report(tmp_path, worse_by=0.0, width=16).psnr_db) == ["again"]


def test_a_worse_one_fails_in_both_scores(tmp_path: Path) -> None:
    failures = _report(tmp_path, worse_by=0.2).failures()
    assert [words.partition(" may")[0] for words in failures] == [
        "changed: LSE-D",
        "changed: LSE-C",
    ]


def test_a_better_one_passes(tmp_path: Path) -> None:
    assert _report(tmp_path, worse_by=-0.5).failures() == []


def test_a_moved_offset_fails(tmp_path: Path) -> None:
    failures = _report(tmp_path, worse_by=0.0, late_by=2).failures()
    assert failures == ["changed: the offset moved from 1 to 3"]


def test_a_long_session_has_a_trend_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the extra `plot`")
    report = _report(tmp_path, worse_by=0.0, windows=4)
    trend = report.rows[0].trend_d
    assert trend is not None and trend.mean == pytest.approx(0.6)  # 0.1 in each 10 s
    assert report.window_times_s == [5, 15, 25, 35]
    picture = tmp_path / "report.png"
    draw(report, "four windows", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
