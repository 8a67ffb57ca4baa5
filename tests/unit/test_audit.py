"""scripts/audit.py: silence about a package is not taken for its innocence."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import audit

SOUND = {"name": "numpy", "version": "2.4.6", "vulns": []}
FAULTY = {
    "name": "pillow",
    "version": "13.0.0",
    "vulns": [{"id": "PYSEC-2026-1", "fix_versions": ["13.0.1"], "aliases": []}],
}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited"}
OURS = {"name": "characters-serve", "skip_reason": "distribution marked as editable"}


@pytest.mark.parametrize(
    ("packages", "status", "says"),
    [
        ([SOUND, OURS], 0, "1 packages audited, 0 known faults"),
        ([SOUND, FAULTY], 1, "pillow 13.0.0: PYSEC-2026-1, fixed in 13.0.1"),
        ([SOUND, UNKNOWN], 2, "NOT AUDITED: of 2 packages there was no advisory data for torch"),
        ([UNKNOWN, OURS], 2, "NOT AUDITED: of 1 packages there was no advisory data for any"),
        ([FAULTY, UNKNOWN], 1, "NOT AUDITED"),
    ],
)
def test_what_is_not_known_is_not_called_sound(
    packages: list[dict[str, Any]], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, unknown = audit.faults({"dependencies": packages})
    asked = len([package for package in packages if package is not OURS])
    assert audit.verdict(found, unknown, asked, []) == status
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("licence", "fine"),
    [
        ("MIT License", True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSL-1.0", True),
        ("Mozilla Public License 2.0 (MPL 2.0)", True),
        ("LGPL-2.1-or-later", True),
        ("GNU Lesser General Public License v3 (LGPLv3)", True),
        ("GPL-3.0-or-later", False),
        ("GNU General Public License v3 (GPLv3)", False),
        ("AGPL-3.0 AND MIT", False),
        ("UNKNOWN", False),
    ],
)
def test_licences_that_bind_or_say_nothing_are_named(licence: str, fine: bool) -> None:
    bad = audit.licences([{"Name": "some", "Version": "1.0", "License": licence}])
    assert bad == ([] if fine else [f"some 1.0: {licence}"])
    assert audit.verdict([], [], 1, bad) == (0 if fine else 1)


def test_a_tool_that_cannot_ask_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        audit._ask("python", "-c", "raise SystemExit('Name or service not known')")
    assert left.value.code == 2
    said = "NOT AUDITED: python could not be asked: Name or service not known"
    assert said in capsys.readouterr().out
