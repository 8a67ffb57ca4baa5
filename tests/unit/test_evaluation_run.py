"""`characters eval` over real clips of a small model: scores, a second run, exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from characters_serve import cli
from characters_serve.config import Config, EngineConfig
from characters_serve.evaluation import speech, syncnet
from characters_serve.evaluation.clips import Clip, Score
from characters_serve.evaluation.lse import LipSync
from characters_serve.evaluation.run import Plan, Scorer, evaluate
from characters_serve.evaluation.speech import prepare_speech, read_wav, write_wav
from tests.unit.small_model import SMALL

RATE = SMALL.audio.sample_rate
CPU = Config(model=SMALL, engine=EngineConfig(device="cpu", dtype="float32"))
PLAIN = CPU.model_copy(
    update={"optimizations": CPU.optimizations.model_copy(update={"ring_cache": False})}
)


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one recording; the network that scores has made-up weights."""
    torch.manual_seed(0)
    save_file(syncnet.OwnSyncNet().state_dict(), tmp_path / "own.safetensors")
    monkeypatch.setattr(syncnet, "OWN_WEIGHTS", tmp_path / "own.safetensors")
    folder = tmp_path / "recordings"
    folder.mkdir()
    noise = np.random.default_rng(0).normal(0, 3000, 2 * RATE).astype(np.int16)
    write_wav(folder / "noise.wav", noise, RATE)
    return folder


def plan(tmp_path: Path, recordings: Path, **changes: object) -> Plan:
    settings: dict[str, object] = {
        "clips": 2,
        "reruns": 1,
        "seconds": 1.0,
        "window_s": 0.5,
        "recordings": recordings,
    }
    return Plan({"plain": PLAIN, "ring": CPU}, tmp_path / "out", **(settings | changes))  # type: ignore[arg-type]


