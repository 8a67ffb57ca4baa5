"""Procedural talking characters, drawn with distance fields in torch.

Everything a pixel needs is elementwise arithmetic on a table of per-picture parameters, so
``torch.compile`` fuses each layer of a picture into a kernel or two.  Picture coordinates: x in
[-1.5, 1.5] to the right, y in [-1, 1] down; one unit is 128 pixels.

A character is a row of :data:`NUM_ATTRIBUTES` numbers in [0, 1]; a picture adds a control row of
:data:`NUM_CONTROLS` numbers: the seven idle controls, then the five mouth controls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from characters_serve.model.idle_controls import CONTROL_NAMES as IDLE_NAMES
from scripts.train_tiny.replayed import Replayed
from scripts.train_tiny.visemes import MOUTH_CONTROLS

HEIGHT: Final = 256
WIDTH: Final = 384
PIXELS_PER_UNIT: Final = HEIGHT / 2
CONTROL_NAMES: Final = (*IDLE_NAMES, *MOUTH_CONTROLS)
NUM_CONTROLS: Final = len(CONTROL_NAMES)
ATTRIBUTE_NAMES: Final = (
    "kind", "species", "style", "skin", "skin_tint", "age", "hair_colour", "hair_style",
    "fringe", "parting", "strands", "curl", "iris", "iris_light", "eye_size", "eye_gap",
    "eye_height", "eye_shape", "eye_tilt", "lashes", "brow_thick", "brow_angle",
    "brow_height", "face_width", "face_height", "jaw", "cheek", "nose_width", "nose_length",
    "nose_kind", "mouth_width", "mouth_height", "lip_colour", "lip_thick", "smile",
    "ear_size", "ear_kind", "glasses", "glasses_kind", "beard", "moustache", "freckles",
    "blush", "hat", "hat_colour", "cloth_hue", "cloth_saturation", "cloth_value",
    "cloth_kind", "cloth_accent", "background", "background_hue", "background_saturation",
    "background_value", "background_seed", "light", "scale", "offset", "earrings", "markings",
)  # fmt: skip
NUM_ATTRIBUTES: Final = len(ATTRIBUTE_NAMES)

Colour = list[Tensor]
"""Red, green and blue, each broadcastable to (n, HEIGHT, WIDTH)."""

_SKIN_TONES: Final = (
    (1.00, 0.86, 0.76),
    (0.97, 0.78, 0.64),
    (0.91, 0.68, 0.51),
    (0.78, 0.55, 0.38),
    (0.60, 0.40, 0.27),
    (0.42, 0.27, 0.18),
    (0.31, 0.20, 0.14),
)
_HAIR_COLOURS: Final = (
    (0.10, 0.08, 0.09),
    (0.16, 0.11, 0.09),
    (0.27, 0.16, 0.10),
    (0.40, 0.24, 0.13),
    (0.55, 0.25, 0.12),
    (0.80, 0.40, 0.15),
    (0.88, 0.69, 0.36),
    (0.93, 0.84, 0.62),
    (0.13, 0.10, 0.12),
    (0.33, 0.20, 0.13),
    (0.90, 0.42, 0.60),
    (0.25, 0.55, 0.78),
    (0.45, 0.30, 0.65),
    (0.20, 0.58, 0.50),
)
_IRIS_COLOURS: Final = (
    (0.36, 0.21, 0.11),
    (0.25, 0.14, 0.08),
    (0.50, 0.34, 0.15),
    (0.32, 0.55, 0.75),
    (0.40, 0.50, 0.60),
    (0.33, 0.55, 0.35),
    (0.46, 0.50, 0.24),
)
_FUR_COLOURS: Final = (
    (0.62, 0.42, 0.27),
    (0.42, 0.28, 0.19),
    (0.90, 0.55, 0.25),
    (0.87, 0.76, 0.62),
    (0.62, 0.62, 0.66),
    (0.95, 0.92, 0.88),
    (0.36, 0.36, 0.42),
    (0.82, 0.64, 0.42),
    (0.55, 0.70, 0.85),
    (0.92, 0.66, 0.72),
)


def sample_characters(n: int, generator: torch.Generator, device: torch.device | str) -> Tensor:
    """Attributes of ``n`` random characters, float32 (n, NUM_ATTRIBUTES) in [0, 1]."""
    uniform = torch.rand(n, NUM_ATTRIBUTES, generator=generator, device=generator.device)
    return uniform.to(device)


def _hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    def channel(offset: float) -> Tensor:
        k = torch.remainder(offset + hue * 6.0, 6.0)
        return value - value * saturation * torch.minimum(k, 4.0 - k).clamp(0.0, 1.0)

    return torch.stack([channel(5.0), channel(3.0), channel(1.0)], dim=-1)


def _palette(colours: tuple[tuple[float, float, float], ...], where: Tensor, blend: bool) -> Tensor:
    """A colour of the palette for each ``where`` in [0, 1]: the nearest below, or interpolated."""
    table = _constant(colours, where.device)
    if not blend:
        return table[(where * len(colours)).long().clamp(max=len(colours) - 1)]
    position = where * (len(colours) - 1)
    low = position.long().clamp(max=len(colours) - 2)
    part = (position - low)[:, None]
    return table[low] * (1.0 - part) + table[low + 1] * part


def prepare(attributes: Tensor, controls: Tensor) -> dict[str, Tensor]:
    """Named drawing parameters, each (n,), of pictures with these attributes and controls."""
    a = {name: attributes[:, i] for i, name in enumerate(ATTRIBUTE_NAMES)}
    c = {name: controls[:, i] for i, name in enumerate(CONTROL_NAMES)}
    out: dict[str, Tensor] = {}

    def between(name: str, low: float, high: float) -> Tensor:
        return low + (high - low) * a[name]

    def chance(name: str, low: float, high: float) -> Tensor:
        return ((a[name] >= low) & (a[name] < high)).to(attributes.dtype)

    def put_colour(name: str, colour: Tensor) -> None:
        for index in range(3):
            out[f"{name}.{index}"] = colour[:, index].clamp(0.0, 1.0)

    def choose(*options: tuple[Tensor, Tensor]) -> Tensor:
        total = torch.zeros_like(options[0][1])
        for weight, colour in options:
            total = total + weight[:, None] * colour
        return total

    human = chance("kind", 0.0, 0.62)
    animal = chance("kind", 0.62, 0.87)
    robot = chance("kind", 0.87, 0.94)
    alien = chance("kind", 0.94, 1.1)
    species = ("bear", "cat", "fox", "rabbit", "dog")
    flags = {
        s: animal * chance("species", i / 5, (i + 1) / 5 + (i == 4)) for i, s in enumerate(species)
    }
    out.update(human=human, animal=animal, robot=robot, alien=alien, **flags)
    flat = chance("style", 0.72, 1.1)
    clay = chance("style", 0.45, 0.72)
    out.update(flat=flat, clay=clay)
    old = chance("age", 0.82, 1.1) * human
    child = chance("age", 0.0, 0.22) * human
    out["old"] = old
    feminine = chance("ear_kind", 0.0, 0.5)  # an independent coin
    bearded = chance("beard", 0.0, 0.36) * human * (1.0 - child) * (1.0 - feminine)

    # Colours
    skin_tone = _palette(_SKIN_TONES, a["skin"], blend=True)
    warm = torch.stack([a["skin_tint"], 0.5 + 0 * a["skin_tint"], 1 - a["skin_tint"]], -1) - 0.5
    skin_tone = skin_tone + 0.04 * warm
    fur = _palette(_FUR_COLOURS, a["skin"], blend=False) + 0.06 * (a["skin_tint"] - 0.5)[:, None]
    fox_fur = _palette(
        ((0.90, 0.48, 0.20), (0.85, 0.40, 0.18), (0.62, 0.60, 0.62)), a["skin"], False
    )
    fur = torch.where(flags["fox"][:, None] > 0, fox_fur, fur)
    metal = _hsv(a["skin"], 0.12 + 0.4 * a["skin_tint"], 0.66 + 0.26 * a["skin_tint"])
    green = _hsv(0.25 + 0.6 * a["skin"], 0.28 + 0.3 * a["skin_tint"], 0.70 + 0.22 * a["age"])
    skin = choose((human, skin_tone), (animal, fur), (robot, metal), (alien, green))
    put_colour("skin", skin)
    grey = 0.60 + 0.30 * a["strands"][:, None].expand(-1, 3)
    hair = _palette(_HAIR_COLOURS, a["hair_colour"], blend=False)
    hair = hair * (0.85 + 0.3 * a["strands"])[:, None]
    hair = torch.where(old[:, None] > 0, grey, hair)
    put_colour("hair", torch.where(human[:, None] > 0, hair, skin * 0.80))
    brow = torch.where(human[:, None] > 0, hair * 0.62, skin * 0.45)
    put_colour("brow", brow)
    pale = skin * 0.16 + 0.82
    put_colour(
        "muzzle",
        torch.where((flags["rabbit"] + flags["fox"])[:, None] > 0, pale, skin * 0.45 + 0.53),
    )
    dark_iris = _palette(
        ((0.20, 0.12, 0.08), (0.36, 0.24, 0.10), (0.25, 0.42, 0.30)), a["iris"], False
    )
    iris = _palette(_IRIS_COLOURS, a["iris"], blend=False)
    vivid = _hsv(a["iris"], 0.6 + 0.3 * a["iris_light"], 0.75 + 0 * a["iris"])
    iris = choose((human, iris), (animal, dark_iris), (robot, vivid), (alien, vivid * 0.6))
    put_colour("iris", iris * (0.85 + 0.35 * a["iris_light"])[:, None])
    redness = a["lip_colour"][:, None] * (0.35 + 0.65 * feminine[:, None])
    natural = skin * _constant((0.86, 0.60, 0.58), skin.device)
    painted = skin * _constant((0.82, 0.34, 0.38), skin.device) + 0.06
    lip = torch.where(human[:, None] > 0, natural * (1 - redness) + painted * redness, skin * 0.42)
    put_colour("lip", lip)
    put_colour(
        "glasses", _hsv(a["glasses_kind"], 0.55 * a["hat_colour"], 0.10 + 0.5 * a["hat_colour"])
    )
    cloth = _hsv(
        a["cloth_hue"], 0.22 + 0.55 * a["cloth_saturation"], 0.25 + 0.62 * a["cloth_value"]
    )
    put_colour("cloth", cloth)
    accent_hue = torch.remainder(a["cloth_hue"] + 0.10 + 0.4 * a["cloth_accent"], 1.0)
    accent = _hsv(accent_hue, 0.15 + 0.5 * a["cloth_accent"], 0.62 + 0.34 * a["cloth_saturation"])
    put_colour("accent", accent)
    put_colour(
        "hat", _hsv(a["hat_colour"], 0.35 + 0.4 * a["cloth_value"], 0.35 + 0.5 * a["cloth_accent"])
    )
    back_hue, back_value = a["background_hue"], a["background_value"]
    put_colour(
        "back", _hsv(back_hue, 0.10 + 0.38 * a["background_saturation"], 0.52 + 0.42 * back_value)
    )
    second = torch.remainder(back_hue + 0.05 + 0.12 * a["background_saturation"], 1.0)
    put_colour(
        "back2", _hsv(second, 0.20 + 0.4 * a["background_saturation"], 0.30 + 0.4 * back_value)
    )

    # Head pose
    yaw, pitch, roll = c["head_x"], c["head_y"], c["roll"] * 0.15
    scale = between("scale", 1.0, 1.18)
    x0 = between("offset", -0.12, 0.12)
    out.update(yaw=yaw, pitch=pitch, scale=scale, cos=torch.cos(roll), sin=torch.sin(roll))
    out["head_x"] = x0 + 0.07 * yaw

    out["body_x"] = x0 + 0.015 * yaw
    angle = between("light", 3.7, 5.7)
    out.update(light_x=torch.cos(angle), light_y=torch.sin(angle))

    # Head shape
    face_width = between("face_width", 0.42, 0.50) + 0.05 * animal + 0.02 * robot + 0.02 * child
    face_height = between("face_height", 0.54, 0.62) - 0.07 * animal - 0.05 * child - 0.04 * robot
    out.update(face_width=face_width, face_height=face_height)
    out["head_y"] = 0.03 + 0.75 * (0.60 - face_height) + 0.035 * pitch + 0.05 * flags["rabbit"]
    out["jaw"] = between("jaw", 0.04, 0.22) * (1 - animal) * (1 - robot) + 0.26 * alien
    out["cheek"] = between("cheek", 0.0, 0.045) + 0.03 * child + 0.03 * animal
    opening = c["open"].clamp(0, 1)
    out["jaw_drop"] = 0.035 * opening

    # Eyes
    eye = between("eye_size", 0.080, 0.112) * (
        1 + 0.16 * animal + 0.25 * alien + 0.12 * child + 0.1 * robot
    )
    eye_height = eye * (
        between("eye_shape", 0.66, 0.92) + 0.14 * animal + 0.14 * robot + 0.1 * child
    )
    gap = face_width * (between("eye_gap", 0.41, 0.48) + 0.03 * animal)
    eye_y = between("eye_height", -0.05, 0.03) + 0.02 * child
    out.update(eye=eye, eye_height=eye_height, eye_gap=gap, eye_y=eye_y)
    out["eye_tilt"] = (a["eye_tilt"] - 0.6) * 0.16 * (1 - robot)
    rest = 0.05 + 0.13 * a["lashes"]
    out["lid"] = (rest + (1.0 - rest) * c["blink"].clamp(0, 1) - 0.05 * c["brow"]).clamp(0.0, 1.0)
    out["blink"] = c["blink"].clamp(0, 1)
    out["gaze_x"] = c["gaze_x"] * eye * 0.42 + 0.012 * yaw
    out["gaze_y"] = c["gaze_y"] * eye_height * 0.38
    iris_size = eye_height * (0.70 + 0.10 * a["iris_light"] + 0.12 * animal + 0.16 * alien)
    out["iris_size"] = iris_size
    out["pupil"] = iris_size * (0.46 + 0.12 * animal + 0.1 * alien)
    out["lash"] = 0.008 + 0.010 * feminine + 0.003 * a["lashes"] + 0.003 * animal
    out["wing"] = feminine * human
    brow_y = eye_y - eye_height - between("brow_height", 0.040, 0.075)
    out["brow_y"] = brow_y - 0.045 * c["brow"]
    out["brow_thick"] = between("brow_thick", 0.013, 0.026) * (1 - 0.35 * feminine) + 0.006 * old
    out["brow_tilt"] = (a["brow_angle"] - 0.35) * 0.20 - 0.03 * c["brow"]
    out["brow_width"] = eye * 1.12
    out["has_brow"] = 1.0 - 0.45 * animal - robot * 0.6

    # Nose
    out["nose_width"] = between("nose_width", 0.036, 0.066) + 0.012 * old
    out["nose_y"] = eye_y + between("nose_length", 0.145, 0.205) - 0.03 * child - 0.01 * animal
    out["nose_kind"] = a["nose_kind"]

    # Mouth
    wide, rounded = c["width"].clamp(0, 1), c["round"].clamp(0, 1)
    teeth, tongue = c["teeth"].clamp(0, 1), c["tongue"].clamp(0, 1)
    base = between("mouth_width", 0.145, 0.190) + 0.02 * animal + 0.02 * robot
    mouth_y = out["nose_y"] + between("mouth_height", 0.125, 0.155) + 0.02 * animal
    out["mouth_y"] = mouth_y + 0.004 * opening
    out["mouth_half"] = base * (1 + 0.22 * wide - 0.44 * rounded) * (1 - 0.05 * opening)
    parted = (opening * 12.0).clamp(0, 1)
    lips_open = 0.150 * opening * (1 - 0.22 * rounded) + 0.018 * teeth * parted
    out["mouth_open"] = lips_open
    out["smile"] = (between("smile", 0.012, 0.060) * (1 - 0.7 * rounded) + 0.022 * wide) * (
        1 - 0.5 * opening
    )
    lip_thick = between("lip_thick", 0.016, 0.032) * (1 + 0.45 * rounded) * (1 - 0.5 * animal)
    lip_thick = lip_thick * (1 - 0.25 * old) * (1 + 0.25 * feminine)
    out["lip_thick"] = lip_thick * (1 - 0.35 * (1 - parted) * teeth)
    out.update(teeth=teeth, tongue=tongue, opening=opening, rounded=rounded)

    # Hair
    style = a["hair_style"]
    hair_flags = {
        "bald": chance("hair_style", 0.0, 0.06) * (1 - feminine),
        "buzz": chance("hair_style", 0.06, 0.14) * (1 - feminine),
        "afro": chance("hair_style", 0.14, 0.26),
        "bun": chance("hair_style", 0.26, 0.36) * feminine,
        "bob": chance("hair_style", 0.36, 0.58) * (feminine + (1 - feminine) * (style < 0.42)),
        "long": chance("hair_style", 0.58, 1.1) * (feminine + (1 - feminine) * (style > 0.95)),
    }
    out.update({name: flag.to(style.dtype) * human for name, flag in hair_flags.items()})
    out["curl"] = a["curl"] * chance("curl", 0.45, 1.1)
    out["part_x"] = (a["parting"] - 0.5) * 0.5
    for index in range(5):
        out[f"fringe{index}"] = chance("fringe", index / 5, (index + 1) / 5 + (index == 4))
    out["seed"] = a["strands"] * 20.0
    out["beard"] = bearded
    out["stubble"] = chance("beard", 0.36, 0.5) * human * (1 - feminine) * (1 - child)
    out["moustache"] = human * (1 - feminine) * (1 - child) * chance("moustache", 0.0, 0.3)
    out["beard_length"] = between("moustache", 0.02, 0.14)
    out["hat_cap"] = chance("hat", 0.0, 0.08) * human
    out["hat_beanie"] = chance("hat", 0.08, 0.17) * human
    out["headband"] = chance("hat", 0.17, 0.21) * human
    out["bow"] = chance("hat", 0.21, 0.32) * (animal + 0.6 * human * feminine > 0.5)
    out["ear_size"] = between("ear_size", 0.85, 1.2)
    out["glasses"] = chance("glasses", 0.0, 0.26) * (human + animal)
    out["square"] = chance("glasses_kind", 0.5, 1.1)
    out["freckles"] = chance("freckles", 0.0, 0.2) * human
    out["blush"] = between("blush", 0.05, 0.34) * (1 - robot)
    out["earrings"] = chance("earrings", 0.0, 0.4) * feminine * human
    out["patch"] = chance("markings", 0.0, 0.3) * animal * (1 - flags["fox"])
    out["tabby"] = chance("markings", 0.3, 1.1) * flags["cat"]
    for index, name in enumerate(("crew", "stripes", "shirt", "hoodie", "blazer")):
        out[name] = chance("cloth_kind", index / 5, (index + 1) / 5 + (index == 4))
    for index, name in enumerate(("gradient", "bokeh", "window", "diagonal", "shelf")):
        out[name] = chance("background", index / 5, (index + 1) / 5 + (index == 4))
    out["back_seed"] = a["background_seed"]
    return out


@functools.cache
def _constant(
    values: tuple[float, ...] | tuple[tuple[float, ...], ...], device: torch.device
) -> Tensor:
    """Kept, since a CUDA graph cannot be captured while a tensor is copied from the host."""
    return torch.tensor(values, device=device)


PARAMETER_INDEX: Final = {
    name: index
    for index, name in enumerate(
        prepare(torch.zeros(1, NUM_ATTRIBUTES), torch.zeros(1, NUM_CONTROLS))
    )
}

_table = Replayed(lambda *given: torch.stack(list(prepare(*given).values())))


def prepared(attributes: Tensor, controls: Tensor) -> dict[str, Tensor]:
    """What `prepare` returns, of tensors of any float type and at the cost of one launch."""
    values = _table(attributes.float(), controls.float())
    return dict(zip(PARAMETER_INDEX, values.unbind(), strict=True))


def _cover(distance: Tensor) -> Tensor:
    """Anti-aliased coverage of the inside of a shape, from a signed distance in units."""
    return (0.5 - distance * PIXELS_PER_UNIT).clamp(0.0, 1.0)


def _soft(distance: Tensor, width: float) -> Tensor:
    """Like :func:`_cover` with an edge ``width`` units wide."""
    part = (0.5 - distance / width).clamp(0.0, 1.0)
    return part * part * (3.0 - 2.0 * part)


def _ellipse(x: Tensor, y: Tensor, half_x: Tensor | float, half_y: Tensor | float) -> Tensor:
    """Signed distance to an ellipse: exact on its outline to first order."""
    u, v = x / half_x, y / half_y
    level = u * u + v * v
    slope = torch.sqrt((u / half_x).square() + (v / half_y).square() + 1e-4)
    return (level - 1.0) / (2.0 * slope)


def _box(
    x: Tensor, y: Tensor, half_x: Tensor | float, half_y: Tensor | float, corner: float
) -> Tensor:
    """Signed distance to a rounded box."""
    dx, dy = x.abs() - half_x + corner, y.abs() - half_y + corner
    outside = torch.sqrt(dx.clamp(min=0.0).square() + dy.clamp(min=0.0).square() + 1e-8)
    return outside + torch.maximum(dx, dy).clamp(max=0.0) - corner


def _join(first: Tensor, second: Tensor, radius: float) -> Tensor:
    """Union of two shapes with a smooth seam."""
    part = (0.5 + 0.5 * (second - first) / radius).clamp(0.0, 1.0)
    return second + (first - second) * part - radius * part * (1.0 - part)


def _bump(x: Tensor, width: Tensor | float) -> Tensor:
    """Gaussian bump of height one."""
    return torch.exp(-(x / width).square())


def _over(base: Colour, colour: Colour, mask: Tensor) -> Colour:
    return [b + (c - b) * mask for b, c in zip(base, colour, strict=True)]


def _tint(base: Colour, factors: tuple[float, float, float], mask: Tensor) -> Colour:
    return [b * (1.0 - mask * (1.0 - f)) for b, f in zip(base, factors, strict=True)]


def _lighten(base: Colour, mask: Tensor) -> Colour:
    return [b + (1.0 - b) * mask for b in base]


def _scale(colour: Colour, factor: Tensor | float) -> Colour:
    return [c * factor for c in colour]


def _noise(cell: Tensor) -> Tensor:
    """A number in [0, 1) for each value of ``cell``; smooth rounding differences do not matter."""
    return torch.remainder(torch.sin(cell * 12.9898) * 437.585, 1.0)


class _Parameters:
    """Named access to the parameter table (n, K), shaped to broadcast over pixels."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Tensor:
        return self._table[:, PARAMETER_INDEX[name], None, None]

    def colour(self, name: str) -> Colour:
        return [self[f"{name}.{index}"] for index in range(3)]


