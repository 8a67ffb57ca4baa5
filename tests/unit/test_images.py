"""Uploaded pictures: whatever people really have becomes the model's size, or a reason."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from characters_serve.gateway.images import BACKGROUND, MAX_PIXELS, ImageError, load_reference

WIDTH, HEIGHT = 96, 64


def encoded(image: Image.Image, format_name: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format_name, **options)
    return out.getvalue()


def loaded(data: bytes, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    rgb = load_reference(data, width, height)
    assert len(rgb) == width * height * 3
    return np.frombuffer(rgb, np.uint8).reshape(height, width, 3)


def middle(pixels: np.ndarray) -> tuple[int, ...]:
    return tuple(int(v) for v in pixels[HEIGHT // 2, WIDTH // 2])


@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("size", [(96, 64), (400, 300), (300, 900), (1920, 1080), (64, 64)])
def test_any_size_becomes_the_models(format_name: str, size: tuple[int, int]) -> None:
    pixels = loaded(encoded(Image.new("RGB", size, (200, 40, 90)), format_name))
    assert np.abs(pixels.astype(int) - (200, 40, 90)).max() < 8


@pytest.mark.parametrize(
    ("mode", "colour", "format_name", "expected"),
    [
        ("L", 128, "PNG", (128, 128, 128)),
        ("L", 128, "JPEG", (128, 128, 128)),
        ("1", 1, "PNG", (255, 255, 255)),
        ("P", 0, "PNG", (0, 0, 0)),
        ("LA", (90, 255), "PNG", (90, 90, 90)),
        ("I;16", 32_896, "PNG", (128, 128, 128)),
        ("I;16", 400, "PNG", (2, 2, 2)),
        ("CMYK", (0, 0, 0, 0), "JPEG", (255, 255, 255)),
        ("RGBA", (10, 20, 30, 0), "PNG", BACKGROUND),
        ("RGBA", (10, 20, 30, 0), "WEBP", BACKGROUND),
        ("RGBA", (10, 20, 30, 255), "PNG", (10, 20, 30)),
    ],
)
def test_every_colour_mode_becomes_rgb(
    mode: str, colour: object, format_name: str, expected: tuple[int, int, int]
) -> None:
    image = Image.new(mode, (120, 80), colour)  # type: ignore[arg-type]
    assert np.abs(np.subtract(middle(loaded(encoded(image, format_name))), expected)).max() <= 2


def test_palette_transparency_shows_the_background() -> None:
    image = Image.new("P", (120, 80), 3)
    image.putpalette([255, 0, 0] * 256)
    data = encoded(image, "PNG", transparency=3)
    assert middle(loaded(data)) == BACKGROUND
    by_entry = encoded(image, "PNG", transparency=bytes([255, 255, 255, 0]))
    assert middle(loaded(by_entry)) == BACKGROUND


def test_a_phone_picture_is_brought_upright() -> None:
    upright = Image.new("RGB", (120, 80), "white")
    upright.paste("red", (0, 0, 120, 40))
    lying = upright.rotate(90, expand=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to view
    pixels = loaded(encoded(lying, "JPEG", exif=exif))
    assert pixels[5, 48, 1] < 60, "red above"
    assert pixels[-5, 48, 1] > 200, "white below"


def test_the_crop_is_centred_across_and_keeps_more_of_the_top() -> None:
    wide = np.zeros((64, 192, 3), np.uint8)
    wide[:, 96:, 0] = 255
    pixels = loaded(encoded(Image.fromarray(wide), "PNG"))
    assert pixels[32, 40, 0] < 20 and pixels[32, 56, 0] > 235

    rows = np.linspace(0, 255, 192).astype(np.uint8)
    tall = np.repeat(np.repeat(rows[:, None, None], 96, 1), 3, 2)
    pixels = loaded(encoded(Image.fromarray(tall), "PNG"))
    dropped_above, dropped_below = int(pixels[0, 48, 0]), 255 - int(pixels[-1, 48, 0])
    assert 0 < dropped_above < dropped_below


@pytest.mark.parametrize("format_name", ["PNG", "WEBP"])
def test_an_animation_gives_its_first_frame(format_name: str) -> None:
    frames = [Image.new("RGB", (96, 64), colour) for colour in ("red", "green", "blue")]
    data = encoded(frames[0], format_name, save_all=True, append_images=frames[1:], lossless=True)
    assert middle(loaded(data)) == (255, 0, 0)


@pytest.mark.parametrize("format_name", ["GIF", "BMP", "TIFF", "ICO", "PDF"])
def test_other_formats_are_refused_by_name(format_name: str) -> None:
    data = encoded(Image.new("RGB", (96, 64)), format_name)
    with pytest.raises(ImageError, match=f"{format_name}.*PNG, JPEG or WebP"):
        load_reference(data, WIDTH, HEIGHT)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"hello", "not accepted"),
        (b"8BPS" + bytes(64), "PSD"),
        (b'<?xml version="1.0"?><svg onload="alert(1)"/>', "SVG"),
        (b"\x00\x00\x00\x1cftypavif" + bytes(64), "AVIF"),
        (b"\x00\x00\x00\x18ftypheic" + bytes(64), "HEIC"),
        (b"\x89PNG\r\n\x1a\n" + bytes(64), "damaged"),
        (b"\xff\xd8\xff\xe0" + bytes(64), "damaged"),
        (b"RIFF\x00\x00\x00\x00WEBP" + bytes(64), "damaged"),
    ],
)
def test_what_is_no_picture_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        load_reference(data, WIDTH, HEIGHT)


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(8000, 8000), (16_385, 100), (7000, 6000)])
def test_a_decompression_bomb_is_refused_by_its_header(size: tuple[int, int]) -> None:
    assert size[0] * size[1] > MAX_PIXELS["PNG"] or max(size) > 16_384
    with pytest.raises(ImageError, match="at most"):
        load_reference(png_header(*size), WIDTH, HEIGHT)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(12_000, 12_000), (2**31 - 1, 2**31 - 1)])
def test_a_giant_is_refused_too(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError):
        load_reference(png_header(*size), WIDTH, HEIGHT)


def test_a_jpeg_of_endless_scans_is_refused_before_it_is_decoded() -> None:
    gradient = Image.linear_gradient("L").convert("RGB")
    data = encoded(gradient, "JPEG", progressive=True)
    loaded(data)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(ImageError, match="too many scans"):
        load_reference(data[:-2] + scan * 50 + data[-2:], WIDTH, HEIGHT)


def test_a_large_phone_picture_is_accepted() -> None:
    data = encoded(Image.new("RGB", (8160, 6120), "teal"), "JPEG")
    assert loaded(data)[0, 0, 1] > 100


@pytest.mark.parametrize("size", [(63, 200), (200, 63), (1, 1)])
def test_a_picture_without_detail_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="at least 64 x 64"):
        load_reference(encoded(Image.new("RGB", size), "PNG"), WIDTH, HEIGHT)


def test_a_truncated_picture_is_refused() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 120, 3), np.uint8))
    for format_name in ("PNG", "JPEG", "WEBP"):
        data = encoded(noise, format_name)
        with pytest.raises(ImageError, match="damaged"):
            load_reference(data[: len(data) // 2], WIDTH, HEIGHT)


@settings(max_examples=150, deadline=None)
@given(
    source=st.sampled_from(["PNG", "JPEG", "WEBP"]),
    edits=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=12),
)
def test_hostile_bytes_give_pixels_or_a_reason_and_nothing_else(
    source: str, edits: list[tuple[int, int]]
) -> None:
    gradient = np.add.outer(np.arange(70), np.arange(70)).astype(np.uint8)
    data = bytearray(encoded(Image.fromarray(gradient).convert("RGB"), source))
    for position, value in edits:
        data[position % len(data)] = value
    try:
        assert len(load_reference(bytes(data), WIDTH, HEIGHT)) == WIDTH * HEIGHT * 3
    except ImageError as error:
        assert str(error)
