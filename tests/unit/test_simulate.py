"""The simulated fleet: what it counts is what happened, and its traffic follows the day."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from characters_serve import cli
from characters_serve.fleet.layout import CannotPlace, GroupShape, uniform_host
from characters_serve.fleet.simulate import (
    Timing,
    TraceError,
    Visit,
    draw,
    generate_trace,
    read_trace,
    simulate,
)

ONE_GROUP = [uniform_host("h0", 2, 2)]
SHAPE = GroupShape(1)
PROMPT = Timing(prepare_s=0.0, reset_s=0.0)


def test_one_group_serves_one_after_another() -> None:
    visits = [Visit(0.0, 100.0), Visit(10.0, 60.0), Visit(60.0, 20.0), Visit(61.0, 1.0)]
    timing = Timing(prepare_s=0.0, reset_s=0.0, queue_size=2, patience_s=95.0)
    outcome, course = simulate(visits, ONE_GROUP, SHAPE, timing, price_per_gpu_hour=3.0)
    # The second waits 90 s, the third gives up after 95, the fourth finds the queue full.
    assert (outcome.served, outcome.gave_up, outcome.refused) == (2, 1, 1)
    assert outcome.wait_p50_s == 45.0 and outcome.longest_queue == 2 and outcome.most_live == 1
    assert outcome.live_minutes == 2.67 and outcome.hours == pytest.approx(160 / 3600, abs=1e-3)
    assert outcome.gpu_utilisation == pytest.approx(1, abs=1e-4)
    assert outcome.cost_per_live_minute == pytest.approx(2 * 3 / 60, abs=1e-4)
    assert max(course.live) == 1 and course.live[-1] == course.queued[-1] == 0


def test_preparing_and_cleaning_hold_the_group() -> None:
    visits = [Visit(0.0, 10.0), Visit(10.5, 10.0), Visit(30.0, 10.0)]
    outcome, _ = simulate(visits, ONE_GROUP, SHAPE, Timing(prepare_s=1.0, reset_s=0.5))
    assert (outcome.served, outcome.refused) == (2, 1)


def test_gpus_that_no_group_can_use_are_paid_for_all_the_same() -> None:
    hosts = [uniform_host(f"h{n}", 8, 8) for n in range(2)]
    outcome, _ = simulate([Visit(0.0, 60.0)], hosts, GroupShape(4), PROMPT, 1.0)
    assert (outcome.groups, outcome.gpus, outcome.stranded_gpus) == (2, 16, 6)
    assert outcome.gpu_utilisation == pytest.approx(5 / 16)
    assert outcome.cost_per_live_minute == pytest.approx(16 / 60, abs=1e-4)


def test_a_quiet_fleet_is_paid_for_all_day() -> None:
    outcome, _ = simulate([Visit(0.0, 60.0)], ONE_GROUP, SHAPE, PROMPT, 1.0, paid_s=7200.0)
    assert outcome.hours == 2.0 and outcome.cost_per_live_minute == 4.0


def test_a_fleet_on_which_nothing_fits_says_why() -> None:
    with pytest.raises(CannotPlace, match="needs 3 GPUs"):
        simulate([Visit(0.0, 1.0)], ONE_GROUP, GroupShape(2), PROMPT)


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(0, 5))
def test_every_visitor_is_counted_once(seed: int, groups: int, queue_size: int) -> None:
    visits = generate_trace(200, 1.0, 60.0, 1.0, 900.0, seed)
    hosts = [uniform_host(f"h{n}", 2, 2) for n in range(groups)]
    timing = Timing(queue_size=queue_size, patience_s=30.0)
    outcome, course = simulate(visits, hosts, SHAPE, timing)
    assert outcome.arrived == len(visits)
    assert outcome.served + outcome.refused + outcome.gave_up == outcome.arrived
    assert outcome.most_live <= groups and outcome.longest_queue <= queue_size
    assert max(course.queued) <= queue_size and 0 <= outcome.gpu_utilisation <= 1
    assert outcome.wait_p99_s <= timing.patience_s


def test_a_large_fleet_is_simulated_as_a_small_one() -> None:
    visits = generate_trace(20_000, 24.0, 180.0, 0.8, 900.0, seed=1)
    hosts = [uniform_host(f"h{n}", 8, 8) for n in range(1000)]
    outcome, _ = simulate(visits, hosts, GroupShape(3), Timing(queue_size=10))
    assert outcome.groups == 2000 and outcome.served == len(visits) and outcome.wait_p99_s == 0


def test_generated_traffic_follows_the_day_and_the_law() -> None:
    visits = generate_trace(50_000, 24.0, 180.0, 0.8, 900.0, seed=3)
    assert visits == generate_trace(50_000, 24.0, 180.0, 0.8, 900.0, seed=3)
    assert len(visits) == pytest.approx(50_000, rel=0.02)
    arrivals_h = np.array([visit.arrival_s for visit in visits]) / 3600
    assert np.all(np.diff(arrivals_h) >= 0) and arrivals_h[0] >= 0 and arrivals_h[-1] <= 24
    by_hour, _ = np.histogram(arrivals_h, bins=24, range=(0, 24))
    # 1.7 against 0.3 of the mean, averaged over two hours.
    noon, midnight = by_hour[11:13].sum(), by_hour[[0, 23]].sum()
    assert noon / midnight == pytest.approx(1.69 / 0.31, rel=0.1)
    durations_s = np.array([visit.duration_s for visit in visits])
    assert np.median(durations_s) == pytest.approx(180, rel=0.03)
    assert durations_s.max() == 900


def test_a_trace_is_read_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    text = "user,arrival_s,duration_s\nb,10,60\n\na,5.5,30\n"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(text, encoding)
        assert read_trace(path) == [Visit(5.5, 30.0), Visit(10.0, 60.0)]


@pytest.mark.parametrize(
    "mistake",
    [
        *("--sessions=-5", "--sessions=nan", "--hours=0", "--hours=-1", "--median-s=0"),
        *("--sigma=-1", "--price=-1", "--price=inf", "--hosts=0"),
    ],
)
def test_an_amount_that_cannot_be_is_named(
    mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["simulate", mistake])
    assert left.value.code == 2
    assert f"argument {mistake.partition('=')[0]}: must be" in capsys.readouterr().err


def test_more_sessions_than_memory_holds_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--sessions", "1e15"]) == 1
    assert capsys.readouterr().err.startswith("characters: Unable to allocate")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arrival,duration\n1,2\n", "must name arrival_s and duration_s"),
        ("", "must name"),
        ("arrival_s,duration_s\n", "no sessions"),
        ("arrival_s,duration_s\n1,2\n1,x\n", r"trace\.csv:3: two numbers"),
        ("arrival_s,duration_s\n1\n", "two numbers"),
        ("arrival_s,duration_s\n-1,2\n", "must be positive"),
        ("arrival_s,duration_s\n1,nan\n", "must be positive"),
        ("arrival_s,duration_s\n1,0\n", "must be positive"),
        ("arrival_s,duration_s\n1,5,2\n", r"trace\.csv:2: there are more values"),
        ("arrival_s;duration_s\n1;2\n", "must name"),
        ("arrival_s,duration_s\n" + "1" * 200_000 + ",2\n", r"trace\.csv: field larger"),
        ("arrival_s,duration_s\n\udcff,2\n", r"trace\.csv: 'utf-8' codec"),
    ],
)
def test_a_trace_with_a_mistake_names_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_the_command_prints_a_table_a_picture_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "day.png"
    arguments = ["simulate", "--hosts", "2", "--sessions", "300", "--price", "2.5"]
    wanted = ["--set", "server.queue_size=3", "--set", "engine.tensor_parallel=3"]
    assert cli.main([*arguments, *wanted, "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    outcome = json.loads(lines[-1])
    assert outcome["groups"] == 4 and outcome["cost_per_live_minute"] > 0
    assert any(line.startswith("served") for line in lines[:-1])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    arguments = ["simulate", "--sessions", "5", "--plot", str(tmp_path / "day.png")]
    assert cli.main(arguments) == 1
    assert "characters-serve[plot]" in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--trace", "nowhere.csv"]) == 1
    assert "nowhere.csv" in capsys.readouterr().err


def test_the_picture_shows_a_fleet_without_visitors_too(tmp_path: Path) -> None:
    outcome, course = simulate([Visit(0.0, 1.0)], ONE_GROUP, SHAPE, PROMPT)
    draw(course, outcome, tmp_path / "day.png")
    assert (tmp_path / "day.png").stat().st_size > 1000