def _background(p: _Parameters, x: Tensor, y: Tensor) -> Colour:
    seed = p["back_seed"]
    part = (0.5 + 0.45 * y + 0.25 * x * torch.cos(seed * 6.0)).clamp(0.0, 1.0)
    part = part * part * (3.0 - 2.0 * part)
    colour = _over(p.colour("back"), p.colour("back2"), part)
    lights = torch.zeros_like(x * y * seed)
    for index in range(6):
        phase = seed * (7.0 + 3.0 * index) + index * 1.7
        cx, cy = 1.4 * torch.sin(phase), -0.25 + 0.7 * torch.sin(phase * 1.9 + 1.0)
        radius = 0.13 + 0.07 * torch.sin(phase * 2.7)
        disc = _ellipse(x - cx, y - cy, radius, radius)
        lights = lights + 0.13 * _soft(disc, 0.03) + 0.09 * _soft((disc + 0.01).abs() - 0.012, 0.02)
    colour = _lighten(colour, lights.clamp(max=0.5) * p["bokeh"])
    # a window on one side
    side = torch.where(seed < 0.5, -1.0, 1.0)
    wx, wy = x - side * 0.98, y + 0.30
    pane = _soft(_box(wx, wy, 0.36, 0.46, 0.02), 0.02)
    bars = _soft(torch.minimum(wx.abs(), (wy + 0.02).abs()) - 0.022, 0.02)
    frame = _soft(_box(wx, wy, 0.36, 0.46, 0.02).abs() - 0.03, 0.02)
    sky = [0.72 + 0.15 * y, 0.86 + 0.08 * y, 0.97 + 0.0 * y]
    colour = _over(colour, sky, pane * p["window"] * 0.85)
    colour = _over(
        colour,
        [c * 0.55 + 0.35 for c in p.colour("back2")],
        torch.maximum(frame, bars * pane) * p["window"],
    )
    # diagonal stripes
    wave = (torch.remainder((x * 0.8 + y * 0.6) * 1.9 + seed, 1.0) - 0.5).abs() - 0.25
    colour = _lighten(colour, _soft(wave, 0.04) * 0.09 * p["diagonal"])
    # shelves with books
    row = torch.floor((y + 1.05) / 0.46)
    in_row = torch.remainder(y + 1.05, 0.46)
    width = 0.10
    column = torch.floor((x + row * 0.037) / width)
    in_column = torch.remainder(x + row * 0.037, width)
    pick = _noise(column * 1.31 + row * 7.1 + seed * 5.0)
    tall = 0.08 + 0.14 * _noise(column * 2.17 + row * 3.3 + seed * 3.0)
    book = _soft(torch.maximum((in_column - width / 2).abs() - width * 0.44, tall - in_row), 0.012)
    board = _soft((in_row - 0.44).abs() - 0.02, 0.015)
    spine = _soft((in_row - tall - 0.06).abs() - 0.012, 0.012)
    tone = [
        0.40 + 0.42 * pick,
        0.34 + 0.30 * torch.remainder(pick * 3.7, 1.0),
        0.32 + 0.34 * torch.remainder(pick * 7.3, 1.0),
    ]
    shelf = [0.45 * b + 0.12 for b in p.colour("back2")]
    shelf = _over(
        shelf, [0.55 * t + 0.3 * b for t, b in zip(tone, p.colour("back"), strict=True)], book
    )
    shelf = _lighten(shelf, spine * book * 0.25)
    shelf = _over(shelf, [0.55 + 0.0 * y, 0.42 + 0.0 * y, 0.30 + 0.0 * y], board)
    colour = _over(colour, shelf, 0.8 * p["shelf"])
    glow = torch.exp(-((x - p["body_x"]).square() + (y + 0.1).square()) * 1.4)
    return _lighten(colour, glow * 0.14)


