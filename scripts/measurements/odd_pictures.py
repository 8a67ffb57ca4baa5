"""Which pictures a character can be made of: how much their faces move, against the truth.

    python -m scripts.measurements.odd_pictures            # an H200: seconds; --device cpu: minutes

In: the weights, drawn characters, and pictures of other kinds. Each is tried as the session host
tries an upload (session/rehearsal.py). Of drawn characters the truth is known, also when turned,
shrunk or recoloured. The expression that all but one in twenty of those who move rightly reach is
written beside the weights, as `expression.json`: run it after each training. Photographs come with
scikit-image and matplotlib (the extra `train`); what else is odd is drawn here.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional

from characters_serve.config import EngineConfig, ModelConfig, Optimizations
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.device import choose_device
from characters_serve.engine.i420 import rgb_to_i420
from characters_serve.gateway.images import load_reference
from characters_serve.model.decoders.reference_warp import VideoDecoder
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.weights import BUILTIN, load_decoder, load_generator
from characters_serve.session.rehearsal import CHUNKS, REST_CHUNKS, expression, rehearsal_steps
from scripts.train_tiny.attributes import CONTROL_NAMES, NUM_CONTROLS
from scripts.train_tiny.pictures import save_sheet
from scripts.train_tiny.quality import about, make_renderer
from scripts.train_tiny.renderer import region_masks, sample_characters

MOVES_RIGHTLY: Final = 0.5
"""Correlation with the true change of mouth and eyes."""
FALSE_ALARMS: Final = 0.05
"""Share of the characters, as they are, who move rightly and are called odd all the same."""
_SEED: Final = 5150
_OPEN_MOUTH: Final = (0.92, 0.3, 0.0, 0.4, 0.2)
_BATCH: Final = 16


class Tried(NamedTuple):
    """N pictures: at rest and acting (N, 3, H, W) in [0, 1], the mean of a chunk's frames; and
    their expressions (N,)."""

    rest: Tensor
    acting: Tensor
    expressions: Tensor


@torch.no_grad()
def rehearse_all(dit: CharacterDiT, decoder: VideoDecoder, images: Tensor) -> Tried:
    """What the host does with one picture, with many at once. images: (N, 3, H, W) in [0, 1]."""
    parts = [_rehearse(dit, decoder, part) for part in torch.split(images, _BATCH)]
    return Tried(*(torch.cat(field) for field in zip(*parts, strict=True)))


def _rehearse(dit: CharacterDiT, decoder: VideoDecoder, images: Tensor) -> Tried:
    model, device = dit.config, images.device
    denoiser = Denoiser(dit, model, Optimizations(), batch=len(images))
    denoiser.start(images, seed=0)
    state = decoder.start(images)
    shown = []
    for step in rehearsal_steps(model, EngineConfig().idle_passes):
        sound = torch.frombuffer(bytearray(step.audio_window), dtype=torch.int16) / 32_768
        controls = torch.frombuffer(bytearray(step.controls), dtype=torch.float32)
        controls = controls.view(1, model.frames_per_chunk, -1).expand(len(images), -1, -1)
        condition = dit.condition(
            sound.to(device).expand(len(images), -1), controls.to(device), None
        )
        latents = denoiser.denoise(condition, step.passes)
        frames, state = decoder.decoder(latents.to(state.previous.dtype), state)
        shown.append(frames.float().clamp(0, 1))
    rest, acting = shown[REST_CHUNKS - 1], shown[CHUNKS - 1]
    size = (-1, model.height, model.width)
    found = [
        expression(*(rgb_to_i420(f)[:, : size[1] * size[2]].view(size).cpu().numpy() for f in pair))
        for pair in zip(rest, acting, strict=True)
    ]
    return Tried(rest.mean(1).cpu(), acting.mean(1).cpu(), torch.tensor(found))


# ------------------------------------------------------------ pictures whose truth is known


def _moved(angle: float = 0.0, size: float = 1.0, right: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Pictures (N, C, H, W) turned, scaled and shifted by a share of their width."""
    cosine, sine = np.cos(angle) / size, np.sin(angle) / size

    def move(x: Tensor) -> Tensor:
        aspect = x.shape[-1] / x.shape[-2]
        back = [
            [cosine, sine / aspect, -2 * right * cosine],
            [-sine * aspect, cosine, 2 * right * aspect * sine],
        ]
        matrix = torch.tensor(back, dtype=torch.float32, device=x.device).expand(len(x), -1, -1)
        grid = functional.affine_grid(matrix, list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)

    return move


def _sketched(x: Tensor) -> Tensor:
    grey = x.mean(-3, keepdim=True)
    across = functional.pad(grey.diff(dim=-1), (0, 1)).abs()
    down = functional.pad(grey.diff(dim=-2), (0, 0, 0, 1)).abs()
    return (1 - 6 * (across + down)).clamp(0, 1).expand_as(x)


