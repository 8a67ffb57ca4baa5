"""What a user's picture is tried with before its session, and what is told of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from characters_serve.config import Config, ModelConfig
from characters_serve.engine.step_input import PackedStep
from characters_serve.messages import PictureReport, StartCharacter, StepInput, VideoChunk
from characters_serve.model.idle_controls import CONTROL_NAMES
from characters_serve.session import rehearsal
from characters_serve.session.rehearsal import (
    CHUNKS,
    REST_CHUNKS,
    SESSION_ID,
    expression,
    least_expression,
    rehearsal_steps,
    rehearse,
)
from characters_serve.session.self_test import TrialFailed

MODEL = ModelConfig(width=192, height=128)


def test_the_engine_takes_the_steps_which_rest_and_then_speak_with_closed_eyes() -> None:
    packed = PackedStep(MODEL, torch.device("cpu"))
    blink = CONTROL_NAMES.index("blink")
    loudness = []
    for number, step in enumerate(rehearsal_steps(MODEL, passes=2)):
        packed.fill(step)
        own = MODEL.audio_samples_per_chunk
        loudness.append(float(packed.audio_window[-2 * own : -own].abs().mean()))
        closed = float(number >= REST_CHUNKS)
        assert bool((packed.controls[:, blink] == closed).all())
        assert not packed.controls[:, :blink].any()
    assert loudness[0] == 0 and loudness[-1] > 0.02


def test_expression_is_a_strong_change_in_few_places_whatever_the_light() -> None:
    noise = np.random.default_rng(1).normal(0, 1, (128, 192))
    face = noise.copy()
    face[64:80, 80:104] += 5  # two by three squares of eight pixels

    def found(acting: NDArray[np.float64], contrast: float) -> float:
        rest, moved = (np.tile(100 + contrast * p, (4, 1, 1)) for p in (noise, acting))
        return expression(rest.astype(np.uint8), moved.astype(np.uint8))

    assert found(noise, 20) == 0
    assert found(face, 20) == pytest.approx(4.5, abs=0.3)
    assert found(face, 10) == pytest.approx(4, abs=0.3), "half the contrast"
    assert found(noise + 2.5, 20) < 0.1, "all of the picture"
    assert found((face + noise) / 2, 20) == pytest.approx(2.2, abs=0.3), "half the change"


class Painter:
    """An engine whose faces brighten by `levels` when the eyes close."""

    def __init__(self, levels: int, frames: int = MODEL.frames_per_chunk) -> None:
        self.calls: list[str] = []
        self._levels = levels
        self._frames = frames
        self._steps: asyncio.Queue[StepInput] = asyncio.Queue()

    async def start_character(self, message: StartCharacter) -> None:
        self.calls.append(f"start {message.session_id}")

    async def end_character(self, session_id: str) -> None:
        self.calls.append(f"end {session_id}")

    async def send_step(self, step: StepInput) -> None:
        self._steps.put_nowait(step)

    async def next_chunk(self) -> VideoChunk:
        step = await self._steps.get()
        closed = int(np.frombuffer(step.controls, np.float32).max())
        face = np.full((MODEL.height, MODEL.width), 80, np.uint8)
        face[64:80, 80:104] += np.uint8(self._levels * closed)
        luma = face.tobytes()
        frames = [luma + bytes([128]) * (len(luma) // 2)] * self._frames
        return VideoChunk(
            SESSION_ID, 0, step.chunk_index, frames, step.voice_48k, 0, 0.0, False, 2, 1.0, 1.0
        )

    async def report(self) -> PictureReport:
        image = bytes(3 * MODEL.width * MODEL.height)
        return await rehearse(self, Config(model=MODEL), image, 0.1, self.next_chunk)


async def test_a_picture_that_hardly_moves_is_not_familiar_and_nothing_of_it_stays() -> None:
    lively, stiff = Painter(60), Painter(0)
    seen = await lively.report()
    assert seen.familiar and seen.expression > seen.least == 0.1
    assert not (await stiff.report()).familiar
    assert stiff.calls == [f"start {SESSION_ID}", f"end {SESSION_ID}"]
    assert stiff._steps.empty() and CHUNKS > REST_CHUNKS


async def test_a_picture_that_cannot_be_tried_is_not_called_a_self_test() -> None:
    with pytest.raises(TrialFailed, match="picture rehearsal: chunk 0 with 3 frames came"):
        await Painter(60, frames=3).report()


def test_the_verdict_belongs_to_the_weights(tmp_path: Path) -> None:
    elsewhere = ModelConfig(weights=str(tmp_path))
    assert least_expression(elsewhere) is None
    (tmp_path / rehearsal._FILE).write_text(json.dumps({"least": 0.25}))
    assert least_expression(elsewhere) == 0.25
    assert least_expression(ModelConfig(weights="synthetic")) is None
    builtin = least_expression(ModelConfig())
    assert builtin is not None and 0 < builtin < 1
