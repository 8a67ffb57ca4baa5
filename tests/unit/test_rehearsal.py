"""What a user's picture is tried with before its session, and what is told of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

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


def test_expression_is_the_change_of_the_liveliest_squares() -> None:
    rest = np.full((4, 128, 192), 100, np.uint8)
    acting = rest.copy()
    assert expression(rest, acting) == 0
    acting[:, 64:80, 80:104] += 51  # two by three squares of eight pixels
    assert expression(rest, acting) == pytest.approx(0.2)
    acting[:, :8, :8] += 5
    assert expression(rest, acting) == pytest.approx(0.2), "what moves less does not count"


class Painter:
    """An engine whose pictures brighten by `levels` when the eyes close."""

    def __init__(self, levels: int) -> None:
        self.calls: list[str] = []
        self._levels = levels
        self._steps: asyncio.Queue[StepInput] = asyncio.Queue()

    async def start_character(self, message: StartCharacter) -> None:
        self.calls.append(f"start {message.session_id}")

    async def end_character(self, session_id: str) -> None:
        self.calls.append(f"end {session_id}")

    async def send_step(self, step: StepInput) -> None:
        self._steps.put_nowait(step)

    async def next_chunk(self) -> VideoChunk:
        step = await self._steps.get()
        closed = np.frombuffer(step.controls, np.float32).max() == 1
        luma = bytes([80 + self._levels * closed]) * (MODEL.width * MODEL.height)
        frames = [luma + bytes([128]) * (len(luma) // 2)] * MODEL.frames_per_chunk
        return VideoChunk(
            SESSION_ID, 0, step.chunk_index, frames, step.voice_48k, 0, 0.0, False, 2, 1.0, 1.0
        )

    async def report(self) -> PictureReport:
        image = bytes(3 * MODEL.width * MODEL.height)
        return await rehearse(self, Config(model=MODEL), image, 0.1, self.next_chunk)


async def test_a_picture_that_hardly_moves_is_not_familiar_and_nothing_of_it_stays() -> None:
    lively, stiff = Painter(51), Painter(10)
    assert await lively.report() == PictureReport(expression=0.2, least=0.1, familiar=True)
    assert await stiff.report() == PictureReport(expression=0.0392, least=0.1, familiar=False)
    assert stiff.calls == [f"start {SESSION_ID}", f"end {SESSION_ID}"]
    assert stiff._steps.empty() and CHUNKS > REST_CHUNKS


def test_the_verdict_belongs_to_the_weights(tmp_path: Path) -> None:
    elsewhere = ModelConfig(weights=str(tmp_path))
    assert least_expression(elsewhere) is None
    (tmp_path / rehearsal._FILE).write_text(json.dumps({"least": 0.25}))
    assert least_expression(elsewhere) == 0.25
    assert least_expression(ModelConfig(weights="synthetic")) is None
    builtin = least_expression(ModelConfig())
    assert builtin is not None and 0 < builtin < 1
