"""The engine runs an open family as it runs its own: same chunker, denoiser and decoder."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from characters_serve.config import ModelConfig, Optimizations, load_config
from characters_serve.doctor import examine
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.generator import load_family, load_prompt
from characters_serve.engine.rank import warm_up
from characters_serve.engine.reference_image import image_tensor
from characters_serve.engine.step_input import PackedStep
from characters_serve.messages import AgentAudio
from characters_serve.model.open.live_avatar import LiveAvatarGenerator
from characters_serve.model.weights import WeightsError
from characters_serve.session.chunker import Chunker
from tests.unit import small_causal_wan, small_live_avatar

# Short of motion: 25 still frames are encoded for it, not 73.
SMALL = ModelConfig.model_validate(
    small_live_avatar.SMALL.model_dump()
    | {"height": 64}
    | {
        "live_avatar": {
            "audio_layers": 5,
            "audio_dim": 20,
            "audio_after_blocks": (0, 2),
            "motion_latents": (1, 2, 4),
        }
    }
)

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parents[2] / "configs"
CHUNKS = 3


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (SMALL.height, SMALL.width, 3))
    return pixels.astype(np.uint8).tobytes()


def speech() -> bytes:
    samples = np.random.default_rng(5).normal(0, 4000, CHUNKS * SMALL.audio_samples_per_chunk)
    return samples.astype("<i2").tobytes()


def denoiser() -> Denoiser:
    pytest.importorskip("transformers", reason="the extra `open` is not installed")
    generator = load_family(SMALL, device=CPU, dtype=torch.float32)
    prompt = load_prompt(SMALL, CPU)
    return Denoiser(generator, SMALL, Optimizations(), prompt=prompt)


def talk(denoiser: Denoiser, image: bytes, spoken: bytes) -> list[Tensor]:
    """A session's latents, with the messages and tensors that a live one has."""
    chunker, packed = Chunker(SMALL, "s", seed=1), PackedStep(SMALL, CPU)
    if spoken:
        chunker.add(AgentAudio("s", 1, SMALL.audio.sample_rate, spoken, "", last=True))
    denoiser.start(image_tensor(image, SMALL, CPU), seed=1)
    latents = []
    for _ in range(CHUNKS):
        step = chunker.next(passes=4, listening_energy=0.0)
        assert len(step.voice_48k) == 2 * 23_040
        packed.fill(step)
        latents.append(denoiser.step(packed.audio_window, packed.controls, packed.passes))
    return latents


