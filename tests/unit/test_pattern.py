"""The pattern's picture and beep: legible at any size, and on the same instant."""

from __future__ import annotations

import av
import numpy as np
import pytest

from characters_serve.config import AudioConfig, ModelConfig, PatternConfig
from characters_serve.engine.pattern import (
    BEEP_SAMPLES,
    flash_is_on,
    luma_of,
    pattern_chunk,
    pattern_frame,
    pattern_voice,
    read_counter,
    read_flash,
    step_ms,
)
from characters_serve.messages import StepInput

MODEL = ModelConfig()


def step(chunk_index: int, voice_48k: bytes) -> StepInput:
    return StepInput(
        session_id="s",
        epoch=3,
        chunk_index=chunk_index,
        audio_window=b"",
        voice_48k=voice_48k,
        controls=b"",
        utterance_id=2,
        utterance_offset_ms=10.0,
        last=True,
        passes=4,
    )


@pytest.mark.parametrize("index", [0, 1, 23, 24, 43_690, 65_535, 65_536 + 7])
def test_counter_is_read_back(index: int) -> None:
    luma = luma_of(pattern_frame(MODEL, index), MODEL.width, MODEL.height)
    assert read_counter(luma) == index % 65_536
    assert read_flash(luma) == flash_is_on(index, MODEL.fps)


def test_counter_survives_scaling() -> None:
    data = np.frombuffer(pattern_frame(MODEL, 12_345), np.uint8)
    frame = av.VideoFrame.from_ndarray(data.reshape(MODEL.height * 3 // 2, -1), format="yuv420p")
    small = frame.reformat(width=256, height=170, format="gray8").to_ndarray().astype(np.uint8)
    assert read_counter(small) == 12_345


def test_an_illegible_counter_is_none() -> None:
    assert read_counter(np.full((256, 384), 128, np.uint8)) is None


def test_chunk_has_the_models_sizes_and_carries_the_step() -> None:
    model = ModelConfig(width=320, height=192, fps=16, frames_per_chunk=12)
    silence = bytes(2 * model.voice_samples_per_chunk)
    chunk = pattern_chunk(model, step(2, silence))
    assert len(chunk.frames_i420) == 12
    assert all(len(frame) == 320 * 192 * 3 // 2 for frame in chunk.frames_i420)
    assert len(chunk.voice_48k) == len(silence)
    assert (chunk.session_id, chunk.epoch, chunk.chunk_index) == ("s", 3, 2)
    assert (chunk.utterance_id, chunk.utterance_offset_ms, chunk.last) == (2, 10.0, True)
    assert read_counter(luma_of(chunk.frames_i420[5], 320, 192)) == 29


# 25 fps has chunks in whose middle a second begins, and beeps cut by a chunk's end.
@pytest.mark.parametrize(("fps", "frames"), [(24, 4), (25, 12), (16, 12)])
def test_flash_and_beep_begin_at_the_same_instant(fps: int, frames: int) -> None:
    model = ModelConfig(fps=fps, frames_per_chunk=frames, audio=AudioConfig(hop=24_000 // fps // 4))
    count = model.voice_samples_per_chunk
    chunks = range(3 * fps // frames + 1)
    voice = np.concatenate(
        [np.frombuffer(pattern_voice(model, i, bytes(2 * count)), "<i2") for i in chunks]
    )
    pictures = [
        luma_of(pattern_frame(model, i), model.width, model.height)
        for i in range(len(chunks) * frames)
    ]
    lit = np.array([read_flash(picture) for picture in pictures])
    flashes_s = np.flatnonzero(lit & ~np.roll(lit, 1)) / fps
    loud = np.convolve(np.abs(voice) > 100, np.ones(24), "full")[: len(voice)] > 0
    loud[0] = False
    beeps_s = np.flatnonzero(loud[1:] & ~loud[:-1]) / 48_000
    assert len(flashes_s) >= 3
    np.testing.assert_allclose(beeps_s, flashes_s, atol=2 / 48_000)


def test_beep_is_mixed_over_the_voice_without_wrapping() -> None:
    count = MODEL.voice_samples_per_chunk
    loud = np.full(count, 32_000, "<i2")
    mixed = np.frombuffer(pattern_voice(MODEL, 0, loud.tobytes()), "<i2")
    assert mixed[:BEEP_SAMPLES].max() == 32_767
    assert mixed[:BEEP_SAMPLES].min() >= 32_000 - 8000
    np.testing.assert_array_equal(mixed[BEEP_SAMPLES:], 32_000)


def test_its_pace_is_that_of_the_engine_it_stands_for() -> None:
    assert {step_ms(PatternConfig(), index) for index in range(100)} == {0.0}
    pace = PatternConfig(step_ms=168, long_step_ms=263)
    times_ms = [step_ms(pace, index) for index in range(84)]
    assert [index for index, ms in enumerate(times_ms) if ms == 263] == [41, 83]
    assert sorted(set(times_ms)) == [168, 263]
