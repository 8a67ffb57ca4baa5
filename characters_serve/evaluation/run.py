"""In: configurations to compare. Out: a score for each of their clips, in OUT/scores.jsonl.

A score is written once, when its clip is done; a second run goes on where the first ended, and may
add clips, reruns and configurations. A score stands for one configuration, weights, picture and
speech, and is not used for others; a change of the code it cannot see, so that needs another OUT.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tqdm import tqdm

from characters_serve.config import Config
from characters_serve.engine.device import choose_device
from characters_serve.evaluation import syncnet as networks
from characters_serve.evaluation.clips import Clip, Score, score_clip
from characters_serve.evaluation.lse import LipSync
from characters_serve.evaluation.speech import prepare_speech
from characters_serve.gateway.characters import load_characters
from characters_serve.model.weights import BUILTIN
from characters_serve.render import OfflineRenderer

LOOKED_AT: Final = 5
"""Clips of each run whose pictures are kept, to compare them by their pixels."""


@dataclass(frozen=True, slots=True)
class Plan:
    """configurations: by name; the first is the baseline, and the one that is run again.
    syncnet: the published weights; without them this project's own network scores.
    pictures, recordings: folders, in place of the preset characters and the server's voice."""

    configurations: dict[str, Config]
    out: Path
    clips: int = 51
    reruns: int = 4
    seconds: float = 5.0
    window_s: float = 10.0
    syncnet: Path | None = None
    pictures: Path | None = None
    recordings: Path | None = None
    jobs: int = 1

    @property
    def baseline(self) -> str:
        return next(iter(self.configurations))

    @property
    def runs(self) -> list[tuple[str, int]]:
        reruns = [(self.baseline, run) for run in range(self.reruns + 1)]
        return reruns + [(name, 0) for name in list(self.configurations)[1:]]


Scores = dict[tuple[str, int], list[Score]]
"""By configuration and run, in the order of the clips."""


def evaluate(plan: Plan) -> Scores:
    """Renders and scores what is missing. Raises OSError, ValueError (WeightsError among them)."""
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "looks").mkdir(exist_ok=True)
    clips = _clips(plan)
    prints = _fingerprints(plan)
    keys = {clip: _key(plan, clip, prints[clip.configuration]) for clip in clips}
    file = plan.out / "scores.jsonl"
    known = _read_scores(file)
    missing = [clip for clip in clips if keys[clip] not in known]
    with (
        file.open("a") as scores,
        tqdm(total=len(clips), initial=len(clips) - len(missing), unit="clip") as bar,
    ):
        for clip, score in _score_all(plan, missing):
            known[keys[clip]] = score
            line = {"key": keys[clip], "clip": clip.name, **asdict(score)}
            scores.write(json.dumps(line) + "\n")
            scores.flush()
            bar.set_postfix_str(clip.configuration, refresh=False)
            bar.update()
    result: Scores = {run: [] for run in plan.runs}
    for clip in clips:
        result[clip.configuration, clip.run].append(known[keys[clip]])
    return result


class Scorer:
    """Holds the network and the model of the configuration that was asked for last."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        first = next(iter(plan.configurations.values()))
        device, _ = choose_device(first.engine)
        self._syncnet: networks.SyncNet = (
            networks.load_published(plan.syncnet, device)
            if plan.syncnet
            else networks.load_own(networks.OWN_WEIGHTS, device)
        )
        self._name = ""
        self._renderer: OfflineRenderer | None = None

    def score(self, clip: Clip) -> Score:
        if self._renderer is None or self._name != clip.configuration:
            self._renderer = OfflineRenderer(self._plan.configurations[clip.configuration])
            self._name = clip.configuration
        score, looks = score_clip(self._renderer, self._syncnet, clip, self._plan.window_s)
        if clip.number < LOOKED_AT:
            np.save(looks_file(self._plan, clip.configuration, clip.run, clip.number), looks)
        return score


def default_jobs() -> int:
    """One process for each CPU core, each with one thread; a GPU is left to one."""
    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def looks_file(plan: Plan, configuration: str, run: int, number: int) -> Path:
    return plan.out / "looks" / f"{configuration}-{run}-{number:03d}.npy"


def _score_all(plan: Plan, clips: list[Clip]) -> Iterator[tuple[Clip, Score]]:
    """In this process, or shared between several, in the order in which they are done."""
    if not clips:
        return
    if plan.jobs == 1:
        scorer = Scorer(plan)
        for clip in clips:
            yield clip, scorer.score(clip)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(plan.jobs, spawn) as workers:
        waiting = {workers.submit(_score_in_worker, plan, clip): clip for clip in clips}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            workers.shutdown(cancel_futures=True)


_scorer: Scorer | None = None
"""A worker's own, kept from clip to clip."""


def _score_in_worker(plan: Plan, clip: Clip) -> Score:
    global _scorer
    if _scorer is None:
        torch.set_num_threads(1)
        _scorer = Scorer(plan)
    return _scorer.score(clip)


def _clips(plan: Plan) -> list[Clip]:
    model = plan.configurations[plan.baseline].model
    for name, config in plan.configurations.items():
        if config.model.audio.sample_rate != model.audio.sample_rate:
            raise ValueError(f"{name}: speech of another sample rate than {plan.baseline}'s")
    pictures = _pictures(plan.pictures)
    speech = prepare_speech(
        plan.out / f"speech-{plan.seconds:g}s",
        plan.clips,
        plan.seconds,
        model.audio.sample_rate,
        plan.recordings,
    )
    return [
        Clip(name, run, number, pictures[number % len(pictures)], speech[number])
        for name, run in plan.runs
        for number in range(plan.clips)
    ]


def _pictures(folder: Path | None) -> list[Path]:
    if folder is None:
        return [character.image_path for character in load_characters().values()]
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if not files:
        raise ValueError(f"{folder}: there are no pictures in it")
    return files


def _fingerprints(plan: Plan) -> dict[str, str]:
    """Of all that decides a configuration's scores, but for the code."""
    scorer = plan.syncnet or networks.OWN_WEIGHTS
    prints = {}
    for name, config in plan.configurations.items():
        digest = hashlib.blake2b(digest_size=8)
        for part in (config.model, config.optimizations, config.engine):
            digest.update(part.model_dump_json().encode())
        weights = config.model.weights
        folder = BUILTIN if weights == "builtin" else Path(weights)
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        for file in [*files, scorer]:
            facts = file.stat()
            digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
        prints[name] = digest.hexdigest()
    return prints


def _key(plan: Plan, clip: Clip, fingerprint: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in (fingerprint, clip.name, f"{plan.window_s:g}"):
        digest.update(part.encode() + b"\0")
    digest.update(clip.picture.read_bytes())
    digest.update(clip.speech.read_bytes())
    return digest.hexdigest()


def _read_scores(file: Path) -> dict[str, Score]:
    """A last line that a broken-off run left unfinished is cut off."""
    if not file.exists():
        return {}
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if len(whole) < len(text):
        file.write_text(whole)
    return {line["key"]: _score(line) for line in map(json.loads, whole.splitlines())}


def _score(line: dict[str, Any]) -> Score:
    return Score(LipSync(**line["whole"]), [LipSync(**window) for window in line["windows"]])
