"""The chunker: window geometry, joins, idle, starvation and interruptions."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import soxr
from numpy.typing import NDArray

from characters_serve.config import AudioConfig, ModelConfig
from characters_serve.messages import AgentAudio, StepInput
from characters_serve.model.audio import LogMel
from characters_serve.session.chunker import Chunker, window_geometry

Pcm = NDArray[np.int16]
MODEL = ModelConfig()
CHUNK = MODEL.audio_samples_per_chunk


def speech(samples: int, seed: int = 0) -> Pcm:
    """Band-limited noise, so that two resamplings of it can be compared."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(0, 4000, samples // 4 + 8)
    fine = np.interp(np.arange(samples) / 4, np.arange(len(coarse)), coarse)
    return fine.astype(np.int16)


def audio(number: int, pcm: Pcm, *, rate: int = 24_000, last: bool = True) -> AgentAudio:
    return AgentAudio("s", number, rate, pcm.tobytes(), "", last)


def chunker() -> Chunker:
    return Chunker(MODEL, "s", 1)


def take(chunker: Chunker, count: int) -> list[StepInput]:
    return [chunker.next(passes=4, listening_energy=0.0) for _ in range(count)]


def pcm(data: bytes) -> Pcm:
    return np.frombuffer(data, np.int16)


def centre(step: StepInput) -> Pcm:
    geometry = window_geometry(MODEL)
    return pcm(step.audio_window)[geometry.lead : geometry.lead + geometry.chunk]


@pytest.mark.parametrize(
    ("rate", "hop", "fps", "frames"), [(24_000, 250, 24, 4), (16_000, 160, 25, 12)]
)
def test_the_window_is_the_one_that_the_model_cuts(
    rate: int, hop: int, fps: int, frames: int
) -> None:
    model = ModelConfig(
        fps=fps, frames_per_chunk=frames, audio=AudioConfig(sample_rate=rate, hop=hop)
    )
    mels = LogMel(
        sample_rate=rate,
        hop=hop,
        past_frames=model.audio.past_frames,
        frames=model.mels_per_frame * frames,
        future_frames=model.audio.future_frames,
    )
    geometry = window_geometry(model)
    assert (geometry.total, geometry.lead) == (mels.window_samples, mels.lead_samples)
    assert (geometry.chunk, geometry.lookahead) == (mels.chunk_samples, mels.lookahead_samples)
    assert geometry.chunk == model.audio_samples_per_chunk


def test_the_host_stays_free_of_tensor_libraries() -> None:
    code = "import sys, characters_serve.session.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_silence_idles() -> None:
    steps = take(chunker(), 3)
    assert [step.chunk_index for step in steps] == [0, 1, 2]
    for step in steps:
        assert not pcm(step.audio_window).any() and not pcm(step.voice_48k).any()
        assert len(pcm(step.voice_48k)) == MODEL.voice_samples_per_chunk
        assert step.utterance_id == 0 and not step.last
    controls = [np.frombuffer(step.controls, np.float32).reshape(4, 7) for step in steps]
    assert not np.array_equal(controls[0], controls[1])


def test_windows_overlap_and_show_what_comes() -> None:
    line = speech(3 * CHUNK)
    c = chunker()
    c.add(audio(1, line))
    geometry = window_geometry(MODEL)
    padded = np.concatenate((np.zeros(geometry.lead, np.int16), line, np.zeros(9000, np.int16)))
    for index, step in enumerate(take(c, 3)):
        expected = padded[index * CHUNK : index * CHUNK + geometry.total]
        assert np.array_equal(pcm(step.audio_window), expected)
        assert step.utterance_offset_ms == pytest.approx(index * 1000 / 6)
        assert step.last == (index == 2)


