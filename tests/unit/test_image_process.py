"""Strangers' pictures are decoded where they can do no harm."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import psutil
import pytest
from PIL import Image

from characters_serve.gateway import image_process
from characters_serve.gateway.image_process import decode
from characters_serve.gateway.images import ImageError, load_reference

WIDTH, HEIGHT = 96, 64


def picture(format_name: str) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(out, format_name)
    return out.getvalue()


@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "WEBP"])
async def test_a_picture_is_the_same_in_a_process_of_its_own(format_name: str) -> None:
    data = picture(format_name)
    assert await decode(data, WIDTH, HEIGHT) == load_reference(data, WIDTH, HEIGHT)


async def test_a_refusal_keeps_its_words() -> None:
    with pytest.raises(ImageError, match="GIF is not accepted; use PNG, JPEG or WebP"):
        await decode(b"GIF89a", WIDTH, HEIGHT)


@pytest.mark.parametrize(
    "attempt", ["crash", "bomb", "read", "connect", "secret"], ids=lambda attempt: str(attempt)
)
async def test_a_decoder_gone_wrong_ends_itself_and_nothing_else(
    attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("CHARACTERS_API_KEY", "k" * 3 * WIDTH * HEIGHT)
    module = "tests.hostile_decoder"
    assert await decode(b"harmless", WIDTH, HEIGHT, module=module)
    with pytest.raises(ImageError, match="damaged"):
        await decode(attempt.encode(), WIDTH, HEIGHT, module=module)


async def test_a_decoder_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(image_process, "WALL_S", 1.0)
    before = psutil.Process().children()
    with pytest.raises(ImageError, match="too long"):
        await decode(b"loop", WIDTH, HEIGHT, module="tests.hostile_decoder")
    waiting = asyncio.create_task(decode(b"loop", WIDTH, HEIGHT, module="tests.hostile_decoder"))
    await asyncio.sleep(0.2)
    waiting.cancel()  # its visitor left
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert psutil.Process().children() == before


def test_the_time_that_it_may_compute_is_less_than_it_is_waited_for() -> None:
    assert image_process.CPU_S < image_process.WALL_S
