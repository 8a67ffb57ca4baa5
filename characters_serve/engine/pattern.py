"""In: StepInput. Out: VideoChunk with a test picture. Needs no model, no torch and no GPU.

Once a second a box flashes and a 1 kHz beep sounds, on the same frame and sample, so that the whole
delivery path can be measured: a counter that machines read gives lost and held frames, flash and
beep give the distance between picture and sound. Geometry is in fractions of the picture, so a
uncropped copy at any size can be read.

    y 0.04..0.14   16 squares, the frame index in binary, most significant bit first;
                   square i covers x (2 + i) / 20 .. (3 + i) / 20, white is 1
    y 0.17..0.27   noise that changes with each frame: without it the picture needs 0.3 Mbit/s at
                   1088x704, and no encoder would fill its rate as it does with a face
    y 0.30..0.60   the flash box, x 0.35..0.65
    y 0.66..0.82   the frame index in digits
    y 0.86..0.96   a bar that crosses the picture once a second
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from characters_serve.channels import BlockingChannel, Inbox, endpoint
from characters_serve.config import Config, ModelConfig, PatternConfig
from characters_serve.engine.child import run_child
from characters_serve.messages import (
    CharacterEnded,
    CharacterReady,
    EndCharacter,
    StartCharacter,
    StepInput,
    VideoChunk,
)
from characters_serve.processes import ControlLink, arguments

Luma = NDArray[np.uint8]

COUNTER_BITS = 16
FLASH_S = 0.1
BEEP_HZ = 1000
BEEP_PEAK = 8000
BEEP_SAMPLES = 4800

_BLACK, _GREY, _WHITE = 16, 72, 235
_FLASH_BOX = (0.30, 0.60, 0.35, 0.65)
_COUNTER_ROWS = (0.04, 0.14)
_NOISE_BOX = (0.17, 0.27, 0.0, 1.0)
_NOISE = np.random.default_rng(0).integers(_GREY - 20, _GREY + 20, 1 << 17).astype(np.uint8)
_GLYPHS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001001001001",
    "111101111101111",
    "111101111001111",
)
_DIGITS = np.array([[int(c) for c in glyph] for glyph in _GLYPHS], np.uint8).reshape(10, 5, 3)


def flash_is_on(frame_index: int, fps: int) -> bool:
    return (frame_index % fps) / fps < FLASH_S


def pattern_frame(model: ModelConfig, frame_index: int) -> bytes:
    """One I420 frame of the pattern."""
    height, width = model.height, model.width
    luma = np.full((height, width), _GREY, np.uint8)
    chroma = np.full((2, height // 2, width // 2), 128, np.uint8)
    for bit in range(COUNTER_BITS):
        is_one = frame_index >> (COUNTER_BITS - 1 - bit) & 1
        _region(luma, (*_COUNTER_ROWS, (2 + bit) / 20, (3 + bit) / 20))[:] = (
            _WHITE if is_one else _BLACK
        )
    _region(luma, _FLASH_BOX)[:] = _WHITE if flash_is_on(frame_index, model.fps) else _BLACK
    noise = _region(luma, _NOISE_BOX)
    noise[:] = np.resize(np.roll(_NOISE, 7919 * frame_index), noise.shape)
    _draw_digits(luma, frame_index)
    left = 0.95 * (frame_index % model.fps) / model.fps
    bar = (0.86, 0.96, left, left + 0.05)
    _region(luma, bar)[:] = 140
    _region(chroma[0], bar)[:] = 200
    return luma.tobytes() + chroma.tobytes()


def pattern_voice(model: ModelConfig, chunk_index: int, voice_48k: bytes) -> bytes:
    """The chunk's voice with its part of the once-a-second beep mixed over it."""
    count = model.voice_samples_per_chunk
    in_second = (chunk_index * count + np.arange(count)) % 48_000
    beep = BEEP_PEAK * np.sin(2 * np.pi * BEEP_HZ / 48_000 * in_second)
    beep[in_second >= BEEP_SAMPLES] = 0
    mixed = np.frombuffer(voice_48k, "<i2").astype(np.int32) + np.rint(beep).astype(np.int32)
    clipped: NDArray[np.int16] = np.clip(mixed, -32_768, 32_767).astype("<i2")
    return clipped.tobytes()


