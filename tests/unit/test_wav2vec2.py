"""Speech features of a window around a chunk, against those of a whole recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from characters_serve.config import ModelConfig
from characters_serve.model.open.wav2vec2 import (
    SpeechFeatures,
    frame_steps,
    interpolated,
    load_speech_features,
)
from characters_serve.model.weights import WeightsError
from characters_serve.session.chunker import window_geometry
from tests.unit.small_live_avatar import SMALL, drawn

AUTHORS = Path(__file__).parents[1] / "data" / "parity" / "live_avatar" / "authors.npz"
CPU = torch.device("cpu")


def windowed(past_frames: int, future_frames: int) -> ModelConfig:
    audio = {"past_frames": past_frames, "future_frames": future_frames}
    return ModelConfig(**SMALL.model_dump() | {"audio": SMALL.audio.model_dump() | audio})


def features(model: ModelConfig) -> SpeechFeatures:
    pytest.importorskip("transformers", reason="the extra `open` is not installed")
    return load_speech_features(model, device=CPU, dtype=torch.float32, seed=1)


def test_resampling_is_the_authors() -> None:
    """50 steps to 30 to 25 frames a second, over a whole recording, where the line is stretched so
    that its ends meet. Their limit is 1e-4: they compute the line in float32."""
    with np.load(AUTHORS) as arrays:
        steps = torch.from_numpy(arrays["hidden_50hz"])[None]
        expected = torch.from_numpy(arrays["features_25fps"])[None]
    at_30 = int(steps.shape[2] / 50 * 30)
    stretched = frame_steps(96) * (30 / 50) * (steps.shape[2] - 1) / (at_30 - 1)
    heard = int((frame_steps(96) * 30 / 50 < at_30).sum())
    found = interpolated(steps, stretched[:heard])
    assert heard == 55
    assert (found - expected[..., :heard]).abs().max() < 1e-4
    assert not expected[..., heard:].any()


def test_a_frame_reads_near_its_own_time() -> None:
    """Within the 1.7 steps of 20 ms that rounding to a thirtieth of a second gives."""
    steps = frame_steps(12)
    assert (steps - 2 * torch.arange(12)).abs().max() <= 1
    assert steps[0] == 0 and bool((steps.diff() > 0).all())


def test_windows_are_cut_in_whole_video_frames() -> None:
    geometry = window_geometry(windowed(50, 5))
    assert (geometry.lead, geometry.chunk, geometry.lookahead) == (50 * 640, 12 * 640, 5 * 640)


def test_a_window_over_the_whole_recording_gives_its_features() -> None:
    """Which also places the chunk: one step off would show."""
    recording = drawn((1, 40 * 640), 1, 0.3)
    whole = features(windowed(0, 28))
    network: Any = whole.network
    centred = (recording - recording.mean()) / (recording.var(correction=0) + 1e-7).sqrt()
    steps = torch.stack(network(centred, output_hidden_states=True).hidden_states, dim=1)
    for past in (0, 12, 24):
        found = features(windowed(past, 28 - past))(recording)
        expected = interpolated(steps, 2 * past + frame_steps(12))
        assert found.shape == (1, 5, 20, 12)
        assert (found - expected).abs().max() < 1e-5
    assert (interpolated(steps, 25 + frame_steps(12)) - found).abs().max() > 1e-2


def test_more_to_hear_comes_nearer_to_the_whole_recording() -> None:
    """What is not in the window is not heard. Of 8 s, with random weights, relative to the
    features' own spread: 2 s of past leave 1 %; the look-ahead, which is waited for, 17 % at
    200 ms, until it covers the positional convolution's 1.3 s."""
    at, end = 150, 200
    seconds = torch.arange(end * 640) / 16_000
    recording = drawn((1, end * 640), 2, 0.3) * (0.2 + torch.sin(8.2 * seconds) ** 2)
    network: Any = features(SMALL).network

    def heard(past: int, future: int) -> Tensor:
        window = recording[:, (at - past) * 640 : (at + 12 + future) * 640]
        found: Tensor = SpeechFeatures(network, windowed(past, future))(window)
        return found

    whole = heard(at, end - at - 12)

    def error(past: int, future: int) -> float:
        apart = (heard(past, future) - whole).pow(2).mean().sqrt()
        return float(apart / whole.std())

    by_past = [error(past, 38) for past in (5, 25, 50)]
    assert by_past == sorted(by_past, reverse=True)
    assert by_past[-1] < 0.03 and by_past[0] > 0.1
    by_future = [error(at, future) for future in (5, 25, 32)]
    assert by_future == sorted(by_future, reverse=True)
    assert by_future[-1] < 0.01 and 0.1 < by_future[0] < 0.25


def test_silence_is_silence() -> None:
    found = features(SMALL)(torch.zeros(1, 24 * 640))
    assert found.isfinite().all()


def test_the_folder_beside_the_weights_is_read_and_must_be_whole(tmp_path: Path) -> None:
    network: Any = features(SMALL).network
    folder = tmp_path / "wav2vec2"
    network.save_pretrained(folder)
    model = SMALL.model_copy(update={"weights": str(tmp_path)})
    found: Any = load_speech_features(model, device=CPU, dtype=torch.float32).network
    for key, value in network.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key

    file = folder / "model.safetensors"
    state = load_file(file)
    cut = "encoder.layers.1.attention.q_proj.weight"
    save_file({key: value for key, value in state.items() if key != cut}, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=f"wav2vec2: missing keys {cut}"):
        load_speech_features(model, device=CPU, dtype=torch.float32)
    file.unlink()
    with pytest.raises(WeightsError, match="wav2vec2: "):
        load_speech_features(model, device=CPU, dtype=torch.float32)


def test_a_folder_that_is_none_is_named() -> None:
    pytest.importorskip("transformers", reason="the extra `open` is not installed")
    model = SMALL.model_copy(update={"weights": "/nowhere"})
    with pytest.raises(WeightsError, match=r"wav2vec2: no config\.json in /nowhere/wav2vec2"):
        load_speech_features(model, device=CPU, dtype=torch.float32)
