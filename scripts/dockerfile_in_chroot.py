"""Runs the Dockerfile's steps in chroots, where no container engine is; starts what they made.

    debootstrap --variant=minbase \\
        --include=python3,python3-venv,python-is-python3,ca-certificates bookworm /tmp/base
    python -m scripts.dockerfile_in_chroot --base /tmp/base --work /tmp/image

In: a Dockerfile, and a root that stands in for its base image. Out: a root for each stage; then the
last one's command, as its user, until the health check passes and SIGTERM ends it. As root.
What a base image has and the stand-in lacks is not tried, nor are layers, limits and networks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEALTHY_S = 180.0
STOP_S = 60.0
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def instructions(text: str) -> list[tuple[str, str]]:
    """(word, the rest of its line); comments and continuations are gone."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word, rest) for word, rest in found]


class Stage:
    """One FROM and what follows it."""

    def __init__(self, base: Path, root: Path, binds: Sequence[Path]) -> None:
        subprocess.run(["cp", "-a", "--reflink=auto", base, root], check=True)
        self.root = root
        self.binds = binds
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        self.arguments: dict[str, str] = {}
        self.folder = "/"
        self.user = "0:0"
        self.said: dict[str, str] = {}

    def command(self, argv: Sequence[str], more: Mapping[str, str]) -> list[str]:
        """argv in the root, with /dev, /proc and what is bound; the mounts end with it."""
        mounts = [("/dev", "/dev"), ("/proc", "/proc"), *((str(b), str(b)) for b in self.binds)]
        for _, inside in mounts:
            (self.root / inside[1:]).mkdir(parents=True, exist_ok=True)
        steps = [
            shlex.join(["mount", "--rbind", outside, str(self.root / inside[1:])])
            for outside, inside in mounts
        ]
        variables = {**self.environment, **more}
        chroot = ["chroot", f"--userspec={self.user}", str(self.root), "env", "-i"]
        chroot += [f"{name}={value}" for name, value in variables.items()]
        chroot += ["sh", "-c", 'cd "$0" && exec "$@"', self.folder, *argv]
        return [
            "unshare",
            "--mount",
            "sh",
            "-ec",
            "; ".join([*steps, f"exec {shlex.join(chroot)}"]),
        ]

    def run(self, script: str, more: Mapping[str, str]) -> None:
        sys.stderr.write(f"RUN {script}\n")
        argv = self.command(["sh", "-c", script], {**self.arguments, **more})
        subprocess.run(argv, check=True, stdout=sys.stderr)

    def copy(self, rest: str, context: Path) -> None:
        *sources, target = shlex.split(rest)
        into = self.root / os.path.join(self.folder, target)[1:]
        for source in sources:
            found = context / source.lstrip("/")
            whole = found.is_dir() or target.endswith("/")
            place = into / found.name if not found.is_dir() and whole else into
            place.parent.mkdir(parents=True, exist_ok=True)
            if found.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(found, place, symlinks=True, ignore=ignore, dirs_exist_ok=True)
            else:
                shutil.copy2(found, place)

    def expand(self, text: str) -> str:
        known = {**self.environment, **self.arguments}
        return _VARIABLE.sub(lambda match: known.get(match[1] or match[2], ""), text)


def build(
    dockerfile: Path,
    base: Path,
    work: Path,
    arguments: Mapping[str, str],
    binds: Sequence[Path],
    environment: Mapping[str, str],
) -> Stage:
    """environment: for RUN only, as a build host's proxy is. Returns the last stage."""
    stages: list[Stage] = []
    names: dict[str, Stage] = {}
    for word, rest in instructions(dockerfile.read_text()):
        if word == "FROM":
            stages.append(Stage(base, work / f"stage{len(stages)}", binds))
            if " AS " in rest:
                names[rest.split(" AS ")[1]] = stages[-1]
            continue
        if not stages:
            continue  # an ARG of the base image's tag
        stage = stages[-1]
        match word:
            case "ARG":
                name, _, default = rest.partition("=")
                stage.arguments[name] = arguments.get(name, default)
            case "ENV":
                for setting in shlex.split(rest):
                    name, _, value = setting.partition("=")
                    stage.environment[name] = stage.expand(value)
            case "WORKDIR":
                stage.folder = rest
                (stage.root / rest[1:]).mkdir(parents=True, exist_ok=True)
            case "COPY" if rest.startswith("--from="):
                name, files = rest.removeprefix("--from=").split(None, 1)
                stage.copy(files, names[name].root)
            case "COPY":
                stage.copy(rest, ROOT)
            case "RUN":
                stage.run(rest, environment)
            case "USER":
                stage.user = rest
            case _:
                stage.said[word] = rest
    return stages[-1]


def serves(stage: Stage) -> None:
    """Without a key it must refuse; with one it becomes healthy, and SIGTERM ends it."""
    argv = [*json.loads(stage.said["ENTRYPOINT"]), *json.loads(stage.said["CMD"])]
    # Elsewhere tini is process 1, which reaps by itself.
    reaps = {"TINI_SUBREAPER": "1"}
    refused = subprocess.run(stage.command(argv, reaps), capture_output=True, text=True)
    sys.stderr.write(f"without a key: exit {refused.returncode}, {refused.stderr.strip()}\n")
    assert refused.returncode == 2 and "CHARACTERS_API_KEY is not set" in refused.stderr
    probe = json.loads(stage.said["HEALTHCHECK"].split("CMD", 1)[1])
    key = {"CHARACTERS_API_KEY": secrets.token_urlsafe()}
    server = subprocess.Popen(stage.command(argv, {**reaps, **key}), stdout=sys.stderr)
    try:
        began_s = time.monotonic()
        while subprocess.run(stage.command(probe, {}), capture_output=True).returncode != 0:
            assert server.poll() is None, f"exit {server.returncode}"
            assert time.monotonic() - began_s < HEALTHY_S, "never healthy"
            time.sleep(1)
        ready = [word.replace("/healthz/live", "/healthz/ready") for word in probe]
        while subprocess.run(stage.command(ready, {}), capture_output=True).returncode != 0:
            assert time.monotonic() - began_s < HEALTHY_S, "no group became ready"
            time.sleep(1)
        sys.stderr.write(f"ready after {time.monotonic() - began_s:.0f} s\n")
    finally:
        server.terminate()
        code = server.wait(STOP_S)
    sys.stderr.write(f"after SIGTERM: exit {code}\n")
    assert code in (0, 128 + signal.SIGTERM)


def pairs(settings: Sequence[str]) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in settings)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the Dockerfile's steps in chroots.")
    parser.add_argument("--base", type=Path, required=True, help="stands in for the base image")
    parser.add_argument("--work", type=Path, required=True, help="a folder that is made for it")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bind", type=Path, action="append", default=[], help="of this machine")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="of RUN")
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    dockerfile = ROOT / "docker/Dockerfile"
    arguments, environment = pairs(options.build_arg), pairs(options.env)
    stage = build(dockerfile, options.base, options.work, arguments, options.bind, environment)
    serves(stage)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
