"""In: an uploaded file's bytes. Out: RGB rows of exactly the model's size. Knows no session.

Whatever a phone, a screenshot tool or an image editor writes as PNG, JPEG or WebP is brought
upright, flattened, cropped to the model's aspect and resized. What strangers send comes here
through image_process.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps

MIN_SIDE = 64
# JPEG decodes at a fraction of its size (64 megapixels: 0.1 s, progressive 1.1 s); the others in
# full (25 megapixels of WebP: 1.2 s and 300 MB).
MAX_PIXELS = {"JPEG": 64_000_000, "PNG": 25_000_000, "WEBP": 25_000_000}
# An encoder writes 10 or so; each costs a pass over the whole picture, and may be a few bytes long.
MAX_JPEG_SCANS = 40
MAX_SIDE = 16_384
BACKGROUND = (206, 208, 212)
# Of the rows that the crop drops, the share that is dropped above: faces sit high in a picture.
CROP_ABOVE = 0.3

_FORMATS = ("PNG", "JPEG", "WEBP")
# Now, since a confined process can open no file later.
Image.init()
_REFUSED = (
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"8BPS", "PSD"),
    (b"%PDF", "PDF"),
    (b"\x00\x00\x01\x00", "ICO"),
)


class ImageError(ValueError):
    """A picture that cannot be used; the message says why, in words for its owner."""

    field = "image"


def sniff(data: bytes) -> str:
    """The format by the file's first bytes, whatever its name or declared type."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if not data:
        raise ImageError("the image is empty")
    raise ImageError(f"{_name_of(data)} is not accepted; use PNG, JPEG or WebP")


def _name_of(data: bytes) -> str:
    for magic, name in _REFUSED:
        if data.startswith(magic):
            return name
    if data[4:8] == b"ftyp":
        return "AVIF" if data[8:12] in (b"avif", b"avis") else "HEIC or another video format"
    if b"<svg" in data[:1024].lower():
        return "SVG"
    return "this kind of file"


def load_reference(data: bytes, width: int, height: int) -> bytes:
    """Packed RGB, height x width x 3."""
    format_name = sniff(data)
    if format_name == "JPEG" and data.count(b"\xff\xda") > MAX_JPEG_SCANS:
        raise ImageError("the image has too many scans; save it as a plain JPEG")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(*image.size, MAX_PIXELS[format_name])
            if format_name == "JPEG":
                # Decodes at a fraction of the size where that is still large enough.
                image.draft("RGB", (2 * max(width, height), 2 * max(width, height)))
            image.load()  # an animation's first frame
            rgb = _flatten(ImageOps.exif_transpose(image))
    except ImageError:
        raise
    except MemoryError:
        raise ImageError("the image is too large to decode") from None
    except Exception as error:  # decoders raise anything on hostile bytes; none may pass this edge
        raise ImageError(f"the image is damaged ({type(error).__name__})") from None
    return _cover(rgb, width, height).tobytes()


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < MIN_SIDE or height < MIN_SIDE:
        raise ImageError(
            f"the image is {width} x {height}; it must be at least {MIN_SIDE} x {MIN_SIDE} pixels"
        )
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        raise ImageError(
            f"the image is {width} x {height}; at most {max_pixels // 1_000_000} megapixels "
            f"and {MAX_SIDE} pixels a side are accepted"
        )


def _flatten(image: Image.Image) -> Image.Image:
    """8-bit RGB; what was transparent shows a soft grey."""
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would clip instead of scale
        grey = np.asarray(image, dtype=np.float32) * (255.0 / 65_535.0)
        return Image.fromarray(grey.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        backdrop = Image.new("RGBA", rgba.size, (*BACKGROUND, 255))
        backdrop.alpha_composite(rgba)
        return backdrop.convert("RGB")
    return image.convert("RGB")


def _cover(image: Image.Image, width: int, height: int) -> Image.Image:
    """The largest crop of the wanted aspect, centred across and slightly towards the top."""
    scale = min(image.width / width, image.height / height)
    crop_width, crop_height = width * scale, height * scale
    left = (image.width - crop_width) / 2
    top = (image.height - crop_height) * CROP_ABOVE
    box = (left, top, left + crop_width, top + crop_height)
    return image.resize((width, height), Image.Resampling.LANCZOS, box=box)
