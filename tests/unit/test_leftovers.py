"""Folders of dead gateways: what is swept, and all that is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from characters_serve.fleet.leftovers import FolderHold, sweep


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def group_in(parent: Path, name: str = "g0-a1b2c3", old: bool = True) -> Path:
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if old:
        age(folder)
    return folder


def age(folder: Path) -> None:
    os.utime(folder, (time.time() - 60, time.time() - 60))


def test_an_abandoned_group_goes(tmp_path: Path) -> None:
    abandoned = group_in(tmp_path / "run")
    assert sweep(tmp_path / "run") == [abandoned]
    assert not abandoned.exists() and (tmp_path / "run").is_dir()


def test_what_is_held_or_young_stays(tmp_path: Path) -> None:
    held, young = group_in(tmp_path, "g0-aaaaaa"), group_in(tmp_path, "g1-bbbbbb", old=False)
    hold = FolderHold(held)
    assert sweep(tmp_path) == []
    hold.release()
    assert sweep(tmp_path) == [held]
    assert young.is_dir()


def test_the_kernel_lets_go_of_what_a_killed_process_held(tmp_path: Path) -> None:
    folder = group_in(tmp_path)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from characters_serve.fleet.leftovers import FolderHold\n"
        "hold = FolderHold(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    # The folder is not in the command line of the holder: it is found by its lock alone.
    link = tmp_path / "elsewhere"
    link.symlink_to(folder)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(link)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert sweep(tmp_path) == []
        holder.kill()
        holder.wait()
        assert sweep(tmp_path) == [folder]


def test_a_folder_that_a_process_was_given_stays(tmp_path: Path) -> None:
    folder = group_in(tmp_path)
    code = "print('on', flush=True); import time; time.sleep(60)"
    arguments = [sys.executable, "-c", code, "--group-dir", str(folder)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None and user.stdout.readline() == b"on\n"
        assert sweep(tmp_path) == []
        user.kill()


@pytest.mark.parametrize("name", ["g0-a1b2c", "g-a1b2c3", "g0-A1B2C3", "models", "g0-a1b2c3.bak"])
def test_other_names_are_not_ours(tmp_path: Path, name: str) -> None:
    other = group_in(tmp_path, name)
    assert sweep(tmp_path) == [] and other.is_dir()


def test_a_group_without_its_configuration_and_a_link_are_not_ours(tmp_path: Path) -> None:
    bare, target = tmp_path / "g0-a1b2c3", group_in(tmp_path / "precious", "folder")
    bare.mkdir()
    age(bare)
    (tmp_path / "g1-a1b2c3").symlink_to(target)
    assert sweep(tmp_path) == [] and bare.is_dir() and target.is_dir()


def test_temporary_run_folders_go_unless_something_else_is_in_them(tmp_path: Path) -> None:
    abandoned, other = (
        tmp_path / "tmp" / "characters-ab12cd34",
        tmp_path / "tmp" / "characters-mine0000",
    )
    group_in(abandoned)
    group_in(other)
    (other / "notes.txt").write_text("keep")
    age(abandoned)
    age(other)
    assert sweep(None) == [abandoned]
    assert other.is_dir() and not abandoned.exists()