def _hair_tone(p: _Parameters, strand: Tensor, along: Tensor, light: Tensor) -> Colour:
    """Hair with strands: ``strand`` runs across them, ``along`` from the root outwards."""
    seed, curl = p["seed"], p["curl"]
    wave = strand + curl * 0.10 * torch.sin(along * 16.0 + seed)
    fine = torch.sin(wave * 31.0 + 2.0 * torch.sin(wave * 11.0 + seed))
    finer = torch.sin(wave * 67.0 + seed + along * 2.0)
    coils = torch.sin(strand * 44.0 + 2.2 * torch.sin(along * 30.0)) * torch.sin(
        along * 52.0 + seed
    )
    finer = finer + (coils - finer) * p["afro"]
    fine = fine * (1.0 - p["afro"])
    lines = (0.55 * fine + 0.45 * finer) * (1.0 - 0.65 * p["flat"])
    sheen = _bump(along - 0.30 - 0.04 * fine, 0.10)
    shade = 0.86 + 0.10 * lines + 0.22 * light
    return [
        (h * shade + (0.10 + 0.28 * h) * sheen * (0.75 + 0.35 * lines)).clamp(0.0, 1.0)
        for h in p.colour("hair")
    ]


def _back_hair(image: Colour, p: _Parameters, x: Tensor, y: Tensor) -> Colour:
    face_width, face_height = p["face_width"], p["face_height"]
    hx = x + 0.05 * p["yaw"]
    curls = p["curl"] * 0.020 * torch.sin(y * 24.0 + p["seed"]) * torch.sign(hx)
    cap = _ellipse(hx, y + 0.12, face_width + 0.06, face_height * 0.90)
    bob = _join(
        _ellipse(hx, y + 0.10, face_width + 0.13, face_height * 0.96),
        _box(hx + curls, y - 0.14, face_width + 0.11 - 0.05 * y.clamp(0, 1), 0.34, 0.12),
        0.08,
    )
    waves = 0.018 * torch.sin(y * 9.0 + p["seed"]) * torch.sign(hx)
    long = _join(
        _ellipse(hx, y + 0.10, face_width + 0.13, face_height * 0.97),
        _box(hx + waves + curls, y - 0.42, face_width + 0.10 + 0.06 * y.clamp(0, 1), 0.72, 0.2),
        0.08,
    )
    angle = torch.atan2(hx, -(y + 0.16) + 1e-4)
    fuzz = 0.030 * (0.6 - torch.sin(angle * 9.0 + p["seed"]).abs()) + 0.006 * torch.sin(
        angle * 47.0
    )
    afro = _ellipse(hx, y + 0.20, face_width + 0.24, face_height * 0.86 + 0.14) + fuzz
    bun = torch.minimum(cap, _ellipse(hx - 0.05, y + face_height + 0.16, 0.17, 0.15))
    distance = cap
    for name, shape in (("bob", bob), ("long", long), ("afro", afro), ("bun", bun)):
        distance = torch.where(p[name] > 0.5, shape, distance)
    radius = torch.sqrt(hx.square() + (y + 0.2).square() + 1e-6)
    strand = hx * 1.2
    tone = _hair_tone(p, strand, radius * 0.8 - 0.1, -0.35 + 0 * radius)
    rim = _soft(distance + 0.05, 0.10)
    tone = _scale(tone, 0.80 - 0.14 * rim)
    visible = p["human"] * (1.0 - p["bald"])
    return _over(image, tone, _cover(distance) * visible)