class Alteration(NamedTuple):
    of_picture: Callable[[Tensor], Tensor]
    of_place: Callable[[Tensor], Tensor] = torch.clone


def _moving(**how: float) -> Alteration:
    return Alteration(_moved(**how), _moved(**how))


ALTERATIONS: Final = {
    "none": Alteration(torch.clone),
    "turned 30 degrees": _moving(angle=0.52),
    "on its side": _moving(angle=1.57),
    "upside down": _moving(angle=3.14),
    "half as large": _moving(size=0.5),
    "a third as large": _moving(size=0.33),
    "twice as large": _moving(size=2.0),
    "off the centre": _moving(right=0.22),
    "at the edge": _moving(right=0.36),
    "a negative": Alteration(lambda x: 1 - x),
    "a sketch": Alteration(_sketched),
    "dark": Alteration(lambda x: x * 0.25),
    "false colours": Alteration(lambda x: (x * 3.7) % 1),
    "two colours": Alteration(lambda x: (x.mean(-3, keepdim=True) > 0.5).float().expand_as(x)),
}


def agreement(tried: Tried, truth: Tensor, boxes: Tensor) -> Tensor:
    """(N,): correlation over the boxes (N, 1, H, W) of the change made with the true one."""
    made = ((tried.acting - tried.rest) * boxes).flatten(1)
    true = (truth * boxes).flatten(1)
    return functional.cosine_similarity(made, true, dim=1, eps=1e-6)


# ------------------------------------------------------------ pictures of other kinds


def odd_pictures() -> Iterator[tuple[str, Image.Image]]:
    astronaut = Image.open(_data("skimage", "data/astronaut.png")).convert("RGB")
    yield "photo, half a body", astronaut
    yield "photo, face", astronaut.crop((100, 0, 370, 180))
    off = Image.new("RGB", (768, 512), (90, 90, 100))
    off.paste(astronaut, (-60, 0))
    yield "photo, off the centre", off
    yield "photo, small", _on_grey(astronaut)
    officer = Image.open(_data("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"))
    yield "photo, older face", officer
    yield "cat", Image.open(_data("skimage", "data/chelsea.png"))
    yield "cup of coffee", Image.open(_data("skimage", "data/coffee.png"))
    yield "rocket", Image.open(_data("skimage", "data/rocket.jpg"))
    yield "page of text", Image.open(_data("skimage", "data/page.png"))
    yield "product logo", Image.open(_data("skimage", "data/logo.png"))
    yield "drawn avatar", _drawn_avatar()
    yield "mascot", _mascot()
    yield "smiley", _smiley()
    yield "full body", _full_body()


