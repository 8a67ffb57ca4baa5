"""The published score on embeddings with a known shift, and what the networks are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from characters_serve.evaluation.clips import nearest_frames
from characters_serve.evaluation.lse import lse, num_windows
from characters_serve.evaluation.mfcc import mfcc
from characters_serve.evaluation.syncnet import (
    OwnSyncNet,
    PublishedSyncNet,
    load_own,
    load_published,
)
from characters_serve.model.weights import WeightsError


def _speech(rows: int) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("late", [-15, -4, 0, 1, 7, 15])
def test_the_offset_is_how_late_the_picture_is(late: int) -> None:
    everything = _speech(160)
    speech = everything[30:130]
    video = everything[30 - late : 130 - late] + 0.5
    found = lse(video, speech)
    assert found.offset == late
    # Where the shift leaves the clip, zeros stand for the speech.
    outside = video[len(video) - late :] if late > 0 else video[: max(0, -late)]
    inside = 0.5 * 16**0.5 * (len(video) - abs(late))
    expected = (inside + float(outside.norm(dim=1).sum())) / len(video)
    assert found.distance == pytest.approx(expected, rel=0.05)
    assert found.confidence > 1


def test_it_is_the_published_arithmetic() -> None:
    """Against the definition, one pair at a time: the median of 31 is the sixteenth."""
    video, speech = _speech(20), torch.flip(_speech(20), (0,))
    distances = []
    for shift in range(-15, 16):
        row = [
            torch.nn.functional.pairwise_distance(
                video[i], speech[i + shift] if 0 <= i + shift < 20 else torch.zeros(16)
            )
            for i in range(20)
        ]
        distances.append(float(torch.stack(row).mean()))
    found = lse(video, speech)
    assert found.distance == pytest.approx(min(distances))
    assert found.confidence == pytest.approx(sorted(distances)[15] - min(distances), rel=1e-4)
    assert found.offset == 15 - distances.index(min(distances))


def test_embeddings_are_not_normalised() -> None:
    video, speech = _speech(40), _speech(40).roll(3, 1)
    assert lse(3 * video, 3 * speech).distance == pytest.approx(3 * lse(video, speech).distance)


def test_a_clip_without_windows_is_refused() -> None:
    assert num_windows(frames=24, samples=24_000, samples_per_frame=1000) == 19
    assert num_windows(frames=24, samples=10_999, samples_per_frame=1000) == 5
    assert num_windows(frames=4, samples=24_000, samples_per_frame=1000) == 0
    with pytest.raises(ValueError, match="at least one"):
        lse(_speech(0), _speech(0))


def test_frames_at_another_rate_are_the_nearest() -> None:
    at_25 = nearest_frames(240, 24, 25)
    assert len(at_25) == 250
    assert np.bincount(at_25).max() == 2 and (np.bincount(at_25) == 2).sum() == 10
    assert np.abs(at_25 / 24 - np.arange(250) / 25).max() <= 0.5 / 24 + 1e-9
    assert (nearest_frames(100, 24, 24) == np.arange(100)).all()
    assert len(nearest_frames(160, 16, 24)) == 240


def test_mfccs_are_those_of_python_speech_features() -> None:
    """Its version 0.6 gave these numbers."""
    time_s = np.arange(1600) / 16_000
    tone = 8000 * np.sin(2 * np.pi * 440 * time_s) * np.exp(-20 * time_s)
    rows = mfcc(np.round(tone).astype(np.int16), 16_000)
    assert rows.shape == (9, 13)
    expected = (
        "18.6045 18.346 1.1651 -14.6944 -27.5052 -33.7039 -29.7497 -18.7068 -3.6153 9.5187 "
        "17.3826 17.3193 11.4531"
    )
    np.testing.assert_allclose(rows[0], np.fromstring(expected, sep=" "), atol=1e-4)
    assert rows[5, 0] == pytest.approx(16.6119, abs=1e-4)
    assert mfcc(np.zeros(300, np.int16), 16_000).shape == (1, 13)


@pytest.fixture(scope="module")
def published() -> PublishedSyncNet:
    torch.manual_seed(0)
    return PublishedSyncNet().eval()


def test_the_published_network_has_the_published_shapes(published: PublishedSyncNet) -> None:
    state = published.state_dict()
    assert sum(p.numel() for p in published.parameters()) == 13_631_616
    shapes = {
        "netcnnaud.0.weight": (64, 1, 3, 3),
        "netcnnaud.4.weight": (192, 64, 3, 3),
        "netcnnaud.18.weight": (512, 256, 5, 4),
        "netcnnaud.19.running_var": (512,),
        "netcnnlip.0.weight": (96, 3, 5, 7, 7),
        "netcnnlip.4.weight": (256, 96, 1, 5, 5),
        "netcnnlip.18.weight": (512, 256, 1, 6, 6),
        "netcnnlip.19.running_mean": (512,),
        "netfcaud.3.weight": (1024, 512),
        "netfclip.0.weight": (512, 512),
        "netfclip.1.bias": (512,),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_the_published_network_embeds_five_frames_and_their_speech(
    published: PublishedSyncNet,
) -> None:
    frames = torch.randint(0, 256, (7, 3, 64, 96), dtype=torch.uint8)
    crops = published.crop(frames)
    assert crops.shape == (7, 3, 224, 224)
    video = published.embed_video(crops)
    assert video.shape == (3, 1024)
    # One window alone is embedded as among others, and its colours are told apart.
    torch.testing.assert_close(published.embed_video(crops[1:6]), video[1:2], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(published.embed_video(crops[:5].flip(1)), video[:1], atol=1e-4)
    speech = torch.randint(-3000, 3000, (16_000,), dtype=torch.int16)
    rows = published.embed_speech(speech)
    assert rows.shape[1] == 1024 and len(rows) >= num_windows(25, 16_000, 640)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_published_weights_are_loaded(
    published: PublishedSyncNet, kind: str, tmp_path: Path
) -> None:
    """The authors' file was saved before torch kept files as archives, and counted batches."""
    state = {k: v for k, v in published.state_dict().items() if "num_batches" not in k}
    path = tmp_path / ("syncnet.safetensors" if kind == "safetensors" else "syncnet_v2.model")
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    loaded = load_published(path)
    for name, value in loaded.state_dict().items():
        if name in state:
            assert torch.equal(value, state[name]), name
    assert not loaded.training