def pattern_chunk(model: ModelConfig, step: StepInput) -> VideoChunk:
    started_s = time.perf_counter()
    first = step.chunk_index * model.frames_per_chunk
    frames = [pattern_frame(model, first + index) for index in range(model.frames_per_chunk)]
    voice = pattern_voice(model, step.chunk_index, step.voice_48k)
    return VideoChunk(
        session_id=step.session_id,
        epoch=step.epoch,
        chunk_index=step.chunk_index,
        frames_i420=frames,
        voice_48k=voice,
        utterance_id=step.utterance_id,
        utterance_offset_ms=step.utterance_offset_ms,
        last=step.last,
        passes=step.passes,
        step_ms=0.0,
        decode_ms=(time.perf_counter() - started_s) * 1000,
        decode_began_s=started_s,
    )


def step_ms(pace: PatternConfig, chunk_index: int) -> float:
    """How long this chunk's step takes."""
    long = chunk_index % pace.long_step_every == pace.long_step_every - 1
    return max(pace.step_ms, pace.long_step_ms) if long else pace.step_ms


def read_counter(luma: Luma) -> int | None:
    """The frame index modulo 65,536 in a picture's luma (H, W); None where it is not legible."""
    value = 0
    for bit in range(COUNTER_BITS):
        # The middle of the square: its edges are blurred by scaling and compression.
        middle = (0.07, 0.11, (2.3 + bit) / 20, (2.7 + bit) / 20)
        level = float(_region(luma, middle).mean())
        if 90 < level < 160:
            return None
        value = value << 1 | int(level >= 160)
    return value


def read_flash(luma: Luma) -> bool:
    """Whether the flash box of a picture's luma (H, W) is lit."""
    return float(_region(luma, (0.35, 0.55, 0.40, 0.60)).mean()) > 125


def luma_of(frame_i420: bytes, width: int, height: int) -> Luma:
    return np.frombuffer(frame_i420, np.uint8, width * height).reshape(height, width)


def _region(plane: Luma, box: tuple[float, float, float, float]) -> Luma:
    """A view of the box (top, bottom, left, right) in fractions of the plane."""
    top, bottom, left, right = box
    height, width = plane.shape
    return plane[
        round(top * height) : round(bottom * height), round(left * width) : round(right * width)
    ]


def _draw_digits(luma: Luma, number: int) -> None:
    height, width = luma.shape
    scale = max(1, round(0.16 * height / 5))
    top, left = round(0.66 * height), round(0.1 * width)
    for digit in f"{number:06d}":
        glyph = np.kron(_DIGITS[int(digit)], np.ones((scale, scale), np.uint8))
        target = luma[top : top + 5 * scale, left : left + 3 * scale]
        target[glyph[: target.shape[0], : target.shape[1]] == 1] = _WHITE
        left += 4 * scale


def serve(config: Config, group_dir: Path, link: ControlLink) -> None:
    steps = BlockingChannel(endpoint(group_dir, "steps"), "pull", bind=False)
    chunks = BlockingChannel(endpoint(group_dir, "chunks"), "push", bind=False)
    session_id: str | None = None
    link.ready({"engine": "pattern"})
    inbox = Inbox(link.channel, steps)
    for message in inbox.messages(timeout_s=1.0):
        match message:
            case StepInput() if message.session_id == session_id:
                began_s = time.monotonic()
                chunk = pattern_chunk(config.model, message)
                pace_ms = step_ms(config.engine.pattern, message.chunk_index)
                time.sleep(max(0.0, began_s + pace_ms / 1000 - time.monotonic()))
                chunks.send(dataclasses.replace(chunk, step_ms=pace_ms))
            case StartCharacter():
                session_id = message.session_id
                link.channel.send(CharacterReady(session_id, link.name, elapsed_ms=0.0))
            case EndCharacter():
                session_id = None
                link.channel.send(CharacterEnded(message.session_id, link.name))
            case _ if link.answer(message):
                break


def main() -> int:
    options = arguments("The test picture's process of one group.").parse_args()
    return run_child("pattern", options.group_dir, serve)


if __name__ == "__main__":
    raise SystemExit(main())
