"""Real pictures in the decoder's training: who is held out, and how a still picture moves."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from characters_serve.config import ModelConfig
from scripts.measurements import odd_pictures
from scripts.train_tiny.attributes import CONTROL_NAMES, NUM_CONTROLS
from scripts.train_tiny.data import Clips
from scripts.train_tiny.real_clips import RealPictures, moved
from scripts.train_tiny.real_pictures import NO_FACE, PHOTOGRAPHS, alike, pack
from scripts.train_tiny.renderer import HEIGHT, WIDTH, Renderer, sample_characters
from scripts.train_tiny.train_autoencoder import show

MODEL = ModelConfig(width=96, height=64)
FACE = torch.tensor([[48.0, 30.0, 15.0, 19.0, 0.0]])


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth, as pictures are."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 255


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    face = (0.5, 0.4, 0.6, 0.1)
    groups = [
        [(noise(120, 150, 1), face), (noise(200, 100, 2), NO_FACE)],
        [(noise(96, 64, 3), face)],
        [(noise(96, 64, 4), NO_FACE)],
    ]
    np.savez(folder / "real.npz", **pack(groups)._asdict())
    return folder


@pytest.fixture(scope="module")
def pictures(folder: Path) -> RealPictures:
    return RealPictures(folder, MODEL, torch.device("cpu"), per_batch=2)


def test_without_the_file_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"real_pictures --out .*real\.npz.*--real-clips 0"):
        RealPictures(tmp_path, MODEL, torch.device("cpu"), per_batch=4)


def test_what_is_judged_with_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def recorded(package: str, path: str) -> io.BytesIO:
        read.append(Path(path).name)
        file = io.BytesIO()
        noise(320, 240).save(file, "PNG")
        return file

    monkeypatch.setattr(odd_pictures, "_data", recorded)
    judged = dict(odd_pictures.odd_pictures())
    assert {"astronaut.png", "grace_hopper.jpg"} <= set(read)
    trained = {Path(path).name for paths in PHOTOGRAPHS.values() for path in paths}
    assert not trained & set(read)

    mascot, smiley = judged["mascot"], judged["smiley"]
    assert alike(mascot, ImageOps.autocontrast(mascot.resize((200, 150))))
    assert not alike(mascot, smiley)


def test_clips_look_like_pictures_and_move_smoothly(pictures: RealPictures) -> None:
    generator = torch.Generator().manual_seed(3)
    time = torch.linspace(0, 0.25, 8).view(1, -1, 1)
    phase = torch.rand(24, 1, NUM_CONTROLS, generator=generator) * 6.28
    controls = 0.5 + 0.5 * torch.sin(6.28 * time + phase)
    frames, reference, weights = pictures.sample(controls, torch.zeros(24, NUM_CONTROLS), generator)
    assert frames.shape == (24, 8, 3, 64, 96) and reference.shape == (24, 3, 64, 96)
    assert weights.shape == (24, 8, 1, 64, 96)
    assert ((weights == 1) | (weights == 9)).all() and (weights == 9).any()
    assert frames.min() >= 0 and frames.max() <= 1
    from_reference = (frames - reference[:, None]).abs().mean((1, 2, 3, 4))
    assert frames.diff(dim=1).abs().mean((2, 3, 4)).max() < 0.05
    assert from_reference.median() > 0.01
    assert from_reference.min() < 0.2 * from_reference.median(), "some are nearly still"


class Darkness(Renderer):
    def __call__(self, attributes: Tensor, controls: Tensor) -> Tensor:
        return torch.zeros(len(attributes), 3, HEIGHT, WIDTH)


def test_the_last_clips_of_a_batch_are_of_real_pictures(folder: Path) -> None:
    pictures = RealPictures(folder, ModelConfig(), torch.device("cpu"), per_batch=2)
    generator = torch.Generator().manual_seed(2)
    clips = Clips(
        sample_characters(3, generator, "cpu"),
        torch.rand(3, 4, NUM_CONTROLS, generator=generator),
        torch.zeros(3, 1, 28, 40),
        torch.zeros(3, NUM_CONTROLS),
    )
    frames, reference, weights = show(clips, Darkness("cpu"), pictures, generator)
    assert frames.shape == (3, 4, 3, HEIGHT, WIDTH)
    assert weights.shape == (3, 4, 1, HEIGHT, WIDTH)
    assert [bool(clip.any()) for clip in frames] == [False, True, True]
    assert [bool(picture.any()) for picture in reference] == [False, True, True]


def test_the_same_seed_makes_the_same_clips(pictures: RealPictures) -> None:
    controls = torch.rand(3, 4, NUM_CONTROLS)
    twice = [
        pictures.sample(controls, controls[:, 0], torch.Generator().manual_seed(5)) for _ in "ab"
    ]
    assert all(torch.equal(one, other) for one, other in zip(*twice, strict=True))


def test_held_out_pictures_are_shown_as_they_are(pictures: RealPictures) -> None:
    at_rest = torch.zeros(1, 4, NUM_CONTROLS)
    frames, reference, _ = pictures.sample_held_out(
        0, at_rest, at_rest[:, 0], torch.Generator().manual_seed(0)
    )
    assert (reference - pixels(noise(96, 64, 4))).abs().mean() < 0.02, "but for WebP"
    torch.testing.assert_close(frames, reference[:, None].expand_as(frames), atol=1e-3, rtol=0)


def acted(picture: Tensor, **controls: float) -> Tensor:
    change = torch.zeros(1, 1, NUM_CONTROLS)
    for name, value in controls.items():
        change[..., CONTROL_NAMES.index(name)] = value
    return moved(picture, FACE, change, torch.zeros(1, 3))[0, 0, :3]


@pytest.mark.parametrize("level", (0.0, 0.02, 0.5, 1.0))
def test_a_little_more_of_every_control_changes_no_pixel_by_much(level: float) -> None:
    picture = pixels(noise(96, 64))
    one, other = (acted(picture, **dict.fromkeys(CONTROL_NAMES, x)) for x in (level, level + 1e-3))
    assert 0 < (one - other).abs().max() < 0.03


def test_heads_follow_their_controls_and_the_background_stays() -> None:
    dot = torch.zeros(1, 3, 64, 96)
    dot[..., 28:32, 46:50] = 1
    columns = torch.arange(96.0)

    def middle(**controls: float) -> float:
        lit = acted(dot, **controls).mean((0, 1))
        return float((lit * columns).sum() / lit.sum())

    assert middle(head_x=-1) + 3 < middle() < middle(head_x=1) - 3
    picture = pixels(noise(96, 64))
    turned = acted(picture, head_x=1, head_y=-1, roll=1, open=1, blink=1)
    assert (turned - picture[0])[..., :8].abs().max() < 0.02


def test_mouths_open_dark_and_eyes_close() -> None:
    white = torch.ones(1, 3, 64, 96)
    mouth = acted(white, open=1)
    assert mouth[:, 39, 48].max() < 0.1 and mouth[:, 39, :36].min() > 0.9
    eyes = white.clone()
    eyes[..., 26:30, :] = 0  # the row in which they lie
    dark = [(1 - acted(eyes, blink=blink)[0, 20:36, 54]).sum().item() for blink in (0.0, 1.0)]
    assert dark[1] < 0.4 * dark[0]