def test_other_weights_are_refused(published: PublishedSyncNet, tmp_path: Path) -> None:
    state = dict(published.state_dict())
    state["netfcaud.3.weight"] = torch.zeros(512, 512)
    torch.save(state, tmp_path / "other.model")
    with pytest.raises(WeightsError, match=r"netfcaud\.3\.weight"):
        load_published(tmp_path / "other.model")
    torch.save(published, tmp_path / "code.model")
    with pytest.raises(WeightsError):
        load_published(tmp_path / "code.model")
    with pytest.raises(WeightsError):
        load_published(tmp_path / "missing.model")


def test_own_network_gives_a_row_for_each_window_in_any_pieces(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = OwnSyncNet().eval()
    save_file(network.state_dict(), tmp_path / "own.safetensors")
    network = load_own(tmp_path / "own.safetensors")
    crops = network.crop(torch.randint(0, 256, (150, 3, 128, 192), dtype=torch.uint8))
    assert crops.shape == (150, 3, 64, 96)
    rows = network.embed_video(crops)
    assert len(rows) == 146
    torch.testing.assert_close(rows[100:106], network.embed_video(crops[100:110]))
    pcm = torch.randint(-3000, 3000, (48_000,), dtype=torch.int16)
    heard = network.embed_speech(pcm)
    assert heard.shape == (44, 128)
    torch.testing.assert_close(heard[10:30], network.embed_speech(pcm[8000:40_000])[2:22])


def test_own_speech_features_are_those_it_was_trained_on() -> None:
    """Row i covers the twenty mel frames of video frames i to i + 4."""
    network = OwnSyncNet().eval()
    pcm = torch.zeros(24_000, dtype=torch.int16)
    silent = network.embed_speech(pcm)
    pcm[12_490:12_510] = 9000  # the middle of video frame 12: a mel window has 600 samples
    changed = (network.embed_speech(pcm) - silent).abs().amax(1) > 1e-6
    assert changed.nonzero().flatten().tolist() == list(range(8, 13))
