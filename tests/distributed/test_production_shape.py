"""The one command that measures the production shape, on ranks that are processes on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.unit.small_model import SMALL

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "small.yaml"
    model = SMALL.model_dump(mode="json", include=SMALL.model_fields_set)
    config.write_text(yaml.safe_dump({"model": model}))
    return subprocess.run(
        ["scripts/run_production_shape.sh", "--seconds", "0.5", "--set", "engine.device=cpu"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "CONFIG": str(config),
            "OUT": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_two_ranks_are_measured_and_the_result_says_what_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, RANKS="2")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "step_2xcpu_tp2.json").read_text())
    assert result == json.loads(done.stdout.splitlines()[-1])
    assert (result["ranks"], result["all_reduce"], result["weights"]) == (2, "gloo", "synthetic")
    assert (result["heads"], result["mlp_columns"]) == ([1, 1], [64, 32])
    assert result["step_ms_p99"] >= result["step_ms_median"] > 0 and result["steps"] > 0
    assert "--ranks 2" in result["command"] and result["commit"] and result["date"]


def test_without_gpus_nothing_is_measured_and_it_is_said(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert "8 ranks: not run, 0 GPUs" in done.stderr and "nothing was run" in done.stderr
    assert not list(tmp_path.glob("*.json"))
