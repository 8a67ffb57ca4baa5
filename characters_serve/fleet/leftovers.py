"""In: folders of groups. Out: whose they are; those of gateways that died are removed.

A gateway holds a lock on each folder that it makes; the kernel lets go of it when the gateway dies,
however it dies. Touches nothing that is not named like one of ours. Knows no group's state.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

RUN_PREFIX = "characters-"
# A folder is made a moment before it is locked.
YOUNG_S = 10.0
_GROUP = re.compile(r"g\d{1,4}-[0-9a-f]{6}")
_RUN = re.compile(re.escape(RUN_PREFIX) + r"[a-z0-9_]{8}")


class FolderHold:
    """The folder is in use for as long as this is held, or until this process is gone."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sweep(run_dir: Path | None) -> list[Path]:
    """Removes what dead gateways left: groups in `run_dir`, and whole temporary run folders."""
    swept = _sweep(run_dir, _GROUP) if run_dir is not None and run_dir.is_dir() else []
    swept += _sweep(Path(tempfile.gettempdir()), _RUN)
    for folder in swept:
        log.info("removed %s, which a server that is gone had left", folder)
    return swept


def _sweep(parent: Path, name: re.Pattern[str]) -> list[Path]:
    candidates = [folder for folder in parent.iterdir() if name.fullmatch(folder.name)]
    abandoned = [folder for folder in candidates if _is_abandoned(folder)]
    if abandoned:
        commands = _command_lines()
        abandoned = [f for f in abandoned if not any(str(f) in line for line in commands)]
    for folder in abandoned:
        shutil.rmtree(folder, ignore_errors=True)
    return abandoned


def _is_abandoned(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if folder.is_symlink() or not folder.is_dir() or status.st_uid != os.getuid():
            return False
        if time.time() - status.st_mtime < YOUNG_S or not _is_ours(folder):
            return False
        FolderHold(folder).release()
    except OSError:  # locked, or gone in the meantime
        return False
    return True


def _is_ours(folder: Path) -> bool:
    """A group's folder has its configuration; a run folder holds nothing but groups."""
    if _GROUP.fullmatch(folder.name):
        return (folder / "config.json").is_file()
    return all(_GROUP.fullmatch(entry.name) for entry in folder.iterdir())


def _command_lines() -> list[str]:
    lines = []
    for process in psutil.process_iter():
        try:
            lines.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return lines
