"""The session benchmark's figures, from invented receptions; and once from a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from characters_serve.bench.session import (
    OnsetFinder,
    Packet,
    Picture,
    Reception,
    Report,
    lost_packets,
    summary,
    unwrapped,
)
from tests.e2e.rig import running_server

FPS = 24


def reception(*, seconds: int = 4, voice_late_s: float = 0.0, beep_s: float = 0.0) -> Reception:
    """Pictures 50 ms and voice 20 ms after they are due; both timestamps wrap on the way."""
    seen = Reception(offered_s=99.5)
    video0, audio0 = 2**32 - 90_000, 2**32 - 48_000
    for number in range(seconds * FPS):
        at_s = 100.05 + number / FPS
        stamp = (video0 + number * 3750) % 2**32
        seen.packets["video"].append(Packet(at_s, (65_500 + number) % 65_536, stamp, 1000))
        flash = number % FPS < 3
        seen.pictures.append(Picture(at_s, stamp, (65_530 + number) % 65_536, flash))
    for number in range(seconds * 50):
        stamp = (audio0 + number * 960) % 2**32
        at_s = 100.02 + voice_late_s + number / 50
        seen.packets["audio"].append(Packet(at_s, number, stamp, 120))
    seen.onsets = [(audio0 + int((s + beep_s) * 48_000)) % 2**32 for s in range(seconds)]
    seen.reports["video"].append(Report(1_700_000_002.0, (video0 + 2 * 90_000) % 2**32))
    seen.reports["audio"].append(Report(1_700_000_001.0, (audio0 + 48_000) % 2**32))
    return seen


def test_a_perfect_reception() -> None:
    figures = summary(reception(beep_s=0.0065))
    assert figures["fps"] == 24 and figures["join_s"] == 0.55
    assert figures["longest_gap_ms"] == pytest.approx(41.7, abs=0.1)
    assert figures["freezes"] == figures["frozen_share"] == figures["audio_lost_share"] == 0
    assert figures["repeated"] == figures["skipped"] == figures["backward"] == 0
    assert figures["content_av_ms"] == pytest.approx(6.5, abs=0.1)
    assert figures["av_lead_ms"] == pytest.approx(30, abs=1)
    assert figures["video_kbps"] == pytest.approx(192, rel=0.02)


def test_a_freeze_is_a_gap_of_150_ms_more_than_the_mean() -> None:
    seen = reception()
    seen.pictures = [p for n, p in enumerate(seen.pictures) if not 30 <= n < 35 and n != 60]
    figures = summary(seen)
    assert figures["freezes"] == 1 and figures["skipped"] == 6
    assert figures["longest_gap_ms"] == pytest.approx(250, abs=0.1)
    assert figures["frozen_share"] == pytest.approx(0.25 / figures["watched_s"], abs=0.001)


def test_repeated_and_misplaced_pictures_are_counted() -> None:
    seen = reception()
    third, fourth = seen.pictures[40:42]
    seen.pictures[41] = Picture(fourth.at_s, fourth.timestamp, third.counter, False)
    assert summary(seen)["repeated"] == 1 and summary(seen)["skipped"] == 1
    seen.pictures[41] = Picture(fourth.at_s, fourth.timestamp, (third.counter or 0) - 3, False)
    assert summary(seen)["backward"] == 1


def test_lost_packets_count_once_whatever_came_late_or_twice() -> None:
    numbers = [65_533, 65_534, 1, 0, 2, 2, 6, 7]  # 65535, 3, 4 and 5 never came
    packets = [Packet(0.0, number, 0, 1) for number in numbers]
    packets.append(Packet(0.0, 30_000, 0, 1, repeats=True))
    share, longest = lost_packets(packets)
    assert share == pytest.approx(4 / 11) and longest == 3
    assert lost_packets([]) == (0.0, 0)


def test_unwrapping_goes_both_ways() -> None:
    assert unwrapped([65_535, 0, 65_534, 3], 16) == [65_535, 65_536, 65_534, 65_539]
    assert unwrapped([], 16) == []


def test_ordinary_pictures_have_no_pattern_figures_and_none_is_an_error() -> None:
    seen = reception()
    seen.pictures = [Picture(p.at_s, p.timestamp, None, False) for p in seen.pictures]
    assert "content_av_ms" not in summary(seen)
    with pytest.raises(ValueError, match="no pictures"):
        summary(Reception(offered_s=0.0))


def test_an_onset_needs_quiet_before_it() -> None:
    finder = OnsetFinder()
    beep = np.full(4800, 8000, np.int16)
    quiet = np.zeros(43_200, np.int16)
    at, found = 2**32 - 48_000, []
    for piece in (quiet, beep, quiet[:9600], beep, quiet, beep):
        found += finder.find(piece, at)
        at += len(piece)
    assert found == [2**32 - 48_000 + 43_200, (2**32 - 48_000 + 43_200 + 62_400) % 2**32]


def test_it_measures_a_server_of_this_machine(tmp_path: Path) -> None:
    with running_server(tmp_path / "r", "engine.kind=pattern", "agent.kind=none") as server:
        command = [sys.executable, "-m", "characters_serve.bench.session", "--url", server.url]
        done = subprocess.run([*command, "--seconds", "4"], capture_output=True, text=True)
        refused = subprocess.run([*command, "--viewers", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (viewer,) = result["viewers"]
    assert viewer["fps"] > 0 and viewer["backward"] == 0
    assert abs(viewer["content_av_ms"]) < 30  # by the sender's clock: no load can move it
    assert result["server_cores_per_session"] > 0 and result["server_rss_mb_per_session"] > 50
    assert refused.returncode == 1 and "503" in refused.stderr
