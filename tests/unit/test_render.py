"""Offline rendering: a picture and a recording become a film of the recording's length."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from characters_serve.config import Config, EngineConfig, ModelConfig
from characters_serve.render import RenderError, read_speech, run_render

CONFIG = Config(model=ModelConfig(weights="synthetic"), engine=EngineConfig(device="cpu"))
SPEECH_S = 0.9


@pytest.fixture
def face(tmp_path: Path) -> Path:
    path = tmp_path / "face.png"
    pixels = np.random.default_rng(1).integers(0, 256, (90, 80, 3), np.uint8)
    Image.fromarray(pixels).resize((320, 360)).save(path)
    return path


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    """Stereo at 44.1 kHz, louder in the second half."""
    path = tmp_path / "speech.wav"
    time_s = np.arange(round(SPEECH_S * 44_100)) / 44_100
    tone = np.sin(2 * np.pi * 440 * time_s) * np.where(time_s < SPEECH_S / 2, 2000, 12_000)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=44_100, layout="stereo")
        packed = np.repeat(tone.astype(np.int16), 2)[None]
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout="stereo")
        frame.sample_rate = 44_100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def pictures(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as film:
        return [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]


def duration_s(stream: av.VideoStream | av.AudioStream) -> float:
    assert stream.duration is not None and stream.time_base is not None
    return float(stream.duration * stream.time_base)


def test_speech_is_read_mono_at_the_models_rate(speech: Path) -> None:
    samples = read_speech(speech, 24_000)
    assert abs(len(samples) - SPEECH_S * 24_000) <= 2
    half = len(samples) // 2
    assert np.abs(samples[: half - 50]).max() == pytest.approx(2000, rel=0.05)
    assert np.abs(samples[half + 50 :]).max() == pytest.approx(12_000, rel=0.05)


def test_film_has_the_models_format_and_the_speechs_length(
    face: Path, speech: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.mp4"
    run_render(CONFIG, face, speech, out, seed=5)
    num_frames = 24  # 0.9 s is 5.4 chunks of 4 frames; the sixth is filled with silence
    with av.open(str(out)) as film:
        video, audio = film.streams.video[0], film.streams.audio[0]
        assert (video.width, video.height) == (384, 256)
        assert video.average_rate == 24
        assert video.codec_context.name == "h264"
        assert (audio.codec_context.name, audio.rate) == ("aac", 48_000)
        assert video.frames == num_frames
        assert duration_s(video) == pytest.approx(1.0)
        assert duration_s(audio) == pytest.approx(1.0, abs=0.025)
    with av.open(str(out)) as film:
        decoded = [frame.to_ndarray()[0] for frame in film.decode(audio=0)]
    sound = np.concatenate(decoded)
    louder_s = np.flatnonzero(np.abs(sound) > 5000 / 32_768)[0] / 48_000
    assert louder_s == pytest.approx(SPEECH_S / 2, abs=0.03)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["face.png", "out.mp4", "speech.wav"]


def test_a_seed_repeats_its_film(face: Path, speech: Path, tmp_path: Path) -> None:
    films = []
    for name, seed in [("a", 5), ("b", 5), ("c", 6)]:
        run_render(CONFIG, face, speech, tmp_path / f"{name}.mp4", seed)
        films.append(np.stack(pictures(tmp_path / f"{name}.mp4")))
    np.testing.assert_array_equal(films[0], films[1])
    assert (films[0] != films[2]).any()


def test_unusable_input_is_named_and_leaves_no_film(
    face: Path, speech: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.mp4"
    with pytest.raises(RenderError, match=r"audio .*face\.png"):
        run_render(CONFIG, face, face, out, seed=0)
    with pytest.raises(RenderError, match=r"image .*speech\.wav"):
        run_render(CONFIG, speech, speech, out, seed=0)
    with pytest.raises(RenderError, match=r"audio .*missing"):
        run_render(CONFIG, face, tmp_path / "missing.wav", out, seed=0)
    assert not out.exists()
