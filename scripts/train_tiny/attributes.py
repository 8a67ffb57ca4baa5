"""A character and how it moves, as the numbers that its pictures are drawn with.

In: a row of :data:`NUM_ATTRIBUTES` numbers in [0, 1] for who it is, where it sits and in what
light, and a row of :data:`NUM_CONTROLS` numbers for the moment: the seven idle controls, then the
five mouth controls.  Out: named parameters.  Knows nothing of pixels.

Lengths are in units of the character (its head is about 1.2 high); x goes to the right, y down.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor

from characters_serve.model.idle_controls import CONTROL_NAMES as IDLE_NAMES
from scripts.train_tiny.replayed import Replayed
from scripts.train_tiny.visemes import MOUTH_CONTROLS

PIXELS_PER_UNIT: Final = 128.0
CONTROL_NAMES: Final = (*IDLE_NAMES, *MOUTH_CONTROLS)
NUM_CONTROLS: Final = len(CONTROL_NAMES)
ATTRIBUTE_NAMES: Final = (
    # who
    "kind", "species", "style", "skin", "skin_tint", "age", "feminine", "head_shape",
    "face_width", "face_height", "jaw", "cheek", "chin", "markings", "freckles", "blush",
    # eyes, brows, nose, mouth, ears
    "iris", "iris_light", "eye_size", "eye_gap", "eye_height", "eye_shape", "eye_tilt", "lashes",
    "make_up", "brow_thick", "brow_angle", "brow_height", "nose_width", "nose_length", "nose_kind",
    "mouth_width", "mouth_height", "lip_colour", "lip_thick", "smile", "ear_size", "ear_kind",
    # hair
    "hair_colour", "hair_style", "hair_length", "hair_volume", "fringe", "parting", "strands",
    "curl", "beard", "beard_length", "moustache", "horns",
    # what it wears
    "glasses", "glasses_kind", "glasses_size", "hat", "hat_colour", "earrings", "cloth_kind",
    "cloth_hue", "cloth_saturation", "cloth_value", "cloth_accent", "shoulders",
    # where it is
    "background", "background_hue", "background_saturation", "background_value",
    "background_seed", "light", "light_height", "light_contrast", "light_warmth", "gloss",
    # how it is seen
    "scale", "head_size", "offset", "offset_y", "tilt", "turn", "nod", "lean", "contrast",
    "saturation", "exposure", "vignette", "grain", "lopsided",
)  # fmt: skip
NUM_ATTRIBUTES: Final = len(ATTRIBUTE_NAMES)

SPECIES: Final = ("bear", "cat", "fox", "rabbit", "dog", "mouse", "pig", "lion")
FRINGES: Final = 5
CLOTHES: Final = ("crew", "stripes", "shirt", "hoodie", "blazer", "dress", "knit", "dotted")
BACKGROUNDS: Final = (
    "gradient", "bokeh", "window", "diagonal", "shelf",
    "studio", "room", "outdoors", "night", "tiles",
)  # fmt: skip

Palette = tuple[tuple[float, float, float], ...]

_SKIN_TONES: Final[Palette] = (
    (1.00, 0.86, 0.76),
    (0.97, 0.78, 0.64),
    (0.91, 0.68, 0.51),
    (0.78, 0.55, 0.38),
    (0.60, 0.40, 0.27),
    (0.42, 0.27, 0.18),
    (0.31, 0.20, 0.14),
)
_HAIR_COLOURS: Final[Palette] = (
    (0.07, 0.06, 0.06),
    (0.13, 0.09, 0.07),
    (0.22, 0.13, 0.08),
    (0.34, 0.21, 0.12),
    (0.46, 0.28, 0.15),
    (0.55, 0.25, 0.12),
    (0.76, 0.38, 0.15),
    (0.82, 0.64, 0.34),
    (0.92, 0.83, 0.62),
    (0.10, 0.08, 0.09),
    (0.28, 0.17, 0.11),
    (0.62, 0.60, 0.60),
    (0.90, 0.42, 0.60),
    (0.25, 0.55, 0.78),
    (0.45, 0.30, 0.65),
    (0.20, 0.58, 0.50),
)
_IRIS_COLOURS: Final[Palette] = (
    (0.36, 0.21, 0.11),
    (0.25, 0.14, 0.08),
    (0.50, 0.34, 0.15),
    (0.32, 0.55, 0.75),
    (0.40, 0.50, 0.60),
    (0.33, 0.55, 0.35),
    (0.46, 0.50, 0.24),
)
_FUR_COLOURS: Final[Palette] = (
    (0.62, 0.42, 0.27),
    (0.42, 0.28, 0.19),
    (0.90, 0.55, 0.25),
    (0.87, 0.76, 0.62),
    (0.62, 0.62, 0.66),
    (0.95, 0.92, 0.88),
    (0.30, 0.29, 0.32),
    (0.82, 0.64, 0.42),
    (0.55, 0.70, 0.85),
    (0.92, 0.66, 0.72),
)


def sample_characters(n: int, generator: torch.Generator, device: torch.device | str) -> Tensor:
    """Attributes of ``n`` random characters, float32 (n, NUM_ATTRIBUTES) in [0, 1]."""
    uniform = torch.rand(n, NUM_ATTRIBUTES, generator=generator, device=generator.device)
    return uniform.to(device)


def centred(attributes: Tensor) -> Tensor:
    """The same characters as portraits: heads of the usual size, upright, near the middle."""
    result = attributes.clone()
    columns = [ATTRIBUTE_NAMES.index(name) for name in ("offset", "offset_y", "tilt", "lean")]
    result[:, columns] = 0.5 + 0.3 * (attributes[:, columns] - 0.5)
    scale = ATTRIBUTE_NAMES.index("scale")
    result[:, scale] = 0.6 + 0.4 * attributes[:, scale]
    return result


def _hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    def channel(offset: float) -> Tensor:
        k = torch.remainder(offset + hue * 6.0, 6.0)
        return value - value * saturation * torch.minimum(k, 4.0 - k).clamp(0.0, 1.0)

    return torch.stack([channel(5.0), channel(3.0), channel(1.0)], dim=-1)


def _palette(colours: Palette, where: Tensor, blend: bool) -> Tensor:
    """A colour of the palette for each ``where`` in [0, 1]: the nearest below, or interpolated."""
    table = _constant(colours, where.device)
    if not blend:
        return table[(where * len(colours)).long().clamp(max=len(colours) - 1)]
    position = where * (len(colours) - 1)
    low = position.long().clamp(max=len(colours) - 2)
    part = (position - low)[:, None]
    return table[low] * (1.0 - part) + table[low + 1] * part


@functools.cache
def _constant(values: tuple[float, ...] | Palette, device: torch.device) -> Tensor:
    """Kept, since a CUDA graph cannot be captured while a tensor is copied from the host."""
    return torch.tensor(values, device=device)


class _Sheet:
    """Attributes and controls by name, and the parameters written so far."""

    def __init__(self, attributes: Tensor, controls: Tensor) -> None:
        self.a = {name: attributes[:, i] for i, name in enumerate(ATTRIBUTE_NAMES)}
        self.c = {name: controls[:, i] for i, name in enumerate(CONTROL_NAMES)}
        self.out: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.out[name]

    def between(self, name: str, low: float, high: float) -> Tensor:
        return low + (high - low) * self.a[name]

    def chance(self, name: str, low: float, high: float) -> Tensor:
        """One where the attribute lies in [low, high)."""
        return ((self.a[name] >= low) & (self.a[name] < high)).to(self.a[name].dtype)

    def skewed(self, name: str) -> Tensor:
        """In [-1, 1], mostly near zero."""
        centred = 2.0 * self.a[name] - 1.0
        return 0.3 * centred + 0.7 * centred**3

    def choice(self, names: tuple[str, ...], attribute: str, when: Tensor | float = 1.0) -> None:
        """Writes one of the names as ``when``, the others as zero."""
        for index, name in enumerate(names):
            last = index + 1 == len(names)
            chosen = self.chance(
                attribute, index / len(names), 1.1 if last else (index + 1) / len(names)
            )
            self.out[name] = chosen * when

    def colour(self, name: str, value: Tensor) -> None:
        for index in range(3):
            self.out[f"{name}.{index}"] = value[:, index].clamp(0.0, 1.0)


def prepare(attributes: Tensor, controls: Tensor) -> dict[str, Tensor]:
    """Named drawing parameters, each (n,), of pictures with these attributes and controls."""
    s = _Sheet(attributes, controls)
    _kind(s)
    _colours(s)
    _camera_and_light(s)
    _head(s)
    _eyes(s)
    _nose_and_mouth(s)
    _hair(s)
    _wear(s)
    s.choice(BACKGROUNDS, "background")
    s.out["back_seed"] = s.a["background_seed"]
    _presence(s.out)
    return s.out


def _kind(s: _Sheet) -> None:
    a, out = s.a, s.out
    fantasy = s.chance("kind", 0.58, 0.66)  # people of odd colours, with horns or pointed ears
    human = s.chance("kind", 0.0, 0.66)
    out.update(
        human=human,
        animal=s.chance("kind", 0.66, 0.85),
        robot=s.chance("kind", 0.85, 0.91),
        alien=s.chance("kind", 0.91, 1.1),  # and the mascots
        fantasy=fantasy,
    )
    s.choice(SPECIES, "species", out["animal"])
    # From a photograph's proportions and skin to a drawing's.
    out["real"] = ((0.56 - a["style"]) * 6.0).clamp(0.0, 1.0)
    out["clay"] = s.chance("style", 0.62, 0.78)
    out["flat"] = s.chance("style", 0.78, 1.1)
    out["old"] = ((a["age"] - 0.7) * 4.0).clamp(0.0, 1.0) * human
    out["child"] = ((0.22 - a["age"]) * 8.0).clamp(0.0, 1.0) * human
    out["feminine"] = s.chance("feminine", 0.0, 0.5)


def _colours(s: _Sheet) -> None:
    a, out = s.a, s.out
    human, animal, fantasy = out["human"], out["animal"], out["fantasy"]
    person = human - fantasy
    real, feminine, old = out["real"], out["feminine"], out["old"]

    def choose(*options: tuple[Tensor, Tensor]) -> Tensor:
        total = torch.zeros_like(options[0][1])
        for weight, value in options:
            total = total + weight[:, None] * value
        return total

    tone = _palette(_SKIN_TONES, a["skin"], blend=True)
    warm = torch.stack([a["skin_tint"], 0.5 + 0 * a["skin_tint"], 1 - a["skin_tint"]], -1) - 0.5
    tone = tone * (1.0 + 0.10 * warm) * (1.0 - 0.06 * real)[:, None]
    fur = _palette(_FUR_COLOURS, a["skin"], blend=False)
    other = _palette(_FUR_COLOURS, a["skin_tint"], blend=False)
    fur = (fur + (other - fur) * 0.35 * a["strands"][:, None]) * (0.85 + 0.25 * a["blush"])[:, None]
    fox = _palette(((0.90, 0.48, 0.20), (0.85, 0.40, 0.18), (0.62, 0.60, 0.62)), a["skin"], False)
    pig = _palette(((0.95, 0.70, 0.68), (0.90, 0.62, 0.58), (0.50, 0.42, 0.42)), a["skin"], False)
    fur = torch.where(out["fox"][:, None] > 0, fox, fur)
    fur = torch.where(out["pig"][:, None] > 0, pig, fur)
    metal = _hsv(a["skin"], 0.05 + 0.4 * a["skin_tint"], 0.62 + 0.30 * a["blush"])
    vivid = _hsv(a["skin"], 0.25 + 0.45 * a["skin_tint"], 0.55 + 0.40 * a["blush"])
    strange = tone * 0.4 + 0.6 * vivid
    skin = choose(
        (person, tone), (fantasy, strange), (animal, fur), (out["robot"], metal),
        (out["alien"], vivid),
    )  # fmt: skip
    s.colour("skin", skin)

    # In photographs hair is seldom dyed, and dark where the skin is dark.
    dark_skin = (3.0 * (a["skin"] - 0.45)).clamp(0.0, 0.7)
    natural_hair = a["hair_colour"] * (
        1.0 - real * (a["make_up"] < 0.93) * (0.24 + 0.7 * dark_skin)
    )
    hair = _palette(_HAIR_COLOURS, natural_hair, blend=False)
    hair = hair * (0.8 + 0.4 * a["strands"])[:, None]
    grey = (0.55 + 0.32 * a["strands"])[:, None].expand(-1, 3)
    hair = hair + (grey - hair) * old[:, None]
    s.colour("hair", torch.where(human[:, None] > 0, hair, skin * 0.72))
    s.colour("brow", torch.where(human[:, None] > 0, hair * 0.62, skin * 0.42))
    pale = skin * 0.16 + 0.80
    snout = torch.where((out["rabbit"] + out["fox"])[:, None] > 0, pale, skin * 0.45 + 0.50)
    s.colour("muzzle", torch.where(out["pig"][:, None] > 0, skin * 0.92, snout))

    dark = _palette(((0.20, 0.12, 0.08), (0.36, 0.24, 0.10), (0.25, 0.42, 0.30)), a["iris"], False)
    bright = _hsv(a["iris"], 0.6 + 0.3 * a["iris_light"], 0.75 + 0 * a["iris"])
    iris = choose(
        (person, _palette(_IRIS_COLOURS, a["iris"], blend=False)),
        (animal, dark),
        (fantasy + out["robot"], bright),
        (out["alien"], bright * 0.6),
    )
    s.colour("iris", iris * (0.80 + 0.35 * a["iris_light"])[:, None])
    redness = (a["lip_colour"] * (0.15 + 0.85 * feminine))[:, None]
    natural = skin * _constant((0.88, 0.66, 0.64), skin.device)
    painted = _hsv(
        torch.remainder(0.93 + 0.10 * a["make_up"], 1.0), 0.62 + 0 * redness[:, 0],
        0.45 + 0.30 * a["lip_colour"],
    )  # fmt: skip
    lip = natural * (1 - redness) + (0.35 * skin + 0.65 * painted) * redness
    s.colour("lip", torch.where(human[:, None] > 0, lip, skin * 0.45))
    shadow = _hsv(a["make_up"], 0.45 + 0 * a["skin"], 0.35 + 0.3 * a["lip_colour"])
    s.colour("eye_shadow", 0.5 * skin + 0.5 * shadow)
    out["made_up"] = feminine * human * s.chance("make_up", 0.45, 1.1) * (a["lip_colour"] * 0.7)

    cloth = _hsv(
        a["cloth_hue"], 0.05 + 0.72 * a["cloth_saturation"], 0.16 + 0.74 * a["cloth_value"]
    )
    s.colour("cloth", cloth)
    accent_hue = torch.remainder(a["cloth_hue"] + 0.10 + 0.4 * a["cloth_accent"], 1.0)
    accent = _hsv(accent_hue, 0.15 + 0.5 * a["cloth_accent"], 0.50 + 0.44 * a["cloth_saturation"])
    s.colour("accent", accent)
    s.colour(
        "hat", _hsv(a["hat_colour"], 0.15 + 0.55 * a["cloth_value"], 0.20 + 0.7 * a["cloth_accent"])
    )
    s.colour(
        "glasses", _hsv(a["glasses_kind"], 0.55 * a["hat_colour"], 0.06 + 0.5 * a["hat_colour"])
    )
    hue, saturation, value = (a[f"background_{name}"] for name in ("hue", "saturation", "value"))
    strength = saturation * (1.0 - 0.45 * real)
    s.colour("back", _hsv(hue, 0.04 + 0.44 * strength, 0.30 + 0.62 * value))
    second = torch.remainder(hue + 0.05 + 0.25 * saturation, 1.0)
    s.colour("back2", _hsv(second, 0.08 + 0.5 * strength, 0.15 + 0.50 * value))


def _camera_and_light(s: _Sheet) -> None:
    a, c, out = s.a, s.c, s.out
    real, flat = out["real"], out["flat"]
    # From half a body to a head that fills the picture, most of them a bust.
    zoom = 0.50 * torch.exp(0.89 * a["scale"] ** 0.45)
    out.update(zoom=zoom, pixels=PIXELS_PER_UNIT * zoom)
    out["camera_x"] = s.skewed("offset") * (1.10 - 0.62 * zoom).clamp(min=0.1)
    room = 0.10 + 0.35 * (1.0 - zoom).clamp(min=0.0)
    out["camera_y"] = s.skewed("offset_y") * room - 0.40 * (1.0 - zoom).clamp(min=0.0)
    tilt = 0.14 * s.skewed("tilt")
    out.update(camera_cos=torch.cos(tilt), camera_sin=torch.sin(tilt))

    # The way it sits, and what it does now.  The signs are the picture's: right and down.
    turn = (0.34 * s.skewed("turn") + 0.32 * c["head_x"]).clamp(-0.62, 0.62)
    nod = (0.16 * s.skewed("nod") + 0.20 * c["head_y"]).clamp(-0.34, 0.34)
    roll = 0.10 * s.skewed("lean") + 0.15 * c["roll"]
    out.update(turn_sin=torch.sin(turn), turn_cos=torch.cos(turn))
    out.update(nod_sin=torch.sin(nod), nod_cos=torch.cos(nod))
    out.update(roll_cos=torch.cos(roll), roll_sin=torch.sin(roll))
    out["head_scale"] = s.between("head_size", 0.92, 1.06) * (1.0 + 0.04 * out["child"])
    out["lean_x"] = 0.07 * c["head_x"] + 0.10 * s.skewed("lean")
    out["lean_y"] = 0.035 * c["head_y"]
    out["body_x"] = 0.016 * c["head_x"] - 0.03 * s.skewed("turn")
    out["body_y"] = 0.010 * c["head_y"] - 0.006 * c["brow"].clamp(min=0.0)
    out["body_tilt"] = 0.05 * c["roll"] + 0.08 * s.skewed("turn")

    angle = s.between("light", 3.3, 6.1)
    height = s.between("light_height", 0.35, 0.80)
    flank = torch.sqrt(1.0 - height.square())
    lx, ly = torch.cos(angle) * flank, torch.sin(angle) * flank
    out.update(light_x=lx, light_y=ly, light_z=height)
    # Half way between the light and the viewer, for highlights.
    length = torch.sqrt(lx.square() + ly.square() + (height + 1.0).square())
    out.update(half_x=lx / length, half_y=ly / length, half_z=(height + 1.0) / length)
    warmth = (a["light_warmth"] - 0.5)[:, None] * _constant((0.22, 0.02, -0.26), lx.device)
    key = s.between("light_contrast", 0.42, 0.86)[:, None]
    s.colour("key", key * (1.0 + warmth))
    s.colour("fill", (1.04 - 0.80 * key) * (1.0 - 0.7 * warmth))
    out["cel"] = s.between("light_contrast", -0.15, 0.25)  # where a drawing's shade begins
    out["gloss"] = (0.03 + 0.22 * a["gloss"] * (0.4 + 0.6 * real)) * (1.0 - flat)
    out["gloss"] = out["gloss"] + 0.12 * out["clay"] + 0.22 * out["robot"]

    graded = 0.35 + 0.65 * real
    out["contrast"] = 1.0 + graded * (0.34 * a["contrast"] - 0.14)
    grey = s.chance("saturation", 0.0, 0.03) * real
    out["saturation"] = (1.0 + graded * (0.45 * a["saturation"] - 0.30)) * (1.0 - grey)
    out["exposure"] = 1.0 + graded * (0.34 * a["exposure"] - 0.15)
    out["cast_red"] = 1.0 + 0.10 * graded * (a["light_warmth"] - 0.5)
    out["cast_blue"] = 1.0 - 0.12 * graded * (a["light_warmth"] - 0.5)
    out["vignette"] = 0.05 + 0.16 * a["vignette"] ** 2
    out["grain"] = 0.060 * graded * (a["grain"] - 0.35).clamp(min=0.0)


def _head(s: _Sheet) -> None:
    a, c, out = s.a, s.c, s.out
    human, animal, robot, alien = (out[kind] for kind in ("human", "animal", "robot", "alien"))
    real, child, feminine = out["real"] * human, out["child"], out["feminine"]
    width = s.between("face_width", 0.42, 0.51) + 0.05 * animal + 0.02 * robot + 0.02 * child
    width = width - 0.068 * real + alien * (0.22 * a["head_shape"] - 0.08)
    height = s.between("face_height", 0.54, 0.62) - 0.07 * animal - 0.05 * child - 0.04 * robot
    height = height - alien * 0.14 * s.chance("head_shape", 0.5, 1.1)
    out.update(face_width=width, face_height=height)
    # 0 is an ellipse and 1 a box.
    square = s.between("head_shape", 0.0, 0.30) * (1.0 - feminine) * human
    out["square"] = square + robot * s.between("head_shape", 0.55, 1.0) + alien * a["cheek"] * 0.7
    out["head_y"] = 0.03 + 0.75 * (0.60 - height) + 0.05 * out["rabbit"]
    out["jaw"] = s.between("jaw", 0.05, 0.26) * human + 0.30 * alien * s.chance(
        "head_shape", 0.0, 0.5
    )
    out["cheek"] = (
        s.between("cheek", 0.0, 0.045) * (1.0 - 0.4 * real) + 0.03 * child + 0.03 * animal
    )
    out["lopsided"] = s.skewed("lopsided") * (1 - robot)
    out["tufts"] = (out["cat"] + out["fox"] + out["lion"]) * s.between("cheek", 0.03, 0.09)
    opening = c["open"].clamp(0, 1)
    out["jaw_drop"] = opening * (0.035 + 0.03 * human)
    out["chin"] = s.between("chin", 0.05, 0.16)
    # How far the face stands out: none in flat drawings, all of it in photographs.
    out["relief"] = (0.30 + 0.70 * out["real"]) * (1.0 - 0.9 * out["flat"]) * (1.0 - 0.6 * robot)

    out["blush"] = s.between("blush", 0.02, 0.32) * (1 - robot) * (1.0 - 0.45 * real)
    out["freckles"] = s.chance("freckles", 0.0, 0.2) * human * s.between("skin_tint", 0.4, 1.0)
    out["patch"] = s.chance("markings", 0.0, 0.25) * animal * (1 - out["fox"] - out["pig"])
    out["tabby"] = s.chance("markings", 0.3, 1.1) * out["cat"]
    out["mask"] = s.chance("markings", 0.25, 0.6) * (out["dog"] + out["mouse"] + out["bear"])
    out["spots"] = s.chance("markings", 0.4, 1.1) * (alien + 0.5 * out["fantasy"])
    out["skin_seed"] = a["markings"] * 20.0
    out["creature"] = ((animal + robot + alien) > 0).to(animal.dtype)
    out["whiskers"] = out["cat"] + out["rabbit"] + out["mouse"] + out["lion"]

    out["ear_size"] = s.between("ear_size", 0.82, 1.25)
    out["ear_point"] = s.chance("ear_kind", 0.0, 0.75) * out["fantasy"]
    out["upright"] = animal - out["dog"] - out["lion"] * 0.0
    out["round_ears"] = out["bear"] + out["mouse"] + out["lion"]
    horned = out["fantasy"] * s.chance("horns", 0.0, 0.45) + alien * s.chance("horns", 0.0, 0.35)
    out["horns"] = horned
    out["horn_length"] = s.between("horns", 0.5, 1.6)
    out["stalks"] = alien * s.chance("horns", 0.35, 0.75)


def _eyes(s: _Sheet) -> None:
    a, c, out = s.a, s.c, s.out
    human, animal, robot, alien = (out[kind] for kind in ("human", "animal", "robot", "alien"))
    real, child, feminine = out["real"] * human, out["child"], out["feminine"]
    drawn = 1.0 + 0.16 * animal + 0.25 * alien + 0.12 * child + 0.1 * robot
    eye = s.between("eye_size", 0.080, 0.112) * drawn
    eye = eye + (s.between("eye_size", 0.076, 0.092) * (1.0 + 0.10 * child) - eye) * real
    drawn = s.between("eye_shape", 0.66, 0.92) + 0.14 * animal + 0.14 * robot + 0.1 * child
    photo = s.between("eye_shape", 0.38, 0.54) + 0.08 * child + 0.03 * feminine
    height = eye * (drawn + (photo - drawn) * real)
    gap = out["face_width"] * (s.between("eye_gap", 0.41, 0.48) + 0.03 * animal)
    eye_y = s.between("eye_height", -0.05, 0.03) + 0.02 * child - 0.02 * real
    out.update(eye=eye, eye_height=height, eye_gap=gap, eye_y=eye_y)
    out["eye_tilt"] = (a["eye_tilt"] - 0.5) * (0.20 - 0.08 * real) * (1 - robot)
    brow = c["brow"]
    glad = brow.clamp(min=0.0)
    rest = 0.05 + 0.13 * a["lashes"]
    blink = c["blink"].clamp(0, 1)
    out["lid"] = (rest + (1.0 - rest) * blink - 0.06 * brow).clamp(0.0, 1.0)
    # The lower lid rises a little in a smile and meets the upper one in a blink.
    out["low_lid"] = 0.82 - 0.10 * glad - 0.14 * blink
    out["blink"] = blink
    out["gaze_x"] = c["gaze_x"] * eye * 0.42
    out["gaze_y"] = c["gaze_y"] * height * 0.38
    drawn = height * (0.70 + 0.10 * a["iris_light"] + 0.12 * animal + 0.16 * alien)
    iris = drawn + (eye * s.between("iris_light", 0.42, 0.47) - drawn) * real
    out["iris_size"] = iris
    wide = 0.40 + 0.14 * a["exposure"]
    out["pupil"] = iris * (wide + 0.12 * animal + 0.1 * alien)
    out["slit"] = (out["cat"] + out["fox"] + out["fantasy"] * s.chance("iris", 0.6, 1.1)).clamp(
        max=1
    )
    out["white"] = 0.98 - 0.10 * real
    out["lash"] = (0.008 + 0.010 * feminine + 0.003 * a["lashes"]) * (1.0 - 0.35 * real)
    out["wing"] = feminine * human * (0.3 + 0.7 * s.chance("make_up", 0.5, 1.1))
    brow_y = eye_y - height - s.between("brow_height", 0.040, 0.075) - 0.014 * real
    out["brow_rest_y"] = brow_y
    out["brow_y"] = brow_y - 0.045 * brow + 0.010 * blink
    out["brow_thick"] = (
        s.between("brow_thick", 0.011, 0.027) * (1 - 0.35 * feminine) + 0.005 * out["old"]
    )
    out["brow_tilt"] = (a["brow_angle"] - 0.35) * (0.20 - 0.06 * real) - 0.03 * brow
    out["brow_width"] = eye * 1.12
    out["brow_strength"] = (0.92 - 0.17 * real) * (1.0 - 0.45 * animal - robot * 0.6)


def _nose_and_mouth(s: _Sheet) -> None:
    a, c, out = s.a, s.c, s.out
    human, animal, robot = out["human"], out["animal"], out["robot"]
    real, child, feminine, old = out["real"] * human, out["child"], out["feminine"], out["old"]
    out["nose_width"] = s.between("nose_width", 0.036, 0.066) + 0.010 * old + 0.018 * real
    nose_y = out["eye_y"] + s.between("nose_length", 0.145, 0.205) - 0.03 * child - 0.01 * animal
    out["nose_y"] = nose_y + 0.040 * real
    out["nose_kind"] = a["nose_kind"]

    opening, wide, rounded, teeth, tongue = (c[name].clamp(0, 1) for name in MOUTH_CONTROLS)
    base = s.between("mouth_width", 0.145, 0.190) + 0.02 * animal + 0.02 * robot
    mouth_y = out["nose_y"] + s.between("mouth_height", 0.120, 0.150) + 0.02 * animal - 0.006 * real
    out["mouth_rest_y"] = mouth_y
    out["mouth_y"] = mouth_y + 0.004 * opening
    out["mouth_half"] = base * (1 + 0.22 * wide - 0.44 * rounded) * (1 - 0.05 * opening)
    parted = (opening * 12.0).clamp(0, 1)
    out["mouth_open"] = 0.150 * opening * (1 - 0.22 * rounded) + 0.018 * teeth * parted
    glad = 0.018 * c["brow"].clamp(min=0.0)
    smile = s.between("smile", 0.010, 0.058) * (1 - 0.35 * real) + glad
    out["smile"] = (smile * (1 - 0.7 * rounded) + 0.022 * wide) * (1 - 0.5 * opening)
    thick = s.between("lip_thick", 0.016, 0.036) * (1 + 0.45 * rounded) * (1 - 0.5 * animal)
    thick = thick * (1 - 0.30 * old) * (1 + 0.20 * feminine) * (1 + 0.22 * real)
    out["lip_thick"] = thick * (1 - 0.35 * (1 - parted) * teeth)
    out["pucker"] = rounded
    out["lip_strength"] = (1.0 - 0.55 * animal) * (1.0 - 0.10 * real)
    out.update(teeth=teeth, tongue=tongue, opening=opening)
    out["fold"] = (old * 0.8 + 0.22 * real + 0.35 * wide * human + 6.0 * glad).clamp(max=1.0)


def _hair(s: _Sheet) -> None:
    a, out = s.a, s.out
    human, feminine, old, child = out["human"], out["feminine"], out["old"], out["child"]
    masculine = 1.0 - feminine

    def style(name: str, low: float, high: float, who: Tensor | float = 1.0) -> None:
        out[name] = s.chance("hair_style", low, high) * who * human

    style("bald", 0.0, 0.06, masculine)
    style("receding", 0.06, 0.12, masculine * (1.0 - child))
    style("buzz", 0.12, 0.19, masculine)
    style("mohawk", 0.19, 0.22)
    style("afro", 0.30, 0.41)
    style("bob", 0.41, 0.60, feminine)
    style("long", 0.60, 0.86, feminine)
    out["long"] = out["long"] + s.chance("hair_style", 0.80, 0.86) * masculine * human
    style("updo", 0.86, 1.1, feminine + 0.0)
    out["falls"] = out["bob"] + out["long"]
    out["top_bun"] = out["updo"] * s.chance("hair_length", 0.0, 0.35)
    out["two_buns"] = out["updo"] * s.chance("hair_length", 0.35, 0.6)
    out["tail"] = out["updo"] * s.chance("hair_length", 0.6, 1.1)
    out["has_hair"] = human - out["bald"]
    out["hair_end"] = out["bob"] * s.between("hair_length", 0.22, 0.60) + out["long"] * s.between(
        "hair_length", 0.65, 1.35
    )
    out["locks"] = out["long"] * s.chance("parting", 0.25, 1.1)
    volume = s.between("hair_volume", 0.02, 0.10) - 0.02 * out["real"]
    out["hair_volume"] = volume * (1.0 - 0.8 * out["buzz"]) + 0.05 * out["afro"]
    out["curl"] = a["curl"] * s.chance("curl", 0.35, 1.1)
    out["part_x"] = (a["parting"] - 0.5) * 0.5
    out["line"] = 0.08 * (a["hair_volume"] - 0.5) - 0.10 * out["receding"]
    swept = out["buzz"] + out["updo"] * s.chance("fringe", 0.3, 1.1) + out["receding"]
    s.choice(tuple(f"fringe{i}" for i in range(FRINGES)), "fringe", 1.0 - swept.clamp(max=1.0))
    out["swept"] = swept.clamp(max=1.0)
    out["seed"] = a["strands"] * 20.0

    grown = human * masculine * (1.0 - child)
    out["beard"] = s.chance("beard", 0.0, 0.30) * grown
    out["goatee"] = s.chance("beard", 0.30, 0.38) * grown
    out["stubble"] = s.chance("beard", 0.38, 0.70) * grown * s.between("beard_length", 0.25, 1.0)
    out["moustache"] = grown * s.chance("moustache", 0.0, 0.32)
    out["hairy"] = ((out["beard"] + out["goatee"] + out["stubble"]) > 0).to(old.dtype)
    out["beard_length"] = s.between("beard_length", 0.0, 0.22) * (out["beard"] + out["goatee"])
    out["beard_line"] = 0.07 * (a["moustache"] - 0.5)


def _wear(s: _Sheet) -> None:
    a, out = s.a, s.out
    human, animal, feminine = out["human"], out["animal"], out["feminine"]
    hats = ("cap", "beanie", "headband", "brim_hat", "scarf", "headphones", "crown", "wizard_hat")
    edges = (0.0, 0.035, 0.075, 0.10, 0.14, 0.175, 0.21, 0.225, 0.24)
    for name, low, high in zip(hats, edges[:-1], edges[1:], strict=True):
        out[name] = s.chance("hat", low, high) * human
    out["scarf"] = out["scarf"] * feminine
    out["bow"] = s.chance("hat", 0.24, 0.34) * ((animal + 0.6 * human * feminine) > 0.5)
    covered = out["cap"] + out["beanie"] + out["brim_hat"] + out["wizard_hat"] + out["scarf"]
    for name in ("top_bun", "mohawk", "two_buns"):
        out[name] = out[name] * (1.0 - covered)
    out["has_hair"] = out["has_hair"] * (1.0 - out["scarf"])
    out["tuft"] = animal * s.chance("fringe", 0.0, 0.5) * (1.0 - out["bow"])

    out["glasses"] = s.chance("glasses", 0.0, 0.27) * (human + animal)
    out["sunglasses"] = out["glasses"] * s.chance("glasses", 0.0, 0.008)
    s.choice(
        ("round_rims", "square_rims", "oval_rims", "half_rims"), "glasses_kind", out["glasses"]
    )
    out["rim"] = s.between("glasses_size", 0.006, 0.016)
    out["lens"] = s.between("glasses_size", 0.94, 1.14)
    out["earrings"] = s.chance("earrings", 0.0, 0.4) * feminine * human * (1.0 - out["scarf"])
    s.choice(CLOTHES, "cloth_kind")
    out["trimmed"] = out["crew"] + out["stripes"] + out["knit"] + out["dotted"]
    out["collared"] = out["shirt"] + out["blazer"]
    out["neckline"] = (
        out["dress"] * s.between("shoulders", 0.10, 0.34) * (feminine + 0.3 * (1 - feminine))
    )
    build = s.between("shoulders", 0.92, 1.10) * (
        1.0 - 0.10 * feminine * human - 0.14 * out["child"]
    )
    out["shoulders"] = build * (1.0 + (0.38 - 0.12 * feminine) * out["real"] * human)
    out["cloth_seed"] = a["cloth_accent"] * 20.0
    neck = 0.170 + 0.085 * animal - 0.05 * out["robot"] - 0.04 * out["alien"]
    out["neck"] = neck + out["real"] * human * (0.048 - 0.040 * feminine) - 0.03 * out["child"]


def _presence(out: dict[str, Tensor]) -> None:
    """What the layers ask before they paint anything."""
    human = out["human"]
    out["lights"] = out["bokeh"] + out["night"]
    out["marked"] = 1.0 - human + out["spots"]
    out["bare_ears"] = human * (1.0 - out["afro"]) * (1.0 - out["scarf"])
    out["soft_hat"] = out["cap"] + out["beanie"] + out["headband"]
    out["tall_hat"] = out["brim_hat"] + out["crown"] + out["wizard_hat"]


PARAMETER_INDEX: Final = {
    name: index
    for index, name in enumerate(
        prepare(torch.zeros(1, NUM_ATTRIBUTES), torch.zeros(1, NUM_CONTROLS))
    )
}

_table = Replayed(lambda *given: torch.stack(list(prepare(*given).values()), dim=1))


def parameter_table(attributes: Tensor, controls: Tensor) -> Tensor:
    """What `prepare` returns, as (n, K) in the order of PARAMETER_INDEX and for one launch."""
    return _table(attributes.float(), controls.float())
