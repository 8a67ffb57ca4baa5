"""Which code a measurement was made of. Knows nothing of what was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit of the code being measured, marked where files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
