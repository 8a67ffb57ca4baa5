"""In: a Python environment. Out: known faults and licences of what is installed in it.

    make audit

Asks pip-audit and pip-licenses, which must be installed beside this script's own Python. Exit 0:
all was asked about and nothing found; 1: something to look at; 2: not all could be asked about,
so that nothing is known of the rest. pip-audit itself calls that "no known vulnerabilities".
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

OURS = "characters-serve"
# Of packages that only an extra or a tool brings in; the LGPL is met by using the library as it is.
KNOWN_LICENCES = {
    "espeakng-loader": "GPL-3, for training only",
    "piper-tts": "GPL-3, of the extra `piper`",
}
_FREE = re.compile(
    r"MIT|BSD|Apache|ISC|PSF|Python Software|MPL|Mozilla|LGPL|Lesser General|Zlib|CC0|Unlicense"
)
_COPYLEFT = re.compile(r"(?<!L)GPL|(?<!Lesser )General Public")


def faults(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Of pip-audit's JSON: what is known to be faulty, and what nothing is known about."""
    found: list[str] = []
    unknown: list[str] = []
    for package in report["dependencies"]:
        if package["name"] == OURS:
            continue
        if "skip_reason" in package:
            unknown.append(package["name"])
        for fault in package.get("vulns", []):
            fixed = ", ".join(fault["fix_versions"]) or "no version yet"
            found.append(f"{package['name']} {package['version']}: {fault['id']}, fixed in {fixed}")
    return found, unknown


def licences(report: list[dict[str, str]]) -> list[str]:
    """Of pip-licenses' JSON: those that bind what is distributed with them, or say nothing."""
    return [
        f"{package['Name']} {package['Version']}: {package['License']}"
        for package in report
        if package["Name"] not in (OURS, *KNOWN_LICENCES)
        and (_COPYLEFT.search(package["License"]) or not _FREE.search(package["License"]))
    ]


def verdict(found: list[str], unknown: list[str], asked: int, bad: list[str]) -> int:
    """Prints what there is to know; returns the exit status."""
    for line in (*found, *(f"licence of {line}" for line in bad)):
        print(line)
    if unknown:
        names = "any of them" if len(unknown) == asked else ", ".join(unknown)
        print(f"NOT AUDITED: of {asked} packages there was no advisory data for {names}")
    else:
        print(f"{asked} packages audited, {len(found)} known faults")
    print(f"{len(bad)} licences to look at")
    return 1 if found or bad else 2 if unknown else 0


def _ask(tool: str, *arguments: str) -> Any:
    done = subprocess.run(
        [Path(sys.executable).parent / tool, *arguments], capture_output=True, text=True
    )
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"NOT AUDITED: {tool} could not be asked: {last}")
        raise SystemExit(2) from None


def main(python: str) -> int:
    paths = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([python, "-c", paths], text=True).strip()
    report = _ask("pip-audit", "--format=json", "--progress-spinner=off", f"--path={packages}")
    found, unknown = faults(report)
    asked = sum(package["name"] != OURS for package in report["dependencies"])
    bad = licences(_ask("pip-licenses", f"--python={python}", "--format=json"))
    return verdict(found, unknown, asked, bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