def test_voice_slices_join_as_if_resampled_at_once() -> None:
    line = speech(10 * CHUNK + 777)
    c = chunker()
    c.add(audio(1, line))
    steps = take(c, 11)
    joined = np.concatenate([pcm(step.voice_48k) for step in steps]).astype(np.float64)
    whole = np.concatenate((line, np.zeros(11 * CHUNK - len(line), np.int16)))
    expected = soxr.resample(whole.astype(np.float64), 24_000, 48_000, quality="HQ")
    assert np.abs(joined - expected).max() <= 2.0


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 44_100, 48_000])
def test_other_rates_are_resampled_as_a_stream(rate: int) -> None:
    seconds = 1.5
    time_s = np.arange(round(rate * seconds)) / rate
    tone = (8000 * np.sin(2 * np.pi * 440 * time_s)).astype(np.int16)
    c = chunker()
    for first in range(0, len(tone), 333):
        part = tone[first : first + 333]
        c.add(audio(1, part, rate=rate, last=first + 333 >= len(tone)))
    heard = np.concatenate([centre(step) for step in take(c, 9)]).astype(np.float64)
    at = np.arange(len(heard)) / 24_000
    expected = 8000 * np.sin(2 * np.pi * 440 * at)
    inside = slice(1200, round(24_000 * (seconds - 0.1)))
    assert np.abs(heard[inside] - expected[inside]).max() < 250


def test_an_utterance_waits_for_its_look_ahead_then_runs() -> None:
    line = speech(2 * CHUNK)
    geometry = window_geometry(MODEL)
    c = chunker()
    c.add(audio(1, line[: CHUNK + geometry.lookahead - 1], last=False))
    assert take(c, 1)[0].utterance_id == 0
    c.add(audio(1, line[CHUNK + geometry.lookahead - 1 :], last=True))
    assert [step.utterance_id for step in take(c, 3)] == [1, 1, 0]


def test_a_starved_utterance_fades_and_resumes_without_a_click() -> None:
    line = np.full(3 * CHUNK, 8000, np.int16)
    c = chunker()
    c.add(audio(1, line[: CHUNK + 2000], last=False))
    steps = take(c, 3)
    assert [step.utterance_id for step in steps] == [1, 1, 0]
    tail = centre(steps[1])
    assert tail[1000] == 8000 and tail[1999] == 0 and not tail[2000:].any()
    c.add(audio(1, line[CHUNK + 2000 :], last=True))
    resumed = take(c, 2)
    assert [(step.utterance_id, step.last) for step in resumed] == [(1, False), (1, True)]
    assert centre(resumed[0])[0] == 0
    assert resumed[0].utterance_offset_ms == pytest.approx((CHUNK + 2000) / 24)


def test_interruption_drops_speech_and_what_still_arrives_of_it() -> None:
    c = chunker()
    c.add(audio(1, speech(5 * CHUNK), last=True))
    c.add(audio(2, speech(CHUNK), last=False))
    take(c, 1)
    assert c.interrupt() == 2
    assert not c.add(audio(2, speech(9 * CHUNK), last=True))
    step = take(c, 1)[0]
    assert (step.epoch, step.utterance_id) == (1, 0)
    assert not centre(step).any()
    assert np.abs(pcm(step.voice_48k)).max() == 0 or np.abs(pcm(step.voice_48k))[:96].max() < 400
    assert c.add(audio(3, speech(CHUNK), last=True))
    assert take(c, 1)[0].utterance_id == 3


def test_utterances_follow_each_other_at_chunk_borders() -> None:
    c = chunker()
    c.add(audio(1, speech(CHUNK // 2)))
    c.add(audio(2, speech(CHUNK // 2)))
    first, second = take(c, 2)
    assert (first.utterance_id, first.last) == (1, True)
    assert (second.utterance_id, second.last) == (2, True)
    assert not centre(first)[CHUNK // 2 :].any()
    assert second.utterance_offset_ms == 0


def test_an_empty_utterance_still_ends() -> None:
    c = chunker()
    c.add(audio(1, speech(0)))
    step = take(c, 1)[0]
    assert (step.utterance_id, step.last) == (1, True)


def test_an_end_that_comes_after_the_last_sample_is_a_chunk_of_its_own() -> None:
    c = chunker()
    c.add(audio(1, speech(2 * CHUNK), last=False))
    steps = take(c, 2)
    assert [step.utterance_id for step in steps] == [1, 1] and not steps[1].last
    c.add(audio(1, speech(0), last=True))
    step = take(c, 1)[0]
    assert (step.utterance_id, step.last) == (1, True)


def test_a_rate_that_does_not_divide_48_khz_is_refused() -> None:
    model = ModelConfig(fps=25, audio=AudioConfig(sample_rate=22_000, hop=220))
    with pytest.raises(ValueError, match="sample_rate"):
        Chunker(model, "s", 1)