def _body(image: Colour, p: _Parameters, x: Tensor, y: Tensor) -> tuple[Colour, Tensor]:
    """Draws the shoulders, neck and clothes; also returns the body's distance."""
    scale, skin, cloth, accent = p["scale"], p.colour("skin"), p.colour("cloth"), p.colour("accent")
    bx = (x - p["body_x"]) / scale
    by = y + 0.05
    ax = bx.abs()
    torso = _join(_ellipse(bx, by - 1.24, 0.80, 0.42), _ellipse(bx, by - 1.05, 0.36, 0.24), 0.16)
    hood = _ellipse(bx, by - 0.80, 0.44, 0.20)
    neck_x = (x - (0.6 * p["body_x"] + 0.4 * p["head_x"])) / scale
    half = 0.175 + 0.085 * p["animal"] - 0.05 * p["robot"] - 0.06 * p["alien"] - 0.015 * p["long"]
    neck = _join(
        _box(neck_x, by - 0.55, half, 0.34, 0.04), _ellipse(bx, by - 0.86, 0.24, 0.075), 0.10
    )
    fold = 0.88 + 0.12 * (1.0 - ax) + 0.10 * p["light_x"] * bx - 0.10 * (by - 0.9)
    fold = fold + 0.03 * torch.sin(ax * 14.0 - by * 10.0) * (1.0 - p["flat"])
    edge = _soft(torso.abs() - 0.01, 0.09) * 0.16
    image = _over(image, _scale(cloth, fold * 0.72), _cover(hood) * p["hoodie"])
    body = _scale(cloth, fold)
    stripe = _soft((torch.remainder(by * 7.0 - 0.8 * ax * ax, 1.0) - 0.5).abs() - 0.24, 0.09)
    body = _over(body, _scale(accent, fold), stripe * p["stripes"])
    # V opening with a lighter shirt beneath, for blazers
    opening = _cover(ax * 1.25 + (by - 1.12) * 0.9 - 0.02)
    body = _over(body, [0.93 * fold, 0.93 * fold, 0.95 * fold], opening * p["blazer"])
    tie = _cover(torch.maximum(ax - 0.035 - 0.05 * (by - 0.84), 0.84 - by)) * opening
    body = _over(body, _scale(accent, 0.85 * fold), tie * p["blazer"])
    lapel = _soft((ax * 1.25 + (by - 1.12) * 0.9 - 0.08).abs() - 0.05, 0.03)
    body = _tint(body, (0.78, 0.78, 0.80), lapel * p["blazer"] * (1.0 - opening))
    # buttons of a shirt, pocket of a hoodie
    button_y = torch.remainder(by, 0.11) - 0.055
    buttons = _cover(_ellipse(bx, button_y, 0.014, 0.014)) * _cover(0.90 - by)
    placket = _cover((ax - 0.034).abs() - 0.003) * 0.3
    body = _tint(body, (0.6, 0.6, 0.62), placket * p["shirt"])
    body = _over(body, _scale(accent, 1.0), buttons * p["shirt"])
    strings = _cover(torch.maximum((ax - 0.10 + 0.02 * by).abs() - 0.009, by - 1.05))
    body = _over(body, _lighten(accent, 0.4 + 0 * bx), strings * p["hoodie"])
    body = _tint(body, (0.55, 0.5, 0.6), edge)
    image = _over(image, body, _cover(torso))
    # neckline, then the neck, so that only its front half shows
    ring = _ellipse(bx, by - 0.845, 0.25, 0.10)
    band = _cover(ring - 0.035) * (p["crew"] + p["stripes"])
    image = _over(image, _scale(accent, 0.92 * fold), band * _cover(torso - 0.04))
    roll = _cover(_ellipse(bx, by - 0.85, 0.30, 0.13))
    image = _over(image, _scale(cloth, 0.85 * fold), roll * p["hoodie"])
    shadow = 0.70 + 0.22 * ((by - 0.62) * 4.0).clamp(0.0, 1.0)
    neck_tone = _scale(skin, shadow + 0.08 * p["light_x"] * bx)
    chest = torch.where(
        p["shirt"] > 0.5,
        _join(neck, torch.maximum(ax * 1.5 + (by - 1.04), 0.82 - by) * 0.6, 0.03),
        neck,
    )
    image = _over(image, neck_tone, _cover(torch.maximum(chest, by - 1.0)))
    joints = _cover((torch.remainder(by * 14.0, 1.0) - 0.5).abs() * 0.07 - 0.012)
    image = _tint(image, (0.5, 0.5, 0.55), joints * _cover(neck) * p["robot"])
    # collar wings of a shirt and of the shirt beneath a blazer
    wing = torch.maximum(
        (ax - 0.155 + 0.55 * (by - 0.86)).abs() - 0.055, (by - 0.885).abs() - 0.095
    )
    wing = torch.maximum(wing, 0.03 - ax)
    white = [0.95 + 0 * bx, 0.95 + 0 * bx, 0.97 + 0 * bx]
    collar = _over(_lighten(cloth, 0.25 + 0 * bx), white, p["blazer"])
    image = _over(image, _scale(collar, fold), _cover(wing) * (p["shirt"] + p["blazer"]))
    crease = _cover(wing.abs() - 0.004) * 0.4 * (p["shirt"] + p["blazer"])
    return _tint(image, (0.55, 0.55, 0.6), crease), torch.minimum(torso, neck)


def _ears(image: Colour, p: _Parameters, x: Tensor, y: Tensor) -> Colour:
    skin, face_width, face_height, size = (
        p.colour("skin"),
        p["face_width"],
        p["face_height"],
        p["ear_size"],
    )
    ax = (x + 0.05 * p["yaw"]).abs()
    outer = _ellipse(ax - face_width * 0.99, y - 0.03, 0.070 * size, 0.115 * size)
    inner = _ellipse(ax - face_width * 1.00, y - 0.03, 0.036 * size, 0.070 * size)
    show = p["human"] * (1.0 - p["afro"])
    image = _over(image, _scale(skin, 0.92 + 0 * ax), _cover(outer) * show)
    image = _tint(image, (0.80, 0.66, 0.64), _soft(inner, 0.03) * _cover(outer) * show)
    jewel = _ellipse(ax - face_width * 1.03, y - 0.03 - 0.135 * size, 0.022, 0.022)
    image = _over(
        image, [0.95 + 0 * ax, 0.80 + 0 * ax, 0.42 + 0 * ax], _cover(jewel) * p["earrings"] * show
    )
    # robot: bolts and an antenna; alien: two stalks
    bolt = _box(ax - face_width * 1.02, y - 0.0, 0.06, 0.12, 0.03)
    image = _over(image, _scale(skin, 0.72 + 0 * ax), _cover(bolt) * p["robot"])
    rod = torch.maximum((x + 0.05 * p["yaw"]).abs() - 0.014, (y + face_height + 0.05).abs() - 0.14)
    image = _over(image, _scale(skin, 0.62 + 0 * ax), _cover(rod) * p["robot"])
    lamp = _ellipse(x + 0.05 * p["yaw"], y + face_height + 0.18, 0.05, 0.05)
    image = _over(
        image,
        _lighten(p.colour("iris"), 0.35 * _soft(lamp + 0.03, 0.05)),
        _cover(lamp) * p["robot"],
    )
    lean = ax - 0.16 - 0.16 * (-y - face_height * 0.9)
    stalk = torch.maximum(lean.abs() - 0.018, (y + face_height).abs() - 0.22)
    tip = _ellipse(ax - 0.215, y + face_height + 0.22, 0.052, 0.052)
    image = _over(
        image, _scale(skin, 0.80 + 0 * ax), _cover(torch.minimum(stalk, tip)) * p["alien"]
    )
    image = _lighten(
        image,
        _soft(_ellipse(ax - 0.20, y + face_height + 0.24, 0.02, 0.02), 0.02) * 0.5 * p["alien"],
    )
    # animals
    ex, ey = ax - face_width * 0.68, y + face_height * 0.80
    round_outer = _ellipse(ex - 0.03, ey, 0.165 * size, 0.165 * size)
    round_inner = _ellipse(ex - 0.03, ey - 0.02, 0.100 * size, 0.100 * size)
    point_outer, point_inner = (
        _pointed_ear(ex, ey, size, 0.27),
        _pointed_ear(ex, ey - 0.06, size * 0.66, 0.27),
    )
    fox_outer, fox_inner = (
        _pointed_ear(ex, ey, size, 0.36),
        _pointed_ear(ex, ey - 0.07, size * 0.64, 0.36),
    )
    lean_x = ex + 0.10 + 0.18 * ey
    long_outer = _ellipse(lean_x, ey + 0.17, 0.098 * size, 0.33 * size)
    long_inner = _ellipse(lean_x, ey + 0.15, 0.052 * size, 0.25 * size)
    hang = ax - face_width * 0.99 - 0.14 * (y + 0.10)
    floppy = _ellipse(hang, y + 0.02, 0.115 * size, 0.31 * size)
    outer, inner = round_outer, round_inner
    for name, shape, hole in (
        ("cat", point_outer, point_inner),
        ("fox", fox_outer, fox_inner),
        ("rabbit", long_outer, long_inner),
    ):
        outer = torch.where(p[name] > 0.5, shape, outer)
        inner = torch.where(p[name] > 0.5, hole, inner)
    upright = p["animal"] * (1.0 - p["dog"])
    shade = 0.90 - 0.12 * _soft(outer.abs() - 0.01, 0.06)
    image = _over(image, _scale(skin, shade), _cover(outer) * upright)
    image = _tint(
        image, (0.35, 0.30, 0.32), _soft(ey + 0.20 * size, 0.12) * _cover(outer) * p["fox"]
    )
    pink = [s * 0.45 + q for s, q in zip(skin, (0.48, 0.32, 0.32), strict=True)]
    image = _over(image, pink, _soft(inner, 0.02) * upright * (1.0 - 0.55 * p["fox"]))
    return _over(
        image, _scale(skin, 0.66 + 0.10 * _soft(floppy + 0.05, 0.1)), _cover(floppy) * p["dog"]
    )


