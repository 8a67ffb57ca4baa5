"""Timing and values of the log-mel front end, and what the audio encoder hears of it."""

import math

import pytest
import torch

from characters_serve.config import ModelConfig
from characters_serve.model.audio import AudioEncoder, LogMel, mel_filterbank


def test_sizes() -> None:
    mel = LogMel()
    assert mel.num_frames == 28
    assert mel.window_samples == 27 * 250 + 1024
    assert mel.lead_samples == 8 * 250 + 387
    assert mel.lead_samples + mel.chunk_samples + mel.lookahead_samples == mel.window_samples
    assert mel(torch.zeros(2, 3, mel.window_samples)).shape == (2, 3, 28, 48)
    assert not mel.state_dict()
    with pytest.raises(ValueError):
        mel(torch.zeros(100))


@pytest.mark.parametrize("frame", range(16))
@pytest.mark.parametrize("offset", [5, 124, 245])
def test_click_in_the_chunk_lands_in_its_mel_frame(frame: int, offset: int) -> None:
    mel = LogMel()
    pcm = torch.zeros(mel.window_samples)
    pcm[mel.lead_samples + frame * mel.hop + offset] = 1.0
    loudness = mel(pcm).mean(dim=1)
    assert int(loudness.argmax()) == mel.past_frames + frame


def test_windows_of_consecutive_chunks_agree_on_shared_frames() -> None:
    mel = LogMel()
    pcm = torch.randn(mel.window_samples + mel.chunk_samples) * 0.1
    first = mel(pcm[: mel.window_samples])
    second = mel(pcm[mel.chunk_samples :])
    torch.testing.assert_close(first[16:], second[:12])


def test_silence_is_the_floor_and_a_tone_peaks_in_its_band() -> None:
    mel = LogMel()
    silence = mel.log_mel(torch.zeros(mel.window_samples))
    torch.testing.assert_close(silence, torch.full_like(silence, math.log(1e-6)))
    time = torch.arange(mel.window_samples) / mel.sample_rate
    tone = mel(0.5 * torch.sin(2.0 * math.pi * 1000.0 * time))
    filters = mel_filterbank(48, 1024, 24000, 60.0, 7600.0)
    expected = int(filters[:, round(1000 / 24000 * 1024)].argmax())
    assert abs(int(tone[10].argmax()) - expected) <= 1


def test_the_encoder_hears_every_frame_of_a_window() -> None:
    torch.manual_seed(0)
    encoder = AudioEncoder(ModelConfig())
    for parameter in encoder.parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.05)
    mel = torch.randn(2, LogMel().num_frames, 48, requires_grad=True)
    rows = encoder(mel)
    assert rows.shape == (2, 5, 192)
    (heard,) = torch.autograd.grad(rows[0].square().sum(), mel)
    assert bool((heard[0].abs().sum(dim=-1) > 0).all())
    assert not heard[1].any()  # another session's speech
