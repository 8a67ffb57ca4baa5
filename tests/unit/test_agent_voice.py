"""Which voice speaks, and what a voice must be: loud enough, at its own rate, without dead air."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from characters_serve.agent.voice import Voice, load_voice, missing_for
from characters_serve.config import ConfigError, load_config
from characters_serve.doctor import examine


@pytest.mark.parametrize("name", ["heart", "piper"])
def test_a_voice_speaks_at_once_and_as_loud_as_a_call(name: str) -> None:
    missing = missing_for(name)
    if missing:
        pytest.skip(missing)
    voice: Voice = load_voice(name)
    pcm = np.frombuffer(voice.synthesize("What is your name?"), "<i2").astype(float) / 32768
    assert 0.6 < len(pcm) / voice.sample_rate < 2.5
    loud = np.abs(pcm) > 0.02
    assert loud[: round(0.1 * voice.sample_rate)].any()
    assert loud[-round(0.15 * voice.sample_rate) :].any()
    level_db = 20 * np.log10(np.sqrt(np.mean(pcm[loud] ** 2)))
    assert -24 < level_db < -10
    assert voice.synthesize("*** ...") == b""


def test_a_voice_that_is_not_there_is_refused_and_told(tmp_path: Path) -> None:
    name = str(tmp_path / "nobody.onnx")
    with pytest.raises(ConfigError, match=r"agent\.voice: .*cannot speak"):
        load_voice(name)
    findings = {f.subject: f for f in examine(load_config([], [f"agent.voice={name}"]))}
    assert not findings["voice"].good and "cannot speak" in findings["voice"].words


def test_the_doctor_says_what_speaks_english_only() -> None:
    config = load_config([], ["agent.language=de", "agent.recogniser=whisper"])
    findings = {f.subject: f for f in examine(config)}
    assert not findings["voice"].good and not findings["replies"].good