def _data(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit("the photographs need: pip install -e '.[train]'")
    return Path(spec.origin).parent / path


def _on_grey(picture: Image.Image) -> Image.Image:
    canvas = Image.new("RGB", (1536, 1024), (200, 200, 200))
    canvas.paste(picture, (512, 512))
    return canvas


def _drawn_avatar() -> Image.Image:
    picture = Image.new("RGB", (768, 512), (120, 170, 220))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((264, 330, 504, 700), fill=(60, 90, 160))
    draw.rectangle((350, 300, 418, 380), fill=(235, 190, 160))
    draw.ellipse((274, 80, 494, 350), fill=(245, 205, 175), outline=(60, 40, 30), width=4)
    draw.pieslice((262, 60, 506, 320), 180, 360, fill=(90, 50, 30))
    for x in (335, 433):
        draw.ellipse((x - 22, 190, x + 22, 220), fill="white", outline=(40, 30, 30), width=3)
        draw.ellipse((x - 9, 194, x + 9, 214), fill=(40, 70, 40))
    draw.line((384, 215, 376, 255, 390, 258), fill=(200, 140, 110), width=4)
    draw.arc((344, 260, 424, 310), 20, 160, fill=(170, 60, 60), width=6)
    return picture


def _mascot() -> Image.Image:
    picture = Image.new("RGB", (768, 512), "white")
    draw = ImageDraw.Draw(picture)
    for ear in ([(250, 140), (230, 40), (330, 105)], [(518, 140), (538, 40), (438, 105)]):
        draw.polygon(ear, fill=(255, 140, 30))
    draw.ellipse((234, 90, 534, 480), fill=(255, 140, 30))
    for x in (324, 444):
        draw.ellipse((x - 45, 180, x + 45, 270), fill="white")
        draw.ellipse((x - 15, 215, x + 15, 245), fill="black")
    draw.pieslice((314, 290, 454, 400), 0, 180, fill=(120, 20, 20))
    return picture


def _smiley() -> Image.Image:
    picture = Image.new("RGB", (768, 512), (250, 220, 90))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((224, 96, 544, 416), outline="black", width=20)
    for x in (324, 444):
        draw.ellipse((x - 22, 188, x + 22, 232), fill="black")
    draw.arc((294, 160, 474, 350), 20, 160, fill="black", width=16)
    return picture


def _full_body() -> Image.Image:
    picture, skin = Image.new("RGB", (768, 512), (190, 215, 190)), (236, 188, 160)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((356, 40, 412, 110), fill=skin)
    draw.pieslice((352, 32, 416, 96), 180, 360, fill=(40, 30, 20))
    for x in (370, 392):
        draw.ellipse((x, 70, x + 6, 76), fill="black")
    draw.arc((374, 82, 394, 98), 20, 160, fill=(150, 40, 40), width=3)
    draw.rectangle((344, 112, 424, 280), fill=(180, 60, 60))
    for x in (320, 426):
        draw.rectangle((x, 115, x + 22, 260), fill=skin)
    for x in (346, 388):
        draw.rectangle((x, 280, x + 34, 480), fill=(40, 50, 90))
    return picture


def as_uploaded(picture: Image.Image, model: ModelConfig) -> Tensor:
    """(3, H, W) in [0, 1], through the gateway's own crop."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    rows = bytearray(load_reference(file.getvalue(), model.width, model.height))
    pixels = torch.frombuffer(rows, dtype=torch.uint8).view(model.height, model.width, 3)
    return pixels.permute(2, 0, 1) / 255


# ------------------------------------------------------------ the verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("scripts/train_tiny/data"))
    parser.add_argument("--weights", type=Path, default=BUILTIN)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--characters", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("scripts/measurements/odd_pictures.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    device, _ = choose_device(EngineConfig(device=options.device))
    model = ModelConfig(weights=str(options.weights))
    dit = load_generator(model, device=device, dtype=torch.float32)
    decoder = load_decoder(model, device=device, dtype=torch.float32)
    assert isinstance(decoder, VideoDecoder)
    pictures = dict(odd_pictures())

    generator = torch.Generator(device=device).manual_seed(_SEED)
    attributes = sample_characters(options.characters, generator, device)
    still = torch.zeros(len(attributes), NUM_CONTROLS, device=device)
    acted = still.clone()
    acted[:, CONTROL_NAMES.index("blink")] = 1
    acted[:, -len(_OPEN_MOUTH) :] = torch.tensor(_OPEN_MOUTH, device=device)
    renderer = make_renderer(device, options.data)
    rest, acting = (renderer(attributes, c).float() for c in (still, acted))
    mouth, eyes = region_masks(attributes, still)
    boxes = (mouth + eyes).clamp(max=1)

    # Every character as it is, and altered in one way.
    altered = [name for name in ALTERATIONS if name != "none"]
    chosen = {name: slice(i, None, len(altered)) for i, name in enumerate(altered)}
    chosen["none"] = slice(None)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, rows in chosen.items():
        change = ALTERATIONS[name]
        images, moves = change.of_picture(rest[rows]), change.of_picture(acting[rows])
        tried = rehearse_all(dit, decoder, images)
        where = change.of_place(boxes[rows]).cpu()
        found[name] = tried.expressions, agreement(tried, (moves - images).cpu(), where)
    expressions, agreements = (torch.cat(f) for f in zip(*found.values(), strict=True))
    as_they_are, agreed = found["none"]
    least = round(float(as_they_are[agreed >= MOVES_RIGHTLY].quantile(FALSE_ALARMS)), 4)

    images = torch.stack([as_uploaded(picture, model) for picture in pictures.values()])
    odd = rehearse_all(dit, decoder, images.to(device))
    sheet = torch.stack([images, odd.rest, odd.acting], dim=1).flatten(0, 1)
    save_sheet(functional.avg_pool2d(sheet, 2), options.out.with_suffix(".png"), 6)

    ranks = torch.stack([expressions.argsort().argsort(), agreements.argsort().argsort()]).float()
    right = agreements >= MOVES_RIGHTLY
    command = shlex.join(["python", "-m", "scripts.measurements.odd_pictures", *sys.argv[1:]])
    document: dict[str, Any] = {
        **about(device, options.weights, command),
        "least": least,
        "characters_and_their_alterations": {
            "pictures": len(expressions),
            "move_rightly": share(right),
            "rank_correlation_of_expression_with_agreement": round(
                float(torch.corrcoef(ranks)[0, 1]), 3
            ),
            "called_odd_of_those_who_move_rightly": share(expressions[right] < least),
            "called_odd_of_the_others": share(expressions[~right] < least),
        },
        "by_alteration": {
            name: {
                "expression": round(float(values.mean()), 4),
                "agreement": round(float(agree.mean()), 3),
                "called_odd": share(values < least),
            }
            for name, (values, agree) in found.items()
        },
        "other_pictures": {
            name: {"expression": round(value, 4), "called_odd": value < least}
            for name, value in zip(pictures, odd.expressions.tolist(), strict=True)
        },
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    (options.weights / "expression.json").write_text(json.dumps({"least": least}) + "\n")
    print(json.dumps(document, indent=1))


def share(flags: Tensor) -> float:
    return round(float(flags.float().mean()), 3)


if __name__ == "__main__":
    main()
