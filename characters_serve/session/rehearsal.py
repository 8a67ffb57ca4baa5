"""In: a user's picture, and the group's engine before the session. Out: how much its face moves.

The engine draws the picture at rest, then saying "ah" with closed eyes. A decoder that warps the
reference returns any picture well, so that what tells is the difference: where the model finds no
mouth and no eyes, as in most pictures unlike those it was trained on, hardly anything moves.

Which expression is too little belongs to the weights: `expression.json` beside them, written by
scripts/measurements/odd_pictures.py. Knows no session and no client.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from characters_serve.config import Config, ModelConfig
from characters_serve.messages import PictureReport, StartCharacter, StepInput, VideoChunk
from characters_serve.model.idle_controls import CONTROL_NAMES, neutral
from characters_serve.session.chunker import window_geometry
from characters_serve.session.self_test import Engine, play

SESSION_ID: Final = "picture rehearsal"
REST_CHUNKS: Final = 2
ACT_CHUNKS: Final = 2
CHUNKS: Final = REST_CHUNKS + ACT_CHUNKS
SQUARES_ACROSS: Final = 24
LIVELIEST: Final = 6
"""Squares: a mouth and two eyes."""
_FLATTEST: Final = 2.5
"""Levels of luma that count as contrast everywhere."""

_BUILTIN: Final = Path(__file__).parent.parent / "assets" / "tiny"
_FILE: Final = "expression.json"
_PITCH_HZ: Final = 130.0
_FORMANTS_HZ: Final = (730.0, 1090.0, 2440.0)
"""Of the vowel in "father" (Peterson and Barney 1952, men)."""
_BANDWIDTH_HZ: Final = 120.0
_LOUDNESS: Final = 0.12


def least_expression(model: ModelConfig) -> float | None:
    """Below this a picture is unlike what the weights know; None where nobody has measured it."""
    if model.weights == "synthetic":
        return None
    file = (_BUILTIN if model.weights == "builtin" else Path(model.weights)) / _FILE
    return float(json.loads(file.read_text())["least"]) if file.exists() else None


def vowel(samples: int, rate: int) -> NDArray[np.int16]:
    """A long "ah": harmonics of a voice, each as loud as the formants let it through."""
    harmonics = np.arange(_PITCH_HZ, min(rate / 2, 4000.0), _PITCH_HZ)
    distance = (harmonics[:, None] - np.array(_FORMANTS_HZ)) / _BANDWIDTH_HZ
    loudness = (np.array([1.0, 0.6, 0.3]) / (1.0 + distance**2)).sum(1)
    angles = 2 * np.pi * harmonics[:, None] * np.arange(samples) / rate
    wave = (loudness[:, None] * np.sin(angles)).sum(0)
    wave *= _LOUDNESS / np.sqrt((wave**2).mean())
    samples_16: NDArray[np.int16] = (wave.clip(-1, 1) * 32_767).astype(np.int16)
    return samples_16


def rehearsal_steps(model: ModelConfig, passes: int) -> list[StepInput]:
    """Silence and open eyes, then the vowel and closed ones; the head stays where it is."""
    geometry = window_geometry(model)
    silence = np.zeros(geometry.lead + REST_CHUNKS * geometry.chunk, np.int16)
    spoken = vowel(ACT_CHUNKS * geometry.chunk + geometry.lookahead, model.audio.sample_rate)
    sound = np.concatenate((silence, spoken))
    still = np.tile(neutral(), (model.frames_per_chunk, 1))
    closed = still.copy()
    closed[:, CONTROL_NAMES.index("blink")] = 1.0
    return [
        StepInput(
            session_id=SESSION_ID,
            epoch=0,
            chunk_index=i,
            audio_window=sound[i * geometry.chunk :][: geometry.total].tobytes(),
            voice_48k=bytes(2 * model.voice_samples_per_chunk),
            controls=(still if i < REST_CHUNKS else closed).tobytes(),
            utterance_id=0,
            utterance_offset_ms=0.0,
            last=False,
            passes=passes,
        )
        for i in range(CHUNKS)
    ]


def expression(rest: NDArray[np.uint8], acting: NDArray[np.uint8]) -> float:
    """Luma (frames, H, W) of one chunk at rest and one acting -> 0 where nothing moves.

    The change of the liveliest squares over the contrast around them, times their share of all
    change: a face found is a strong change in few places. Change by itself told less: it is small
    in dark faces, and large where a whole busy picture is smeared.
    """
    still = rest.mean(0, dtype=np.float32)
    change = _squares(np.abs(acting.mean(0, dtype=np.float32) - still))
    variance = _around(_squares(still**2)) - _around(_squares(still)) ** 2
    contrast = np.sqrt(variance.clip(min=0)) + _FLATTEST
    liveliest = np.argsort(change, axis=None)[-LIVELIEST:]
    strength = change.flat[liveliest].mean() / contrast.flat[liveliest].mean()
    return float(strength * change.flat[liveliest].sum() / max(change.sum(), 1e-6))


def _squares(picture: NDArray[np.float32]) -> NDArray[np.float32]:
    """Means of the picture's squares, (H, W) -> (rows, SQUARES_ACROSS)."""
    side = picture.shape[1] // SQUARES_ACROSS
    rows = picture.shape[0] // side
    cut = picture[: rows * side, : SQUARES_ACROSS * side].reshape(rows, side, SQUARES_ACROSS, side)
    means: NDArray[np.float32] = cut.mean((1, 3))
    return means


def _around(squares: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each square's mean with its eight neighbours."""
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(squares, 1, mode="edge"), (3, 3))
    means: NDArray[np.float32] = windows.mean((2, 3))
    return means


async def rehearse(
    engine: Engine,
    config: Config,
    image_rgb: bytes,
    least: float,
    next_chunk: Callable[[], Awaitable[VideoChunk]],
) -> PictureReport:
    """Leaves the engine as it found it. Raises as the self-test does."""
    model = config.model
    steps = rehearsal_steps(model, config.engine.idle_passes)
    await engine.start_character(StartCharacter(SESSION_ID, image_rgb, 0))
    chunks = [chunk async for chunk in play(engine, steps, model, next_chunk)]
    await engine.end_character(SESSION_ID)
    rest, acting = (_luma(chunks[i], model) for i in (REST_CHUNKS - 1, CHUNKS - 1))
    found = expression(rest, acting)
    return PictureReport(expression=round(found, 4), least=least, familiar=found >= least)


def _luma(chunk: VideoChunk, model: ModelConfig) -> NDArray[np.uint8]:
    size = model.height * model.width
    planes = [np.frombuffer(frame, np.uint8, size) for frame in chunk.frames_i420]
    return np.stack(planes).reshape(-1, model.height, model.width)
