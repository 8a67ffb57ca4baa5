"""pyproject.toml: every package that runs has bounds, and what is patched has one version."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())[
    "project"
]
NEEDED = [Requirement(line) for line in PROJECT["dependencies"]]


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: needed.name)
def test_a_package_has_a_lowest_and_an_untested_version(needed: Requirement) -> None:
    operators = {specifier.operator for specifier in needed.specifier}
    assert operators == {"=="} or operators == {">=", "<"}, str(needed)
    assert needed.url is None, "from a registry, by name"
    assert needed.specifier.contains(version(needed.name)), "what the tests run with"


def test_what_is_patched_has_one_version() -> None:
    for name in ("aiortc", "aioice"):
        (patched,) = (needed for needed in NEEDED if needed.name == name)
        assert [specifier.operator for specifier in patched.specifier] == ["=="]