def test_every_run_of_every_configuration_is_scored(tmp_path: Path, recordings: Path) -> None:
    scores = evaluate(plan(tmp_path, recordings, clips=1))
    assert list(scores) == [("plain", 0), ("plain", 1), ("ring", 0)]
    # 24 frames have 19 windows; of half a second's 12, 7.
    assert [len(clip.windows) for (clip,) in scores.values()] == [2, 2, 2]
    # Every run has noise and idle motion of its own.
    assert len({clip.whole.distance for (clip,) in scores.values()}) == 3
    looks = np.load(tmp_path / "out" / "looks" / "ring-0-000.npy")
    assert looks.shape == (2, SMALL.height, SMALL.width)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The clips that were scored, in order; the scores are made up of their names."""
    names: list[str] = []

    def score(_scorer: Scorer, clip: Clip) -> Score:
        if "the disk is full" in names:
            raise OSError(names.pop())
        names.append(clip.name)
        return Score(LipSync(float(clip.seed % 997), 1.5, clip.run), [])

    monkeypatch.setattr(Scorer, "score", score)
    return names


def test_a_second_run_goes_on_where_the_first_broke_off(
    tmp_path: Path, recordings: Path, scored: list[str]
) -> None:
    file = tmp_path / "out" / "scores.jsonl"
    evaluate(plan(tmp_path, recordings, clips=1))
    scored.append("the disk is full")
    with pytest.raises(OSError, match="disk is full"):
        evaluate(plan(tmp_path, recordings))
    before = file.read_text()
    assert [json.loads(line)["clip"] for line in before.splitlines()] == scored
    with file.open("a") as broken:
        broken.write('{"key": "half a li')

    resumed = evaluate(plan(tmp_path, recordings))
    assert len(scored) == 6 and len(set(scored)) == 6
    assert file.read_text().startswith(before)
    assert evaluate(plan(tmp_path, recordings)) == resumed
    assert [score.whole.offset for score in resumed["plain", 1]] == [1, 1]
    evaluate(plan(tmp_path, recordings, clips=3, reruns=0))
    assert scored[6:] == ["plain-0-002", "ring-0-002"]


def test_a_changed_configuration_of_the_same_name_is_scored_anew(
    tmp_path: Path, recordings: Path, scored: list[str]
) -> None:
    one = plan(tmp_path, recordings, clips=1, reruns=0)
    evaluate(one)
    model = SMALL.model_copy(update={"noise_levels": (1.0, 0.6, 0.25)})
    more = CPU.model_copy(update={"model": model})
    evaluate(replace(one, configurations={"plain": PLAIN, "ring": more}))
    assert scored == ["plain-0-000", "ring-0-000", "ring-0-000"]
    evaluate(replace(one, window_s=1.0))
    assert len(scored) == 5


def run(tmp_path: Path, recordings: Path, *more: str) -> int:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(json.loads(CPU.model_dump_json(include={"model", "engine"}))))
    given = f"--clips 1 --seconds 0.5 --reruns 0 --jobs 1 --gate --speech {recordings}"
    folder = ["--out", str(tmp_path / "out"), *given.split()]
    return cli.main(["eval", *folder, *(word.replace("FILE", str(file)) for word in more)])


ONE = ("--config", "ring=FILE")
OTHER = ("--config", "plain=FILE optimizations.ring_cache=false")


def test_the_gate_fails_the_worse_of_two(
    tmp_path: Path, recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes, worse = [], []
    for order in ((*ONE, *OTHER), (*OTHER, *ONE)):
        codes.append(run(tmp_path, recordings, *order, "--band", "0"))
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        worse.append(result["rows"][1]["difference_d"]["mean"] > 0)
        assert "not comparable" in result["scorer"] and {"command", "commit"} <= result.keys()
    assert sorted(worse) == [False, True]
    assert codes[worse.index(True)] == cli.EXIT_GATE
    assert run(tmp_path, recordings, *ONE, "--band", "0") == 0  # alone, there is nothing to fail


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--config", "just-a-file.yaml"], "expected NAME=FILE"),
        ([*ONE, *ONE], "two configurations have one name"),
        (["--config", "x=FILE optimizations.fly=true"], "there is no such setting"),
        (ONE, "a band is needed"),
    ],
)
def test_mistakes_on_the_command_line_are_told(
    tmp_path: Path,
    recordings: Path,
    capsys: pytest.CaptureFixture[str],
    more: Sequence[str],
    words: str,
) -> None:
    assert run(tmp_path, recordings, *more) == cli.EXIT_CONFIG
    assert words in capsys.readouterr().err


def test_a_missing_network_is_told(
    tmp_path: Path, recordings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = (*ONE, "--band", "1", "--syncnet", str(tmp_path / "syncnet_v2.model"))
    assert run(tmp_path, recordings, *missing) == cli.EXIT_FAILED
    assert "syncnet_v2.model" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_the_shipped_network_hears_the_shipped_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two presets, each rendered in a process of its own."""
    monkeypatch.setattr(speech, "_SENTENCES", speech._SENTENCES[:2])
    config = Config(engine=EngineConfig(device="cpu"))
    scores = evaluate(Plan({"tiny": config}, tmp_path, clips=2, reruns=0, seconds=2.0, jobs=2))
    for score in scores["tiny", 0]:
        assert abs(score.whole.offset) <= 1
        assert score.whole.confidence > 1.5


def test_each_clip_says_its_own_sentences_and_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "_SENTENCES", ("Good morning.", "Bees are polite.", "Oh!"))
    files = prepare_speech(tmp_path, 3, 2.5, RATE)
    said = [read_wav(file) for file in files]
    assert [len(pcm) for pcm in said] == [round(2.5 * RATE)] * 3
    assert all(np.abs(pcm).max() > 2000 for pcm in said)
    assert not np.array_equal(said[0], said[1])
    times = [file.stat().st_mtime_ns for file in files]
    prepare_speech(tmp_path, 3, 2.5, RATE)
    assert [file.stat().st_mtime_ns for file in files] == times