def _pointed_ear(x: Tensor, y: Tensor, size: Tensor, height: float) -> Tensor:
    """A triangular ear with slightly bulging sides, its base at y = 0.12."""
    top = y + height * size
    bulge = 0.10 * torch.sin((top / (height * size + 0.12)).clamp(0.0, 1.0) * math.pi) * size * 0.35
    outside = (x - 0.02) - 0.25 * top - bulge
    inside = -(x - 0.05) - 0.62 * top - bulge
    return torch.maximum(_join(outside, inside, -0.05) * 0.86, y - 0.14)


def _head_distance(p: _Parameters, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The head's signed distance and the half width of the head at each height."""
    face_width, face_height = p["face_width"], p["face_height"]
    low = (y / face_height).clamp(0.0, 1.0)
    stretched = y - p["jaw_drop"] * low
    half = face_width * (1.0 - p["jaw"] * low * low) + p["cheek"] * _bump(stretched - 0.20, 0.17)
    tufts = (p["cat"] + p["fox"]) * 0.07 * _bump(y - 0.20, 0.10)
    half = half + tufts
    rounded = _ellipse(x, stretched, half, face_height)
    box = _box(x, stretched + 0.02, face_width, face_height * 0.90, 0.16)
    return torch.where(p["robot"] > 0.5, box, rounded), half


def _nose(face: Colour, p: _Parameters, x: Tensor, y: Tensor) -> Colour:
    width, ny, kind, lx = p["nose_width"], p["nose_y"], p["nose_kind"], p["light_x"]
    nx, dy = x - 0.045 * p["yaw"], y - ny - 0.01 * p["pitch"]
    bridge = _bump(nx + lx * 0.03, 0.030) * _soft((dy + 0.07).abs() - 0.06, 0.08) * 0.16
    under = _bump(nx, width * 1.05) * _bump(dy - 0.028, 0.016) * 0.46
    side = _bump(nx.abs() - width, 0.014) * _bump(dy, 0.026) * 0.30
    plain = p["human"] + p["alien"] * 0.4
    face = _tint(face, (0.66, 0.47, 0.42), (under + side + bridge) * plain)
    hole = _cover(_ellipse(nx.abs() - width * 0.50, dy - 0.020, 0.013, 0.0075)) * 0.6 * (kind < 0.6)
    face = _tint(face, (0.42, 0.27, 0.26), hole * plain)
    shine = _bump(nx - lx * 0.012, width * 0.42) * _bump(dy + 0.012, 0.018)
    face = _lighten(face, shine * 0.30 * plain * (1.0 - 0.6 * p["flat"]))
    ball = _ellipse(nx, dy, width * 1.15, 0.042) - 0.004
    tip = torch.maximum(
        _ellipse(nx, dy + 0.010, 0.072, 0.044), (nx.abs() * 0.72 + dy - 0.036) * 0.8
    )
    dark = [0.13 + 0 * nx, 0.09 + 0 * nx, 0.10 + 0 * nx]
    rosy = [0.86 + 0 * nx, 0.50 + 0 * nx, 0.52 + 0 * nx]
    snout = _over(dark, rosy, p["cat"] * 0.8 + p["rabbit"])
    face = _over(face, snout, _cover(tip) * p["animal"])
    face = _lighten(face, _bump(nx + 0.018, 0.016) * _bump(dy + 0.024, 0.009) * 0.6 * p["animal"])
    line = _cover(
        torch.maximum(
            nx.abs() - 0.005, (y - (ny + p["mouth_y"]) / 2).abs() - (p["mouth_y"] - ny) / 2
        )
    )
    face = _tint(face, (0.42, 0.32, 0.32), line * p["animal"] * 0.75)
    return _over(
        face, _scale(p.colour("skin"), 0.72 + 0 * nx), _cover(ball) * p["robot"] * (kind < 0.3)
    )


def _mouth(face: Colour, p: _Parameters, x: Tensor, y: Tensor, shade: Tensor) -> Colour:
    half, gape, thick = p["mouth_half"], p["mouth_open"], p["lip_thick"]
    teeth, tongue = p["teeth"], p["tongue"]
    mx, my = x - 0.035 * p["yaw"], y - p["mouth_y"] - 0.004 * p["pitch"]
    u = mx / half
    u2 = u.square().clamp(max=1.4)
    inside = (1.0 - u2).clamp(0.0, 1.0)
    arch = torch.sqrt(inside + 1e-6)
    arch = arch * (0.65 + 0.35 * arch)
    middle = -p["smile"] * (u2 - 0.4)
    upper, lower = middle - 0.36 * gape * arch, middle + 0.78 * gape * arch
    bow = 1.0 - 0.24 * _bump(u, 0.17) + 0.10 * _bump(u.abs() - 0.30, 0.16)
    lip_top = upper - thick * inside.sqrt().clamp(min=0.0) * 0.95 * bow
    lip_bottom = lower + thick * torch.sqrt(inside + 1e-6) * 1.25
    ends = (u.abs() - 1.0) * half
    lips = torch.maximum(torch.maximum(lip_top - my, my - lip_bottom) * 0.92, ends)
    hole = torch.maximum(torch.maximum(upper - my, my - lower) * 0.92, ends + 0.004)
    chin_shadow = _bump(my - lip_bottom - 0.024, 0.016) * inside
    face = _tint(face, (0.68, 0.52, 0.48), chin_shadow * 0.32 * (1.0 - p["animal"]))
    # lips: the upper one in its own shadow, the lower one with a highlight
    on_upper = ((middle - my) * 60.0 + 0.5).clamp(0.0, 1.0)
    tone = (1.02 - 0.20 * on_upper) * (0.55 + 0.45 * shade)
    face = _over(face, _scale(p.colour("lip"), tone), _cover(lips) * (1.0 - 0.55 * p["animal"]))
    gloss = _bump(my - lower - thick * 0.55, thick * 0.30) * _bump(u - 0.1 * p["light_x"], 0.45)
    face = _lighten(face, gloss * 0.22 * _cover(lips) * (1.0 - p["flat"]))
    # the inside
    part = _cover(hole) * (gape * 160.0).clamp(0.0, 1.0)
    depth = ((my - upper) / (1.14 * gape + 0.004)).clamp(0.0, 1.0)
    face = _over(face, [0.20 + 0.14 * depth, 0.045 + 0.03 * depth, 0.06 + 0.04 * depth], part)
    raised = gape * (0.98 - 0.62 * tongue)
    tongue_shape = _ellipse(mx, my - middle - raised, half * 0.62, 0.50 * gape + 0.010)
    flesh = [0.86 - 0.10 * depth, 0.42 - 0.06 * depth, 0.44 - 0.06 * depth]
    centre = 1.0 - 0.16 * _bump(u, 0.06)
    face = _over(
        face, _scale(flesh, centre), _soft(tongue_shape, 0.014) * part * (0.5 + 0.5 * tongue)
    )
    height = (0.010 + 0.034 * teeth) * (gape * 30.0).clamp(0.25, 1.0)
    row = torch.maximum(my - upper - height * (0.75 + 0.25 * inside), (u.abs() - 0.88) * half)
    gaps = 1.0 - 0.10 * _cover((torch.remainder(mx * 24.0, 1.0) - 0.5).abs() / 24.0 - 0.002)
    enamel = (1.0 - 0.16 * u2) * gaps
    white = [0.98 * enamel, 0.96 * enamel, 0.93 * enamel]
    face = _over(face, white, _cover(row) * part * (0.20 + 0.80 * teeth))
    low = torch.maximum(lower - 0.022 * teeth - my, (u.abs() - 0.72) * half)
    face = _over(
        face, _scale(white, 0.88), _cover(low) * part * ((teeth - 0.4) * 1.4).clamp(0.0, 1.0)
    )
    face = _tint(face, (0.45, 0.40, 0.42), _bump(my - upper, 0.010) * part * 0.5)
    # the line of closed lips and the corners
    shut = 1.0 - (gape * 60.0).clamp(0.0, 1.0)
    line = _cover(torch.maximum((my - middle).abs() - 0.0055, ends)) * shut
    face = _tint(face, (0.40, 0.26, 0.27), line * 0.85)
    corner = _bump(mx.abs() - half - 0.004, 0.014) * _bump(my - middle, 0.014)
    return _tint(face, (0.60, 0.44, 0.42), corner * 0.45)


def _eyes(face: Colour, p: _Parameters, x: Tensor, y: Tensor, shade: Tensor) -> Colour:
    skin, eye, height, yaw = p.colour("skin"), p["eye"], p["eye_height"], p["yaw"]
    side = torch.sign(x)
    ex = (x.abs() - p["eye_gap"]) / (1.0 - 0.07 * yaw * side)  # positive is outwards
    ey = y - p["eye_y"] + p["eye_tilt"] * ex
    u2 = (ex / eye).square()
    arch = torch.sqrt((1.0 - u2).clamp(min=0.0) + 1e-6)
    plain = 1.0 - p["robot"]
    socket = torch.exp(-((ex / (eye * 1.45)).square() + (ey / (height * 1.5)).square()).square())
    face = _tint(face, (0.76, 0.62, 0.62), socket * 0.22 * plain)
    lid_y = height * (-1.0 + 1.80 * p["lid"]) * arch
    low_y = height * 0.82 * arch
    ends = (ex.abs() - eye) * 0.8
    ball = torch.maximum(torch.maximum(-height * arch - ey, ey - low_y) * 0.9, ends)
    opened = torch.maximum(torch.maximum(lid_y - ey, ey - low_y) * 0.9, ends)
    panel = _cover(ball - 0.03) * p["robot"]
    face = _over(face, [0.10 + 0 * ex, 0.12 + 0 * ex, 0.16 + 0 * ex], panel)
    face = _over(face, _scale(skin, 0.86 * shade), _cover(ball))
    white = _cover(opened)
    under = 1.0 - 0.34 * (1.0 - (ey - lid_y) / (height * 0.55)).clamp(0.0, 1.0)
    round_off = 1.0 - 0.14 * u2
    sclera = [
        0.98 * under * round_off,
        0.975 * under * round_off,
        0.985 * under * (0.5 + 0.5 * round_off),
    ]
    glow = [0.10 + 0 * ex, 0.13 + 0 * ex, 0.18 + 0 * ex]
    night = [0.07 + 0 * ex, 0.07 + 0 * ex, 0.10 + 0 * ex]
    sclera = _over(_over(sclera, glow, p["robot"]), night, p["alien"] * 0.92)
    face = _over(face, sclera, white)
    # the iris moves with the picture, not with the side
    ix, iy = side * ex - p["gaze_x"], ey - p["gaze_y"] - 0.04 * height
    radius, size = torch.sqrt(ix.square() + iy.square() + 1e-8), p["iris_size"]
    ratio = radius / size
    ray = 0.06 * torch.sin(torch.atan2(iy, ix + 1e-5) * 17.0)
    glaze = 0.62 + 0.50 * (0.35 + 0.6 * iy / size).clamp(0.0, 1.0) + ray * (1.0 - p["flat"])
    ring = 1.0 - 0.55 * ((ratio - 0.78) * 5.0).clamp(0.0, 1.0)
    iris = [i * glaze * ring * (0.55 + 0.45 * under) for i in p.colour("iris")]
    face = _over(face, iris, _cover(radius - size) * white)
    black = [0.035 + 0 * ex, 0.03 + 0 * ex, 0.045 + 0 * ex]
    face = _over(face, black, _cover(radius - p["pupil"]) * white * (1.0 - 0.7 * p["robot"]))
    tilt = torch.where(p["light_x"] > 0, 1.0, -1.0)
    spot = _cover(_ellipse(ix - size * 0.34 * tilt, iy + size * 0.36, size * 0.27, size * 0.27))
    spot2 = (
        _cover(_ellipse(ix + size * 0.36 * tilt, iy - size * 0.40, size * 0.13, size * 0.13)) * 0.75
    )
    face = _lighten(face, torch.maximum(spot, spot2) * white)
    # lids
    lash = p["lash"] * (0.65 + 0.45 * (ex / eye + 0.6).clamp(0.0, 1.4) * 0.6)
    wing = p["wing"] * (ex / eye - 0.75).clamp(min=0.0) * eye * 0.9
    stroke = torch.maximum(
        (ey - lid_y + wing).abs() - lash, ex.abs() - eye * (1.02 + 0.16 * p["wing"] * (ex > 0))
    )
    ink = [0.45 * b + 0.03 for b in p.colour("brow")]
    face = _over(face, ink, _cover(stroke) * 0.95 * plain)
    below = torch.maximum((ey - low_y).abs() - 0.004, ends)
    face = _tint(face, (0.52, 0.40, 0.40), _cover(below) * 0.5 * plain)
    crease_y = -height * 1.32 * arch + 0.5 * height * p["blink"]
    crease = torch.maximum((ey - crease_y).abs() - 0.004, ex.abs() - eye * 0.85)
    face = _tint(
        face, (0.58, 0.44, 0.42), _soft(crease, 0.010) * 0.42 * plain * (1.0 - p["animal"])
    )
    bag = _bump(ey - low_y - 0.030, 0.008) * _soft(ex.abs() - eye * 0.7, 0.05)
    return _tint(face, (0.66, 0.52, 0.50), bag * p["old"] * 0.5)


def _brows(face: Colour, p: _Parameters, x: Tensor, y: Tensor) -> Colour:
    width = p["brow_width"]
    bx = x.abs() - p["eye_gap"] - 0.01
    v = bx / width
    by = y - p["brow_y"] + p["brow_tilt"] * bx - 0.022 * v * v
    thick = p["brow_thick"] * (1.0 - 0.42 * (v + 0.25).clamp(min=-0.2, max=1.3))
    stroke = torch.maximum(by.abs() - thick, (v.abs() - 1.0) * width)
    hairs = 0.96 + 0.07 * torch.sin(bx * 160.0 + by * 110.0) * (1.0 - p["flat"])
    return _over(face, _scale(p.colour("brow"), hairs), _soft(stroke, 0.014) * 0.92 * p["has_brow"])


def _beard(face: Colour, p: _Parameters, x: Tensor, y: Tensor, light: Tensor) -> Colour:
    half, mouth_y = p["mouth_half"], p["mouth_y"]
    mx, my = x - 0.03 * p["yaw"], y - mouth_y
    line = (
        mouth_y
        - 0.115
        + 0.10 * _bump(mx.abs() - 0.20, 0.12)
        - 0.40 * (mx.abs() - 0.30).clamp(min=0.0)
    )
    fuzz = 0.012 * torch.sin(mx * 70.0 + p["seed"]) + 0.008 * torch.sin(mx * 131.0)
    cheek = _soft(line + fuzz - y, 0.035)
    bare = _soft(
        _ellipse(
            mx, my - 0.010 - 0.35 * p["mouth_open"], half * 1.02, 0.040 + 0.62 * p["mouth_open"]
        ),
        0.018,
    )
    upper = 1.0 - _soft(_ellipse(mx, my + 0.105, 0.10, 0.070), 0.05) * (1.0 - p["moustache"])
    tone = _hair_tone(p, mx * 1.6, my + 0.15, light * 0.6)
    stubble = _soft(line - 0.02 - y, 0.10) * (1.0 - 0.9 * bare) * upper
    face = _tint(face, (0.62, 0.58, 0.58), stubble * p["stubble"] * 0.55)
    return _over(face, _scale(tone, 0.86), cheek * (1.0 - bare) * upper * p["beard"] * 0.97)


def _moustache(face: Colour, p: _Parameters, x: Tensor, y: Tensor) -> Colour:
    mx = x - 0.04 * p["yaw"]
    my = y - p["mouth_y"] + 0.048 + 0.30 * p["mouth_open"]
    droop = 0.20 * (mx.abs() - 0.05).clamp(min=0.0)
    shape = _ellipse(mx.abs() - 0.062, my - droop, 0.085, 0.028)
    tone = _hair_tone(p, mx * 1.5 + my, my + 0.2, 0 * mx)
    return _over(face, _scale(tone, 0.80), _soft(shape, 0.014) * p["moustache"])


def _glasses(image: Colour, p: _Parameters, x: Tensor, y: Tensor) -> Colour:
    ex, ey = x.abs() - p["eye_gap"], y - p["eye_y"] - 0.005
    rx, ry = p["eye"] * 1.42, p["eye_height"] * 1.15 + 0.035
    lens = torch.where(
        p["square"] > 0.5, _box(ex, ey, rx, ry * 0.86, 0.04), _ellipse(ex, ey, rx, ry)
    )
    frame = lens.abs() - 0.012
    arched = ey + 0.012 - 0.02 * (1.0 - (x / 0.08).square()).clamp(min=0.0)
    bridge = torch.maximum(arched.abs() - 0.011, x.abs() - (p["eye_gap"] - rx * 0.96))
    arm = torch.maximum(
        (ey + 0.02).abs() - 0.012, torch.maximum(rx - ex, x.abs() - p["face_width"])
    )
    streak = _soft((torch.remainder((x + 1.2 * y) * 3.3, 1.0) - 0.5).abs() - 0.10, 0.06)
    image = _lighten(image, _cover(lens) * (0.06 + 0.10 * streak) * p["glasses"])
    wire = torch.minimum(torch.minimum(frame, bridge), arm)
    image = _over(image, p.colour("glasses"), _cover(wire) * p["glasses"] * 0.97)
    return _lighten(image, _cover(wire + 0.005) * _bump(ey + ry * 0.8, 0.03) * 0.25 * p["glasses"])


def _front_hair(image: Colour, p: _Parameters, x: Tensor, y: Tensor, head: Tensor) -> Colour:
    face_width, face_height, seed = p["face_width"], p["face_height"], p["seed"]
    hx = x - 0.04 * p["yaw"]
    part_x = p["part_x"]
    volume = 0.055 - 0.045 * p["buzz"] + 0.05 * p["afro"]
    fuzz = (p["curl"] + p["afro"]) * (
        0.012 * torch.sin(hx * 46.0 + seed) + 0.008 * torch.sin(y * 55.0 + seed)
    )
    skull = _ellipse(hx, y + 0.15, face_width + volume, face_height * 0.86 + volume * 0.8) + fuzz
    jag = 0.030 * torch.sin(hx * 21.0 + seed) + 0.016 * torch.sin(hx * 47.0 + 2.0 * seed)
    offset = hx - part_x
    lines = (
        -0.33 + 0.55 * offset.square() + 0.6 * jag,  # short, off the forehead
        -0.255 + 0.20 * hx.square() - 0.7 * jag.abs(),  # straight bangs
        -0.46 + 1.35 * hx.square() + 0.2 * jag,  # swept back
        -0.42 + torch.where(offset > 0, 0.75, 1.35) * offset.abs() + 0.5 * jag,  # parted
        -0.30 + 0.32 * (hx + 0.35) * torch.where(part_x > 0, 1.0, -1.0) + 0.7 * jag,  # swept aside
    )
    line = torch.zeros_like(hx)
    for index, shape in enumerate(lines):
        line = line + shape * p[f"fringe{index}"]
    line = torch.where(p["buzz"] + p["bun"] > 0.5, -0.40 + 0.95 * hx.square(), line)
    line = torch.where(p["afro"] > 0.5, -0.36 + 0.55 * hx.square() + 0.5 * jag, line)
    line = torch.minimum(
        line, p["brow_y"] * 0.0 - 0.18 + 0.0 * hx + 0.9 * (hx.abs() - 0.28).clamp(min=0.0)
    )
    falls = p["bob"] + p["long"]
    side_end = 0.02 + falls * 0.34 + 0.05 * p["afro"]
    taper = ((y + 0.30) * 2.6).clamp(0.0, 1.0) * (1.0 - falls)
    side_width = face_width * (0.84 + 0.13 * taper) + 0.10 * (y - 0.05).clamp(0.0, 1.0)
    sides = torch.maximum(side_width - hx.abs(), y - side_end)
    distance = torch.maximum(skull, torch.minimum(y - line, sides))
    show = p["human"] * (1.0 - p["bald"])
    cast = _soft(distance - 0.045, 0.07) * (1.0 - _cover(distance)) * _cover(head)
    image = _tint(image, (0.62, 0.50, 0.50), cast * 0.42 * show)
    crown_x, crown_y = offset * 0.9, y + face_height + 0.12
    angle = torch.atan2(crown_x, crown_y.clamp(min=0.02))
    along = torch.sqrt(crown_x.square() * 0.6 + crown_y.square() + 1e-6)
    light = (0.6 * p["light_x"] * hx - 0.8 * (y + 0.35)).clamp(-0.6, 0.8)
    strand = torch.where(p["afro"] > 0.5, hx * 1.2, angle * 0.85)
    tone = _hair_tone(p, strand, along, light)
    edge = _soft(distance.abs() - 0.004, 0.03) * 0.22
    tone = _tint(tone, (0.55, 0.5, 0.5), edge)
    thin = 1.0 - 0.30 * p["buzz"]
    return _over(image, tone, _cover(distance) * show * thin)


def _headwear(image: Colour, p: _Parameters, x: Tensor, y: Tensor) -> Colour:
    face_width, face_height, hat = p["face_width"], p["face_height"], p.colour("hat")
    hx = x - 0.03 * p["yaw"]
    bend = 0.16 * hx.square()
    dome = _ellipse(hx, y + 0.20, face_width + 0.085, face_height * 0.86 + 0.03)
    light = 0.86 + 0.22 * (p["light_x"] * hx - 0.5 * (y + 0.45)).clamp(-0.5, 0.8)
    knit = 1.0 + 0.05 * torch.sin(hx * 90.0) * (1.0 - p["flat"])
    crown = torch.maximum(dome, y + 0.33 - bend)
    brim = _ellipse(hx - 0.05 * p["yaw"], y + 0.31 - 0.7 * bend, face_width * 0.98, 0.075)
    cap = _scale(hat, light)
    seam = _cover((hx.abs() - 0.16 * (1 + y)).abs() - 0.004) * 0.3
    image = _over(image, _tint(cap, (0.6, 0.6, 0.6), seam), _cover(crown) * p["hat_cap"])
    image = _tint(image, (0.6, 0.5, 0.5), _soft(brim - 0.03, 0.08) * 0.4 * p["hat_cap"])
    image = _over(image, _scale(hat, 0.78 + 0.1 * light), _cover(brim) * p["hat_cap"])
    cuff = torch.maximum(dome - 0.015, (y + 0.36 - bend).abs() - 0.075)
    image = _over(image, _scale(hat, light * knit), _cover(crown) * p["hat_beanie"])
    pompom = _ellipse(hx, y + face_height + 0.17, 0.10, 0.095) + 0.008 * torch.sin(hx * 80.0)
    accent = p.colour("accent")
    image = _over(image, _scale(accent, light), _cover(pompom) * p["hat_beanie"])
    ribs = 0.93 + 0.09 * torch.sin(hx * 75.0)
    image = _over(image, _scale(accent, 0.9 * ribs * light), _cover(cuff) * p["hat_beanie"])
    band = torch.maximum(dome + 0.01, (y + 0.40 - 1.6 * bend).abs() - 0.042)
    image = _over(image, _scale(hat, light), _cover(band) * p["headband"])
    bx, by = hx - 0.24, y + face_height * 0.88
    turned = bx * 0.92 + by * 0.38
    up = by * 0.92 - bx * 0.38
    loop = torch.maximum(
        _ellipse(turned.abs() - 0.075, up, 0.085, 0.075), up.abs() - 0.012 - 0.62 * turned.abs()
    )
    knot = _ellipse(turned, up, 0.030, 0.035)
    image = _over(image, _scale(hat, 0.95 - 0.25 * _bump(up, 0.015)), _cover(loop) * p["bow"])
    return _over(image, _scale(hat, 0.75 + 0 * hx), _cover(knot) * p["bow"])


Planes = tuple[Tensor, ...]
"""Planes of all pixels, each (n, HEIGHT, WIDTH): the picture's colours first, then what later
layers need."""


def _head_coordinates(p: _Parameters, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates that move, turn and grow with the head; it turns about its chin."""
    dx, dy = (x - p["head_x"]) / p["scale"], (y - p["head_y"] - 0.55) / p["scale"]
    return dx * p["cos"] + dy * p["sin"], dy * p["cos"] - dx * p["sin"] + 0.55


def _face_coordinates(p: _Parameters, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Head coordinates with the parallax of a face in front of the axis the head turns about."""
    hx, hy = _head_coordinates(p, x, y)
    return hx - 0.10 * p["yaw"], hy - 0.06 * p["pitch"]


def _layer_background(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    """Nothing -> picture."""
    return tuple(_background(_Parameters(table), x, y))


def _layer_back_hair(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    """Picture -> picture."""
    p = _Parameters(table)
    return tuple(_back_hair(list(planes), p, *_head_coordinates(p, x, y)))


def _layer_body(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    """Picture -> picture, body distance."""
    image, body = _body(list(planes), _Parameters(table), x, y)
    return (*image, body)


def _layer_ears(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    """Picture, body -> the same."""
    p = _Parameters(table)
    return (*_ears(list(planes[:3]), p, *_head_coordinates(p, x, y)), planes[3])


def _layer_skin(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    """Picture, body -> picture with the head's shadow, face colours, head, shade, light."""
    p = _Parameters(table)
    x, y = _head_coordinates(p, x, y)
    skin, lx, ly, yaw, pitch = p.colour("skin"), p["light_x"], p["light_y"], p["yaw"], p["pitch"]
    face_height = p["face_height"]
    head, half = _head_distance(p, x, y)
    hu, hv = x / half, y / face_height
    depth = torch.sqrt((1.0 - 0.85 * (hu.square() + hv.square())).clamp(min=0.03))
    lambert = (0.50 * lx * (hu + 0.2 * yaw) + 0.50 * ly * (hv + 0.2 * pitch) + 0.78 * depth).clamp(
        0.0, 1.3
    )
    smooth_shade = 0.64 + 0.42 * lambert
    step = _soft(0.56 - lambert, 0.05)
    cel = 0.86 + 0.15 * step
    shade = smooth_shade + (cel - smooth_shade) * p["flat"]
    rim = (hu.square() + hv.square() - 0.62).clamp(0.0, 1.0) * (1.0 - p["flat"])
    face = [s * shade * (1.0 - k * rim) for s, k in zip(skin, (0.10, 0.24, 0.22), strict=True)]
    lift = _bump(x - 0.20 * lx, 0.20) * _bump(y + 0.30, 0.13)
    face = _lighten(face, lift * (0.09 + 0.12 * p["clay"] + 0.22 * p["robot"]) * (1.0 - p["flat"]))
    cheek_shine = _bump(x.abs() - 0.24, 0.07) * _bump(y - 0.10, 0.06)
    face = _lighten(face, cheek_shine * (0.05 + 0.10 * p["clay"]) * (1.0 - p["flat"]))
    prints = (
        0.018 * torch.sin(x * 37.0 + 3.0 * torch.sin(y * 11.0)) * torch.sin(y * 31.0 + p["seed"])
    )
    face = [f * (1.0 + prints * p["clay"]) for f in face]
    fluff = (
        0.018 * torch.sin(hu * 60.0 + 4.0 * torch.sin(y * 23.0)) * torch.sin(y * 47.0 + 9.0 * hu)
    )
    face = [f * (1.0 + fluff * p["animal"] * (1.0 - p["flat"])) for f in face]

    drop = torch.exp(-(head.clamp(min=0.0) / 0.10).square()) * _cover(planes[3])
    image = _tint(list(planes[:3]), (0.52, 0.46, 0.50), drop * 0.42)
    return (*image, *face, head, shade, (lambert - 0.6) * 0.6)


def _markings(face: Colour, p: _Parameters, fx: Tensor, fy: Tensor, shade: Tensor) -> Colour:
    """Markings of animals (muzzle, cheeks, eye patch, stripes), blush, freckles and folds."""
    yaw, face_height = p["yaw"], p["face_height"]
    muzzle_y = (p["nose_y"] + p["mouth_y"]) / 2 + 0.02
    mz_height = 0.150 + 0.5 * p["jaw_drop"]
    muzzle = _ellipse(fx - 0.03 * yaw, fy - muzzle_y, 0.225, mz_height)
    cheeks = 0.25 - 0.45 * fx.abs() - fy
    white_area = torch.maximum(_soft(muzzle, 0.05), _soft(cheeks, 0.08) * p["fox"])
    muzzle_tone = [m * (0.50 + 0.50 * shade) for m in p.colour("muzzle")]
    patch = _ellipse(fx - p["eye_gap"], fy - p["eye_y"], 0.16, 0.19)
    face = _tint(face, (0.60, 0.55, 0.52), _soft(patch, 0.05) * p["patch"])
    tabby = _soft((torch.remainder(fx * 7.0, 1.0) - 0.5).abs() - 0.20, 0.12) * _soft(
        fy + 0.28, 0.06
    )
    tabby = tabby * _soft(fx.abs() - 0.20, 0.05)
    face = _tint(face, (0.58, 0.52, 0.50), tabby * p["tabby"])
    face = _over(face, muzzle_tone, white_area * p["animal"] * 0.92)
    faceplate = _box(fx, fy - 0.06, p["face_width"] * 0.84, face_height * 0.66, 0.12)
    face = _lighten(face, _soft(faceplate, 0.02) * 0.16 * p["robot"])
    face = _tint(face, (0.55, 0.55, 0.6), _cover(faceplate.abs() - 0.004) * 0.5 * p["robot"])

    glow = _bump(fx.abs() - p["eye_gap"] * 1.22, 0.10) * _bump(fy - p["eye_y"] - 0.17, 0.065)
    face = _over(
        face,
        [0.97 * f * 0.55 + 0.43 for f in face[:1]] + [f * 0.62 + 0.10 for f in face[1:]],
        glow * p["blush"],
    )
    spots = (
        torch.sin(fx * 83.0 + 2.0 * torch.sin(fy * 31.0)) * torch.sin(fy * 89.0 + fx * 23.0) - 0.62
    )
    area = _bump(fx.abs() - 0.17, 0.12) * _bump(fy - p["eye_y"] - 0.15, 0.06)
    face = _tint(
        face, (0.74, 0.58, 0.46), (spots * 5.0).clamp(0.0, 1.0) * area * p["freckles"] * 0.7
    )
    # folds of age from the nose to the mouth, and on the forehead
    fold_x = fx.abs() - 0.095 - 0.42 * (fy - p["nose_y"])
    fold = _bump(fold_x, 0.009) * _soft((fy - p["nose_y"] - 0.06).abs() - 0.05, 0.05)
    lines = _bump(torch.remainder(fy + 0.36, 0.055) - 0.027, 0.006) * _soft(
        (fy + 0.32).abs() - 0.07, 0.03
    )
    lines = lines * _soft(fx.abs() - 0.20, 0.12)
    face = _tint(face, (0.70, 0.56, 0.52), (fold * 0.6 + lines * 0.4) * p["old"])
    return face


def _layer_markings(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    """Picture, face, head, shade, light -> the same, like the layers that follow."""
    p = _Parameters(table)
    face = _markings(list(planes[3:6]), p, *_face_coordinates(p, x, y), planes[7])
    return (*planes[:3], *face, *planes[6:])


def _layer_beard_and_nose(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    p = _Parameters(table)
    fx, fy = _face_coordinates(p, x, y)
    face = _beard(list(planes[3:6]), p, fx, fy, planes[8])
    return (*planes[:3], *_nose(face, p, fx, fy), *planes[6:])


def _layer_mouth(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    p = _Parameters(table)
    fx, fy = _face_coordinates(p, x, y)
    face = _mouth(list(planes[3:6]), p, fx, fy, planes[7])
    return (*planes[:3], *_moustache(face, p, fx, fy), *planes[6:])


def _layer_eyes(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    p = _Parameters(table)
    face = _eyes(list(planes[3:6]), p, *_face_coordinates(p, x, y), planes[7])
    return (*planes[:3], *face, *planes[6:])


def _layer_face(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    """Picture, face, head, shade, light -> picture with the face in it, head."""
    p = _Parameters(table)
    fx, fy = _face_coordinates(p, x, y)
    head = planes[6]
    face = _brows(list(planes[3:6]), p, fx, fy)
    whisk_y = (fy - p["mouth_y"] + 0.05).abs() - 0.02 - 0.10 * (fx.abs() - 0.2)
    whiskers = torch.maximum(whisk_y.abs() - 0.003, (fx.abs() - 0.32).abs() - 0.12)
    face = _lighten(face, _cover(whiskers) * 0.6 * (p["cat"] + p["rabbit"]))
    outline = _soft(head.abs() - 0.008, 0.012)
    face = _tint(face, (0.42, 0.34, 0.34), outline * (0.10 + 0.55 * p["flat"]))
    return (*_over(list(planes[:3]), face, _cover(head)), head)


def _layer_front_hair(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    """Picture, head -> picture."""
    p = _Parameters(table)
    return tuple(_front_hair(list(planes[:3]), p, *_head_coordinates(p, x, y), planes[3]))


def _layer_accessories(planes: Planes, table: Tensor, x: Tensor, y: Tensor) -> Planes:
    """Picture -> finished picture in [0, 1]."""
    p = _Parameters(table)
    hx, hy = _head_coordinates(p, x, y)
    image = _glasses(list(planes), p, hx - 0.105 * p["yaw"], hy - 0.06 * p["pitch"])
    image = _headwear(image, p, hx, hy)
    tuft_x, tuft_y = hx - 0.04 * p["yaw"], hy + p["face_height"] * 0.90
    tuft = _ellipse(tuft_x, tuft_y, 0.13, 0.14) + 0.03 * torch.sin(hx * 46.0)
    tuft = torch.maximum(tuft, -hy - p["face_height"] * 1.14)
    fluffy = p["animal"] * (p["fringe0"] + p["fringe1"]) * (1.0 - p["bow"])
    image = _over(image, _scale(p.colour("skin"), 0.93 + 0 * hx), _cover(tuft) * fluffy)
    vignette = 1.0 - 0.07 * (x * x / 2.25 + y * y)
    return tuple((channel * vignette).clamp(0.0, 1.0) for channel in image)


Layer = Callable[[Planes, Tensor, Tensor, Tensor], Planes]
LAYERS: Final[tuple[Layer, ...]] = (
    _layer_background,
    _layer_back_hair,
    _layer_body,
    _layer_ears,
    _layer_skin,
    _layer_markings,
    _layer_beard_and_nose,
    _layer_mouth,
    _layer_eyes,
    _layer_face,
    _layer_front_hair,
    _layer_accessories,
)
"""Painted in this order.  Each is compiled on its own: the compiler's time grows faster than the
number of operations, while passing a few planes through memory costs little."""


def pixel_grid(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Picture coordinates of the pixel centres: x (1, 1, WIDTH) and y (1, HEIGHT, 1)."""
    x = ((torch.arange(WIDTH, device=device) + 0.5) / PIXELS_PER_UNIT - 1.5).view(1, 1, WIDTH)
    y = ((torch.arange(HEIGHT, device=device) + 0.5) / PIXELS_PER_UNIT - 1.0).view(1, HEIGHT, 1)
    return x, y


class Renderer:
    """Draws pictures in fixed batches, compiled on request."""

    def __init__(self, device: torch.device | str, batch: int = 256, compiled: bool = True) -> None:
        self._device = torch.device(device)
        self._batch = batch
        self._x, self._y = pixel_grid(self._device)
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32

        self._layers: list[Layer] = list(LAYERS)
        if compiled:
            self._layers = [torch.compile(layer, fullgraph=True, dynamic=False) for layer in LAYERS]

    def _draw(self, attributes: Tensor, controls: Tensor) -> Tensor:
        table = torch.stack(list(prepared(attributes, controls).values()), dim=1)
        planes: Planes = ()
        for layer in self._layers:
            planes = layer(planes, table, self._x, self._y)
        return torch.stack(planes, dim=1).to(self._dtype)

    @torch.no_grad()
    def __call__(self, attributes: Tensor, controls: Tensor) -> Tensor:
        """Pictures (n, 3, HEIGHT, WIDTH) in [0, 1]: bfloat16 on CUDA, float32 on the CPU.

        ``attributes`` (n, NUM_ATTRIBUTES) and ``controls`` (n, NUM_CONTROLS); any n, the last
        batch is padded so that compiled shapes never change.
        """
        attributes, controls = attributes.float(), controls.float()
        n = len(attributes)
        pieces = []
        for first in range(0, n, self._batch):
            a, c = attributes[first : first + self._batch], controls[first : first + self._batch]
            short = self._batch - len(a)
            if short and n > 0:
                a = torch.cat([a, a[:1].expand(short, -1)])
                c = torch.cat([c, c[:1].expand(short, -1)])
            with torch.autocast(self._device.type, enabled=False):
                pieces.append(self._draw(a, c)[: self._batch - short])
        return torch.cat(pieces)


def _to_pixels(p: dict[str, Tensor], fx: Tensor, fy: Tensor) -> Tensor:
    """Pixel positions (n, 2) as (x, y) of points given in the face's coordinates."""
    x, y = fx + 0.10 * p["yaw"], fy + 0.06 * p["pitch"] - 0.55
    px = (x * p["cos"] - y * p["sin"]) * p["scale"] + p["head_x"]
    py = (x * p["sin"] + y * p["cos"]) * p["scale"] + p["head_y"] + 0.55
    return torch.stack([(px + 1.5) * PIXELS_PER_UNIT, (py + 1.0) * PIXELS_PER_UNIT], dim=1)


def mouth_box(attributes: Tensor, controls: Tensor) -> tuple[Tensor, Tensor]:
    """Mouth centre in pixels (n, 2) as (x, y), and the head's scale (n,).

    The centre is that of the open mouth's range and does not move with the mouth controls.  At
    scale 1 the mouth with lips stays within 34 pixels sideways and 24 up or down of it.
    """
    still = controls.clone()
    still[:, len(IDLE_NAMES) :] = 0.0
    p = prepared(attributes, still)
    return _to_pixels(p, 0.035 * p["yaw"], p["mouth_y"] + 0.03), p["scale"]


def eye_box(attributes: Tensor, controls: Tensor) -> tuple[Tensor, Tensor]:
    """The point midway between the eyes in pixels (n, 2) as (x, y), and the head's scale (n,).

    At scale 1 both eyes and brows stay within 52 pixels sideways and 26 up or down of it.
    """
    p = prepared(attributes, controls)
    return _to_pixels(p, torch.zeros_like(p["yaw"]), p["eye_y"] - 0.03), p["scale"]


def region_masks(attributes: Tensor, controls: Tensor) -> tuple[Tensor, Tensor]:
    """Float masks (n, 1, HEIGHT, WIDTH) of the mouth's and of the eyes' rectangles."""
    device = attributes.device
    px = (torch.arange(WIDTH, device=device) + 0.5).view(1, 1, 1, WIDTH)
    py = (torch.arange(HEIGHT, device=device) + 0.5).view(1, 1, HEIGHT, 1)
    masks = []
    for box, half_x, half_y in ((mouth_box, 34.0, 24.0), (eye_box, 52.0, 26.0)):
        centre, scale = box(attributes, controls)
        cx, cy, size = (v.view(-1, 1, 1, 1) for v in (centre[:, 0], centre[:, 1], scale))
        masks.append(
            (((px - cx).abs() < half_x * size) & ((py - cy).abs() < half_y * size)).float()
        )
    return masks[0], masks[1]