def test_live_avatar_talks_through_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = denoiser()
    assert warm_up(engine, PackedStep(SMALL, CPU), SMALL, [4]) > 0
    sessions: list[str] = []
    write_prefix = LiveAvatarGenerator.write_prefix

    def counted(self: LiveAvatarGenerator, *arguments: Any) -> object:
        sessions.append("begun")
        return write_prefix(self, *arguments)

    monkeypatch.setattr(LiveAvatarGenerator, "write_prefix", counted)
    spoken = talk(engine, picture(1), speech())
    assert all(latent.shape == (SMALL.video_tokens, SMALL.token_channels) for latent in spoken)
    again = talk(engine, picture(1), speech())
    assert all(torch.equal(a, b) for a, b in zip(spoken, again, strict=True))
    for other in (talk(engine, picture(2), speech()), talk(engine, picture(1), b"")):
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(spoken, other, strict=True))
    # Conditions are made once a session, whatever its steps.
    assert len(sessions) == 4

    decoder = ChunkDecoder(SMALL, CPU, torch.float32)
    decoder.start(picture(1))
    frames = [frame for latent in spoken for frame in decoder.decode(latent)]
    assert len(frames) == CHUNKS * SMALL.frames_per_chunk
    assert {len(frame) for frame in frames} == {SMALL.width * SMALL.height * 3 // 2}
    assert len(set(frames)) == len(frames)


def with_text(file: Path | None) -> ModelConfig:
    assert SMALL.wan is not None
    wan = SMALL.wan.model_copy(update={"text_embedding": None if file is None else str(file)})
    return SMALL.model_copy(update={"weights": "/somewhere", "wan": wan})


def test_the_prompt_is_read_from_its_file(tmp_path: Path) -> None:
    text = torch.randn(5, 24)
    save_file({"text": text}, tmp_path / "text.safetensors")
    found = load_prompt(with_text(tmp_path / "text.safetensors"), CPU)
    assert found is not None and torch.equal(found, text[None])


def test_a_prompt_beside_the_weights_needs_no_name(tmp_path: Path) -> None:
    text = torch.randn(5, 24)
    save_file({"text": text}, tmp_path / "text.safetensors")
    found = load_prompt(with_text(None).model_copy(update={"weights": str(tmp_path)}), CPU)
    assert found is not None and torch.equal(found, text[None])


def test_a_prompt_that_is_none_is_named(tmp_path: Path) -> None:
    save_file({"text": torch.zeros(5, 23)}, tmp_path / "narrow.safetensors")
    save_file({"words": torch.zeros(5, 24)}, tmp_path / "words.safetensors")
    save_file({"text": torch.zeros(9, 24)}, tmp_path / "long.safetensors")
    for file, says in (
        (None, r"text_embedding: no /somewhere/text\.safetensors; `characters embed-text`"),
        (tmp_path / "nowhere.safetensors", "nowhere"),
        (tmp_path / "narrow.safetensors", r"has \(5, 23\); expected `text` \(up to 8, 24\)"),
        (tmp_path / "long.safetensors", r"has \(9, 24\); expected `text` \(up to 8, 24\)"),
        (tmp_path / "words.safetensors", "has nothing of that name"),
    ):
        with pytest.raises(WeightsError, match=says):
            load_prompt(with_text(file), CPU)


PLAIN = CONFIGS / "plain.yaml"


@pytest.mark.parametrize(
    ("files", "changes", "says", "smallest"),
    [
        ([PLAIN], [], "33 GB of weights and 50 GB of cache; ", 85),
        ([], [], "20 GB of weights and 26 GB of cache; ", 48),
        ([], ["engine.tensor_parallel=2"], "11 GB of weights and 13 GB of cache on each GPU; ", 26),
    ],
    ids=["plain", "fp8", "two GPUs"],
)
def test_doctor_says_what_fits_and_what_is_missing(
    files: list[Path],
    changes: list[str],
    says: str,
    smallest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = ["model.weights=/somewhere", *changes]
    config = load_config([CONFIGS / "live-avatar-14b.yaml", *files], changes)
    found = {finding.subject: finding for finding in examine(config)}
    assert says in found["model's memory"].words
    assert not found["prompt"].good and not found["speech model"].good and not found["weights"].good
    for size, fits in ((smallest - 4, False), (smallest, True)):
        memory = SimpleNamespace(total=size * 10**9, available=size * 10**9)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        verdict = {finding.subject: finding.good for finding in examine(config)}
        assert torch.cuda.is_available() or verdict["model's memory"] == fits
    # What the groups' layout is judged by is the same.
    held = found["gpu placement"].words
    gib = [float(n) for n in re.findall(r"([\d.]+) GiB of (?:weights|cache)", held)]
    gb = [float(n) for n in re.findall(r"(\d+) GB of (?:weights|cache)", says)]
    assert [n * 1024**3 / 1e9 for n in gib] == pytest.approx(gb, abs=0.6)
    embedded = {finding.subject for finding in examine(load_config())}
    assert not embedded & {"model's memory", "prompt", "speech model"}


@pytest.mark.parametrize("start", ["text", "image"])
def test_causal_wan_streams_through_the_engine(start: str) -> None:
    model = small_causal_wan.causal_wan(
        decoder="wan21",
        decoder_dim=4,
        causal_wan={"window_latents": 7, "sink_latents": 1, "start": start},
    )
    generator = load_family(model, device=CPU, dtype=torch.float32)
    engine = Denoiser(generator, model, Optimizations(), prompt=load_prompt(model, CPU))
    packed = PackedStep(model, CPU)
    assert warm_up(engine, packed, model, [4]) > 0
    decoder = ChunkDecoder(model, CPU, torch.float32)

    def film(seed: int) -> list[bytes]:
        random = np.random.default_rng(seed)
        image = random.integers(0, 256, model.height * model.width * 3, np.uint8).tobytes()
        engine.start(image_tensor(image, model, CPU), seed=1)
        decoder.start(image)
        frames: list[bytes] = []
        for _ in range(3):
            latent = engine.step(packed.audio_window, packed.controls, 4)
            frames += decoder.decode(latent)
        return frames

    frames = film(1)
    assert len(frames) == 3 * model.frames_per_chunk
    assert {len(frame) for frame in frames} == {model.width * model.height * 3 // 2}
    # From text, the first latent is one frame, held for its four; all others differ.
    assert len(set(frames)) == len(frames) - (3 if start == "text" else 0)
    assert film(1) == frames
    # The picture is seen by models that start from it, and by no others.
    assert (film(2) != frames) == (start == "image")
