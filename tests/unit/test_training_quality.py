"""The character's acceptance: what is wrong with invented talks is found, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from characters_serve.config import ModelConfig
from characters_serve.model.idle_controls import CONTROL_NAMES, NUM_CONTROLS
from scripts.train_tiny.data import LOWEST, ClipSource
from scripts.train_tiny.quality import Seen, figures

MODEL = ModelConfig()
CHARACTERS, FRAMES, WINDOWS = 3, 192, 4


def a_good_talk() -> list[Seen]:
    """Speech, then silence from the middle of each window on."""
    generator = torch.Generator().manual_seed(1)
    speaks = torch.zeros(CHARACTERS, FRAMES, dtype=torch.bool)
    speaks[:, : FRAMES // 2] = True
    windows = []
    for i in range(WINDOWS):
        opening = torch.rand(CHARACTERS, FRAMES, generator=generator) * speaks
        change = 0.01 + 0.001 * torch.rand(CHARACTERS, FRAMES - 1, generator=generator)
        windows.append(
            Seen(
                first_frame=(i + 1) * 1440 - FRAMES,
                squared={name: torch.full((CHARACTERS,), 1e-3) for name in ("whole", "mouth")},
                background=torch.zeros(CHARACTERS, 3),
                skin=torch.full((CHARACTERS, 3), 0.01),
                sharpness=torch.ones(CHARACTERS),
                read=opening.clone(),
                opening=opening,
                speaks=speaks,
                change=change,
                true_change=change.clone(),
            )
        )
    return windows


def missed(windows: list[Seen]) -> set[str]:
    """Names of the goals that are not met."""
    found: dict[str, Any] = figures(windows, MODEL)
    return {
        name
        for name, value in found.items()
        if isinstance(value, dict) and not value.get("met", True)
    }


def test_a_good_talk_meets_every_goal() -> None:
    found = figures(a_good_talk(), MODEL)
    assert missed(a_good_talk()) == set()
    assert found["whole_db"] == [30.0] * WINDOWS and found["whole_db_per_minute"] == 0
    assert found["closed_in_silence"]["value"] == 1
    assert found["mouth_correlation_by_lag"][0] == 1


def test_what_fades_with_time_is_found() -> None:
    windows = a_good_talk()
    windows[-1] = windows[-1]._replace(
        squared={
            "whole": torch.full((CHARACTERS,), 2e-3),
            "mouth": torch.full((CHARACTERS,), 1e-3),
        },
        skin=torch.tensor([[0.01, 0.02, 0.01]] * CHARACTERS),
    )
    assert missed(windows) == {"whole_db_from_second_to_last", "skin_drift_worst"}


def test_a_late_mouth_and_one_that_stays_open_are_found() -> None:
    late = [seen._replace(read=seen.opening.roll(2, dims=1)) for seen in a_good_talk()]
    assert {"mouth_correlation", "mouth_best_lag_frames"} <= missed(late)
    ajar = [seen._replace(read=seen.opening.clamp(min=0.2)) for seen in a_good_talk()]
    assert "closed_in_silence" in missed(ajar)


def test_jumps_are_told_apart_by_where_they_are() -> None:
    windows = a_good_talk()
    reset_frames = {
        (MODEL.window_chunks + MODEL.position_reset_steps * n - 1) * MODEL.frames_per_chunk
        for n in range(1, 99)
    }
    for seen in windows:
        for at in range(FRAMES - 1):
            if seen.first_frame + 1 + at in reset_frames:
                seen.change[:, at] *= 2
    assert missed(windows) == {"jump_at_position_reset", "rare_jump_at_position_reset"}
    for seen in windows:
        seen.change[:, FRAMES // 2 - 1] *= 3
    assert missed(windows) >= {"jump_at_turn", "rare_jump_at_turn"}


def test_held_out_talks_go_round_the_speech_and_know_which_frame_each_sound_is_of(
    tmp_path: Path,
) -> None:
    spoken, held_out = 200, 120
    viseme = np.tile(np.arange(spoken, dtype=np.uint8)[:, None], (1, 5))
    np.savez(
        tmp_path / "speech.npz",
        mel=np.repeat(viseme[:, :1], MODEL.audio.num_mels, 1).repeat(MODEL.mels_per_frame, 0),
        viseme=viseme,
        held_out=held_out,
    )
    np.savez(tmp_path / "idle.npz", controls=np.ones((1, 48, NUM_CONTROLS), np.float16))
    source = ClipSource(tmp_path, MODEL, torch.device("cpu"))
    frames = 96
    clips = source.sample(4, frames, torch.Generator().manual_seed(1), held_out=True)
    said = (clips.controls[..., NUM_CONTROLS] * 255).round()
    assert int(said.min()) == held_out + 16 and int(said.max()) == spoken - 16 - 1
    # All idle controls are 1 here; what a picture shows is zero of all but where its eyes look.
    at_rest = clips.reference_controls[:, :NUM_CONTROLS]
    gaze = [CONTROL_NAMES.index(name) for name in ("gaze_x", "gaze_y")]
    assert sorted(set(at_rest.nonzero()[:, 1].tolist())) == gaze
    assert torch.equal(clips.change()[:, 0], clips.controls[:, 0] - clips.reference_controls)
    heard_in = source.frames_heard(frames)
    own = heard_in[5, MODEL.audio.past_frames :][: 4 * MODEL.mels_per_frame]
    assert own.tolist() == np.repeat(range(20, 24), MODEL.mels_per_frame).tolist()
    assert heard_in.shape == clips.mel.shape[1:3] and bool((clips.mel > LOWEST).all())
