"""Which code and device a measurement was made of, and how its result is handed over.

Knows nothing of what was measured.
"""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def origin() -> dict[str, str]:
    """What every result carries: the command as it was typed, the code, and the time."""
    spec = sys.modules["__main__"].__spec__
    program = ["python", "-m", spec.name] if spec else ["characters"]
    return {
        "torch": torch.__version__,
        "command": shlex.join([*program, *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The commit of the code being measured, marked where files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def save(result: dict[str, Any], path: Path | None) -> None:
    """Writes the file that was asked for, if one was."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def report(result: dict[str, Any], path: Path | None) -> None:
    """The file, and the last line of what a benchmark prints."""
    save(result, path)
    sys.stdout.write(json.dumps(result) + "\n")
