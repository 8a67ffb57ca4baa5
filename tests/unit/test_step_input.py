"""A step's conditioning, packed and read back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from characters_serve.config import AudioConfig, ModelConfig
from characters_serve.engine.step_input import PackedStep
from characters_serve.messages import StepInput
from characters_serve.model.audio import LogMel

MODEL = ModelConfig(noise_levels=(1.0, 0.75, 0.5, 0.25))
CPU = torch.device("cpu")


def step(**changes: object) -> StepInput:
    window = np.arange(MODEL.audio_window_samples) % 65_536 - 32_768
    controls = np.arange(MODEL.frames_per_chunk * MODEL.num_controls, dtype="<f4") / 7
    fields: dict[str, object] = {
        "session_id": "s",
        "epoch": 0,
        "chunk_index": 9,
        "audio_window": window.astype("<i2").tobytes(),
        "voice_48k": b"",
        "controls": controls.tobytes(),
        "utterance_id": 1,
        "utterance_offset_ms": 0.0,
        "last": False,
        "passes": 3,
    }
    return StepInput(**{**fields, **changes})  # type: ignore[arg-type]


def test_parts_are_views_of_one_tensor_that_never_moves() -> None:
    packed = PackedStep(MODEL, CPU)
    before = [t.data_ptr() for t in (packed.packed, packed.audio_window, packed.controls)]
    packed.fill(step())
    assert packed.passes == 3
    assert packed.audio_window[0] == -1.0
    assert packed.audio_window[1] == -32_767 / 32_768
    assert packed.controls.shape == (4, 7)
    assert packed.controls[1, 2] == pytest.approx(9 / 7)
    assert [t.data_ptr() for t in (packed.packed, packed.audio_window, packed.controls)] == before
    assert packed.packed.numel() == 2 + packed.audio_window.numel() + packed.controls.numel()


def test_a_second_fill_leaves_nothing_of_the_first() -> None:
    packed = PackedStep(MODEL, CPU)
    packed.fill(step())
    size = len(step().audio_window)
    packed.fill(step(audio_window=bytes(size), controls=bytes(4 * 28), passes=4))
    assert packed.packed.count_nonzero() == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("audio_window", b"12"), ("controls", bytes(8)), ("passes", 5), ("passes", 0)],
)
def test_a_step_of_the_wrong_size_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        PackedStep(MODEL, CPU).fill(step(**{field: value}))


@pytest.mark.parametrize(
    "model", [MODEL, ModelConfig(fps=16, audio=AudioConfig(hop=375, n_fft=1025))]
)
def test_window_is_the_one_that_log_mel_takes(model: ModelConfig) -> None:
    audio = model.audio
    log_mel = LogMel(
        audio.sample_rate,
        audio.hop,
        601 if audio.n_fft % 2 else audio.win,
        audio.n_fft,
        audio.num_mels,
        audio.f_min,
        audio.f_max,
        audio.past_frames,
        model.mels_per_frame * model.frames_per_chunk,
        audio.future_frames,
    )
    assert model.audio_window_samples == log_mel.window_samples
