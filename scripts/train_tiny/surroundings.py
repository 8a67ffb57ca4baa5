"""Around the face: body and clothes, ears and horns, hair, hats and glasses.

In: parameters (`attributes.py`) and the planes painted so far.  Out: the planes that change:
``image``, and the body's signed distance.  Coordinates are those of `scene.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scripts.train_tiny.features import hair_tone
from scripts.train_tiny.shapes import (
    Colour,
    Parameters,
    Planes,
    box,
    bump,
    colour,
    constant,
    ellipse,
    join,
    lighten,
    over,
    painted,
    scale,
    soft,
    tint,
)

# Body and clothes


def body(p: Parameters, planes: Planes) -> Planes:
    """Shoulders, arms, neck and clothes; also the body's distance."""
    wide, flesh, cloth, accent = (
        p["shoulders"],
        p.colour("skin"),
        p.colour("cloth"),
        p.colour("accent"),
    )
    x = planes["x"] - p["body_x"]
    # Broad shoulders do not make a wide collar.
    x = torch.sign(x) * (x.abs().clamp(max=0.3) + (x.abs() - 0.3).clamp(min=0.0) / wide)
    y = planes["y"] + 0.05 - p["body_y"] - p["body_tilt"] * x
    ax, real = x.abs(), p["real"]
    shoulders = ellipse(x, y - 1.24, 0.80, 0.42)
    torso = join(shoulders, ellipse(x, y - 1.05, 0.36, 0.24), 0.16)
    torso = torch.minimum(torso, box(x, y - 2.30, 0.54 + 0.05 * (y - 1.3).clamp(min=0), 1.1, 0.15))
    arms = box(ax - 0.66 - 0.05 * (y - 1.2), y - 2.15, 0.145, 0.95, 0.14)
    torso = torch.minimum(torso, arms)
    hood = ellipse(x, y - 0.80, 0.44, 0.20)
    neck_x = planes["x"] - 0.6 * p["body_x"] - 0.4 * p["lean_x"]
    throat = box(neck_x, y - 0.55, p["neck"] + 0.10 * (y - 0.62).clamp(min=0), 0.34, 0.04)
    neck = join(throat, ellipse(x, y - 0.86, 0.24, 0.075), 0.10)
    side = p["light_x"] * x
    fold = 0.80 + 0.14 * (1.0 - ax) + 0.16 * side - 0.08 * (y - 0.9) - 0.12 * p["light_y"]
    crease = (
        torch.sin(ax * 14.0 - y * 10.0) + torch.sin(x * 9.0 + y * 17.0 + p["cloth_seed"]) * real
    )
    gathered = torch.sin(ax * 31.0 - y * 23.0 + 3.0 * torch.sin(y * 6.0 + p["cloth_seed"]))
    weave = torch.sin(x * 260.0) * torch.sin(y * 260.0) * real
    fold = fold + (0.03 * crease + 0.020 * gathered * real + 0.015 * weave) * (1.0 - p["flat"])
    fold = fold * (p["key.1"] + p["fill.1"])
    edge = soft(torso.abs() - 0.01, 0.09) * (0.16 + 0.10 * real)
    under_arm = soft((ax - 0.515 - 0.05 * (y - 1.3)).abs() - 0.006, 0.05) * soft(1.42 - y, 0.2)
    image = over(colour(planes, "image"), scale(cloth, fold * 0.72), p.cover(hood) * p["hoodie"])
    dress = scale(cloth, fold)
    stripe = soft((torch.remainder(y * 7.0 - 0.8 * ax * ax, 1.0) - 0.5).abs() - 0.24, 0.09)
    dress = over(dress, scale(accent, fold), stripe * p["stripes"])
    ribs = torch.sin(x * 70.0) * (0.7 + 0.3 * torch.sin(y * 90.0 + 2.0 * torch.sin(x * 70.0)))
    dress = scale(dress, 1.0 + 0.06 * ribs * p["knit"])
    spot_x, spot_y = torch.remainder(x * 9.0, 1.0) - 0.5, torch.remainder(y * 9.0, 1.0) - 0.5
    spots = soft(spot_x.square() + spot_y.square() - 0.05, 0.05)
    dress = over(dress, scale(accent, fold), spots * p["dotted"])
    # A blazer opens in a V on a lighter shirt, with a tie.
    v_line = ax * 1.25 + (y - 1.12) * 0.9
    opening = p.cover(v_line - 0.02)
    dress = over(dress, [0.93 * fold, 0.93 * fold, 0.95 * fold], opening * p["blazer"])
    tie = p.cover(torch.maximum(ax - 0.035 - 0.05 * (y - 0.84), 0.84 - y)) * opening
    dress = over(dress, scale(accent, 0.85 * fold), tie * p["blazer"])
    lapel = soft((v_line - 0.08).abs() - 0.05, 0.03)
    dress = tint(dress, (0.78, 0.78, 0.80), lapel * p["blazer"] * (1.0 - opening))
    button = ellipse(x, torch.remainder(y, 0.11) - 0.055, 0.014, 0.014)
    placket = p.line(ax - 0.034, 0.003) * 0.3
    dress = tint(dress, (0.6, 0.6, 0.62), placket * p["shirt"])
    dress = over(dress, accent, p.cover(button) * p.cover(0.90 - y) * p["shirt"])
    strings = p.cover(torch.maximum((ax - 0.10 + 0.02 * y).abs() - 0.009, y - 1.05))
    dress = over(dress, lighten(accent, 0.4 + 0 * x), strings * p["hoodie"])
    dress = tint(dress, (0.55, 0.5, 0.6), torch.maximum(edge, under_arm * 0.3))
    image = over(image, dress, p.cover(torso))
    # The neckline, then the neck, so that only its front half shows.
    band = p.cover(ellipse(x, y - 0.845, 0.25, 0.10) - 0.035) * p["trimmed"]
    image = over(
        image,
        scale(over(cloth, accent, 1.0 - p["knit"]), 0.92 * fold),
        band * p.cover(torso - 0.04),
    )
    rolled = p.cover(ellipse(x, y - 0.85, 0.30, 0.13))
    image = over(image, scale(cloth, 0.85 * fold), rolled * p["hoodie"])
    tone = 0.70 + 0.22 * ((y - 0.62) * 4.0).clamp(0.0, 1.0)
    tone = tone + (0.08 + 0.14 * real) * p["light_x"] * x - 0.9 * real * neck_x.square()
    muscle = bump(neck_x.abs() - 0.09 + 0.22 * (y - 0.62), 0.025) * real * p["human"]
    tone = (tone + 0.05 * muscle) * (p["key.1"] + p["fill.1"])
    shirt_v = torch.maximum(ax * 1.5 + (y - 1.04), 0.82 - y) * 0.6
    bare = torch.where(p["shirt"] > 0.5, join(neck, shirt_v, 0.03), neck)
    low = ellipse(x, y - 0.82, 0.30 + 0.25 * p["neckline"], p["neckline"])
    bare = torch.where(p["neckline"] > 0.0, join(neck, torch.maximum(low, torso), 0.05), bare)
    chest = scale(flesh, tone)
    bone = bump(y - 0.905 + 0.16 * ax, 0.014) * soft((ax - 0.17).abs() - 0.10, 0.08)
    chest = tint(chest, (0.78, 0.62, 0.58), bone * 0.35 * p["human"])
    hem = torch.maximum(bare, y - 1.0 - 0.8 * p["neckline"])
    image = over(image, chest, p.cover(hem))
    image = tint(image, (0.55, 0.5, 0.55), soft(hem.abs() - 0.004, 0.014) * 0.35 * p["dress"])
    joints = p.cover((torch.remainder(y * 14.0, 1.0) - 0.5).abs() * 0.07 - 0.012)
    image = tint(image, (0.5, 0.5, 0.55), joints * p.cover(neck) * p["robot"])
    collar = (ax - 0.155 + 0.55 * (y - 0.86)).abs() - 0.055
    collar = torch.maximum(torch.maximum(collar, (y - 0.885).abs() - 0.095), 0.03 - ax)
    linen = over(lighten(cloth, 0.25 + 0 * x), constant(x, 0.95, 0.95, 0.97), p["blazer"])
    image = over(image, scale(linen, fold), p.cover(collar) * p["collared"])
    image = tint(image, (0.55, 0.55, 0.6), p.line(collar, 0.004) * 0.4 * p["collared"])
    return {**painted("image", image), "body": torch.minimum(torso, neck)}


# Behind the head


def back_hair(p: Parameters, planes: Planes) -> Planes:
    width, height, volume = p["face_width"], p["face_height"], p["hair_volume"]
    x, y, end = planes["hx"] + 0.06 * p["turn_sin"], planes["hy"], p["hair_end"]
    curls = p["curl"] * 0.022 * torch.sin(y * 24.0 + p["seed"]) * torch.sign(x)
    waves = 0.020 * torch.sin(y * 9.0 + p["seed"]) * torch.sign(x) * p["long"]
    distance = ellipse(x, y + 0.12, width + 0.02 + 0.5 * volume, height * 0.88 + volume * 0.4)
    spread = width + 0.03 + volume + 0.05 * y.clamp(0, 1) * p["long"]
    hanging = join(
        ellipse(x, y + 0.10, width + 0.05 + volume, height * 0.94 + volume * 0.5),
        box(x + waves + curls, y - (end - 0.30) / 2, spread, (end + 0.30) / 2, 0.12),
        0.08,
    )
    distance = torch.where(p["falls"] > 0.5, hanging, distance)
    angle = torch.atan2(x, -(y + 0.16) + 1e-4)
    fuzz = 0.030 * (0.6 - torch.sin(angle * 9.0 + p["seed"]).abs()) + 0.006 * torch.sin(
        angle * 47.0
    )
    afro = ellipse(x, y + 0.20, width + 0.10 + 1.4 * volume, height * 0.86 + 1.5 * volume) + fuzz
    distance = torch.where(p["afro"] > 0.5, afro, distance)
    bun = ellipse(x - p["part_x"] * 0.4, y + height + 0.14, 0.17, 0.14)
    buns = ellipse(x.abs() - 0.33, y + height * 0.92, 0.16, 0.15)
    tail = join(
        ellipse(x - width * 0.95, y + 0.30, 0.15, 0.14),
        ellipse(x - width - 0.10 - curls, y - 0.12, 0.12 + 0.5 * volume, 0.42),
        0.08,
    )
    distance = torch.where(p["top_bun"] > 0.5, torch.minimum(distance, bun), distance)
    distance = torch.where(p["two_buns"] > 0.5, torch.minimum(distance, buns), distance)
    distance = torch.where(p["tail"] > 0.5, torch.minimum(distance, tail), distance)
    radius = torch.sqrt(x.square() + (y + 0.2).square() + 1e-6)
    light = 0.6 * p["light_x"] * x - 0.35
    tone = hair_tone(p, x * 1.2, radius * 0.8 - 0.1, light)
    tone = scale(tone, 0.80 - 0.14 * soft(distance + 0.05, 0.10))
    return painted("image", over(colour(planes, "image"), tone, p.cover(distance)))


def human_ears(p: Parameters, planes: Planes) -> Planes:
    width, size, flesh = p["face_width"], p["ear_size"], p.colour("skin")
    x = planes["hx"] + 0.13 * p["turn_sin"] * width
    y = planes["hy"] - 0.03 + 0.04 * p["nod_sin"]
    ax = x.abs() - width * 0.99
    outer = ellipse(ax, y + 0.12 * ax, 0.070 * size, 0.115 * size)
    point = torch.maximum(
        (y + 0.02 + 0.55 * ax).abs() - 0.085 * size + 0.33 * ax.clamp(min=0),
        (ax - 0.11).abs() - 0.13,
    )
    outer = torch.where(p["ear_point"] > 0.5, join(outer, point * 0.8, 0.03), outer)
    inner = ellipse(ax - 0.008, y, 0.036 * size, 0.070 * size)
    light = 0.86 + 0.22 * p["light_x"] * torch.sign(x)
    tone = [f * light * k for f, k in zip(flesh, (1.0, 0.92, 0.90), strict=True)]
    image = over(colour(planes, "image"), tone, p.cover(outer))
    image = tint(image, (0.78, 0.60, 0.57), soft(inner, 0.03) * p.cover(outer))
    ridge = soft((inner - 0.004).abs() - 0.004, 0.014) * p["real"]
    image = tint(image, (0.72, 0.52, 0.48), ridge * p.cover(outer) * 0.6)
    jewel_y = y - 0.135 * size - 0.05 * (p["seed"] > 10.0)
    jewel = ellipse(ax - 0.01, jewel_y, 0.022, 0.022 + 0.03 * (p["seed"] > 10.0))
    gold = constant(x, 0.95, 0.80, 0.42)
    return painted("image", over(image, gold, p.cover(jewel) * p["earrings"]))


def _pointed_ear(x: Tensor, y: Tensor, size: Tensor, height: float) -> Tensor:
    """A triangular ear with slightly bulging sides, its base at y = 0.12."""
    top = y + height * size
    bulge = 0.10 * torch.sin((top / (height * size + 0.12)).clamp(0.0, 1.0) * math.pi) * size * 0.35
    outside = (x - 0.02) - 0.25 * top - bulge
    inside = -(x - 0.05) - 0.62 * top - bulge
    return torch.maximum(join(outside, inside, -0.05) * 0.86, y - 0.14)


def animal_ears(p: Parameters, planes: Planes) -> Planes:
    flesh, size, width, height = p.colour("skin"), p["ear_size"], p["face_width"], p["face_height"]
    image = colour(planes, "image")
    x = planes["hx"] + 0.05 * p["turn_sin"]
    ax, y = x.abs(), planes["hy"]
    mane = ellipse(x, y, width + 0.19, height + 0.19)
    mane = mane + 0.03 * torch.sin(torch.atan2(x, y + 1e-4) * 17.0 + p["seed"])
    shaggy = 0.70 + 0.14 * torch.sin(torch.atan2(x, y + 1e-4) * 43.0 + 6.0 * mane)
    image = over(
        image,
        [f * k * shaggy for f, k in zip(flesh, (0.75, 0.62, 0.5), strict=True)],
        p.cover(mane) * p["lion"],
    )
    ex, ey = ax - width * 0.68, y + height * 0.80
    big = size * (1.0 + 0.45 * p["mouse"] - 0.15 * p["lion"])
    round_outer = ellipse(ex - 0.03, ey, 0.165 * big, 0.165 * big)
    round_inner = ellipse(ex - 0.03, ey - 0.02, 0.100 * big, 0.100 * big)
    lean_x = ex + 0.10 + 0.18 * ey
    shapes = {
        "cat": (_pointed_ear(ex, ey, size, 0.27), _pointed_ear(ex, ey - 0.06, size * 0.66, 0.27)),
        "fox": (_pointed_ear(ex, ey, size, 0.36), _pointed_ear(ex, ey - 0.07, size * 0.64, 0.36)),
        "pig": (
            _pointed_ear(ex - 0.02, ey, size * 0.8, 0.25),
            _pointed_ear(ex - 0.02, ey - 0.05, size * 0.5, 0.25),
        ),
        "rabbit": (
            ellipse(lean_x, ey + 0.17, 0.098 * size, 0.33 * size),
            ellipse(lean_x, ey + 0.15, 0.052 * size, 0.25 * size),
        ),
    }
    outer, inner = round_outer, round_inner
    for name, (shape, hole) in shapes.items():
        outer = torch.where(p[name] > 0.5, shape, outer)
        inner = torch.where(p[name] > 0.5, hole, inner)
    hairy = 0.006 * torch.sin(ex * 90.0 + ey * 70.0) * (1.0 - p["flat"])
    shade = 0.88 - 0.12 * soft(outer.abs() - 0.01, 0.06) + 0.10 * p["light_x"] * torch.sign(x)
    shade = shade + 6.0 * hairy * p["real"]
    image = over(image, scale(flesh, shade), p.cover(outer + hairy) * p["upright"])
    dark_tip = soft(ey + 0.20 * size, 0.12) * p.cover(outer) * p["fox"]
    image = tint(image, (0.35, 0.30, 0.32), dark_tip)
    pink = [f * 0.45 + q for f, q in zip(flesh, (0.44, 0.29, 0.29), strict=True)]
    image = over(
        image, scale(pink, shade), soft(inner, 0.03) * p["upright"] * (1.0 - 0.55 * p["fox"])
    )
    hang = ax - width * 0.99 - 0.14 * (y + 0.10)
    floppy = ellipse(hang, y + 0.02, 0.115 * size, 0.31 * size)
    tone = scale(flesh, 0.66 + 0.10 * soft(floppy + 0.05, 0.1) + 3.0 * hairy)
    return painted("image", over(image, tone, p.cover(floppy + hairy) * p["dog"]))


def creature_parts(p: Parameters, planes: Planes) -> Planes:
    """A robot's bolts and antenna, an alien's stalks."""
    flesh, height = p.colour("skin"), p["face_height"]
    x, y = planes["hx"] + 0.05 * p["turn_sin"], planes["hy"]
    ax, image = x.abs(), colour(planes, "image")
    bolt = box(ax - p["face_width"] * 1.02, y, 0.06, 0.12, 0.03)
    image = over(image, scale(flesh, 0.72), p.cover(bolt) * p["robot"])
    rod = torch.maximum(ax - 0.014, (y + height + 0.05).abs() - 0.14)
    image = over(image, scale(flesh, 0.62), p.cover(rod) * p["robot"])
    lamp = ellipse(x, y + height + 0.18, 0.05, 0.05)
    glow = lighten(p.colour("iris"), 0.35 * soft(lamp + 0.03, 0.05))
    image = over(image, glow, p.cover(lamp) * p["robot"])
    lean = ax - 0.16 - 0.16 * (-y - height * 0.9)
    stalk = torch.maximum(lean.abs() - 0.018, (y + height).abs() - 0.22)
    tip = ellipse(ax - 0.215, y + height + 0.22, 0.052, 0.052)
    image = over(image, scale(flesh, 0.80), p.cover(torch.minimum(stalk, tip)) * p["stalks"])
    spark = soft(ellipse(ax - 0.20, y + height + 0.24, 0.02, 0.02), 0.02)
    return painted("image", lighten(image, spark * 0.5 * p["stalks"]))


def horns(p: Parameters, planes: Planes) -> Planes:
    """A pair, curved outwards, in front of the hair."""
    x, y = planes["hx"] + 0.02 * p["turn_sin"], planes["hy"]
    long = p["horn_length"]
    ax, up = x.abs() - p["face_width"] * 0.58, -(y + p["face_height"] * 0.74)
    bent = ax - 0.30 * up * up / long - 0.04
    thick = 0.065 * (1.0 - up / (0.32 * long))
    shape = torch.maximum(torch.maximum(bent.abs() - thick, -up - 0.03), up - 0.32 * long)
    rings = 0.80 + 0.14 * torch.sin(up * 90.0) - 0.9 * bent
    bone = [c * rings for c in (0.86, 0.78, 0.64)]
    bone = over(bone, scale(p.colour("hair"), rings), 0.5 + 0 * x)
    return painted("image", over(colour(planes, "image"), bone, p.cover(shape)))


# In front of the face


def front_hair(p: Parameters, planes: Planes) -> Planes:
    width, height, seed, volume = p["face_width"], p["face_height"], p["seed"], p["hair_volume"]
    x, y = planes["hx"] - 0.12 * p["turn_sin"], planes["hy"] - 0.10 * p["nod_sin"]
    silhouette = planes["hx"]
    part_x, image = p["part_x"], colour(planes, "image")
    fuzz = (p["curl"] + p["afro"]) * (
        0.012 * torch.sin(x * 46.0 + seed) + 0.008 * torch.sin(y * 55.0 + seed)
    )
    skull = ellipse(
        silhouette, planes["hy"] + 0.15, width + volume * 0.8, height * 0.86 + volume * 0.7
    )
    skull = skull + fuzz
    crest = torch.maximum(x.abs() - 0.11 - 0.02 * torch.sin(y * 40.0), skull - 0.16)
    jag = 0.030 * torch.sin(x * 21.0 + seed) + 0.016 * torch.sin(x * 47.0 + 2.0 * seed)
    offset = x - part_x
    lines = (
        -0.33 + 0.55 * offset.square() + 0.6 * jag,  # short, off the forehead
        -0.255 + 0.20 * x.square() - 0.7 * jag.abs(),  # straight bangs
        -0.46 + 1.35 * x.square() + 0.2 * jag,  # swept back
        -0.42 + torch.where(offset > 0, 0.75, 1.35) * offset.abs() + 0.5 * jag,  # parted
        -0.30 + 0.32 * (x + 0.35) * torch.where(part_x > 0, 1.0, -1.0) + 0.7 * jag,  # aside
    )
    line = torch.zeros_like(x)
    for index, shape in enumerate(lines):
        line = line + shape * p[f"fringe{index}"]
    back = -0.42 + 0.95 * x.square() - 0.5 * p["receding"] * bump(x.abs() - 0.17, 0.10)
    line = line + back * p["swept"]
    line = torch.where(p["afro"] > 0.5, -0.36 + 0.55 * x.square() + 0.5 * jag, line)
    line = line + p["line"]
    line = torch.minimum(line, -0.18 + 0.9 * (x.abs() - 0.28).clamp(min=0.0))
    falls = p["falls"]
    side_end = 0.02 + falls * 0.34 + 0.05 * p["afro"]
    taper = ((y + 0.30) * 2.6).clamp(0.0, 1.0) * (1.0 - falls)
    side_width = width * (0.84 + 0.13 * taper) + 0.10 * (y - 0.05).clamp(0.0, 1.0)
    sides = torch.maximum(side_width - x.abs(), y - side_end)
    distance = torch.maximum(skull, torch.minimum(y - line, sides))
    shaved = torch.maximum(skull + 0.02, torch.minimum(y - back, sides))
    distance = torch.where(
        p["mohawk"] > 0.5, torch.minimum(crest + (y > -0.30) * 1.0, shaved + 1.0), distance
    )
    cast = soft(distance - 0.045, 0.07) * (1.0 - p.cover(distance)) * p.cover(planes["head"])
    image = tint(image, (0.60, 0.46, 0.45), cast * (0.42 + 0.18 * p["real"]))
    crown_x, crown_y = offset * 0.9, y + height + 0.12
    angle = torch.atan2(crown_x, crown_y.clamp(min=0.02))
    along = torch.sqrt(crown_x.square() * 0.6 + crown_y.square() + 1e-6)
    light = (0.9 * p["light_x"] * silhouette - 0.8 * (y + 0.35)).clamp(-0.6, 0.8)
    strand = torch.where(p["afro"] > 0.5, x * 1.2, angle * 0.85)
    tone = hair_tone(p, strand, along, light)
    tone = tint(tone, (0.55, 0.5, 0.5), soft(distance.abs() - 0.004, 0.03) * 0.22)
    thin = 1.0 - 0.30 * p["buzz"] - 0.15 * p["receding"]
    ends = torch.sin(strand * 71.0 + seed) + torch.sin(strand * 113.0) + torch.sin(strand * 187.0)
    wispy = soft(distance + 0.002 * ends, 0.016)
    mask = p.cover(distance) + (wispy - p.cover(distance)) * p["real"]
    return painted("image", over(image, tone, mask * thin))


def locks(p: Parameters, planes: Planes) -> Planes:
    """Long hair that falls in front of the shoulders."""
    x, y, end = planes["hx"] + 0.03 * p["turn_sin"], planes["hy"], p["hair_end"]
    wave = (0.008 + 0.022 * p["curl"]) * torch.sin(y * (7.0 + 9.0 * p["curl"]) + p["seed"])
    wave = wave + 0.012 * torch.sin(y * 3.1 + 2.0 * p["seed"]) * torch.sign(x)
    half = 0.11 + 0.6 * p["hair_volume"] + 0.012 * torch.sin(y * 11.0 + x * 5.0)
    half = half * (0.15 + 0.85 * soft(-y, 0.6))
    ax = x.abs() - p["face_width"] * 1.0 - 0.5 * p["hair_volume"] + wave
    taper = 1.0 - 0.55 * ((y - 0.1) / end).clamp(0, 1).square()
    middle = (end - 0.34) * 0.5
    shape = box(ax, y - middle, half * taper, middle + 0.34, 0.06)
    light = 0.5 * p["light_x"] * torch.sign(x) - 2.0 * ax.square() - 0.05
    tone = hair_tone(p, ax * 1.5 + 0.3 * torch.sign(x), y * 0.7 + 0.15, light)
    return painted("image", over(colour(planes, "image"), tone, soft(shape, 0.016)))


def glasses(p: Parameters, planes: Planes) -> Planes:
    near = 0.05 * p["turn_sin"]
    x = planes["fx"] - near
    y = planes["fy"] - p["eye_y"] - 0.005 - 0.04 * p["nod_sin"]
    ex, image, rim = x.abs() - p["eye_gap"], colour(planes, "image"), p["rim"]
    drawn = p["eye_height"] * 1.15 + 0.035
    rx = p["eye"] * 1.42 * p["lens"]
    ry = (drawn + (0.105 - drawn) * p["real"] * p["human"]) * p["lens"]
    lens = ellipse(ex, y, rx, ry)
    lens = torch.where(p["square_rims"] > 0.5, box(ex, y, rx, ry * 0.86, 0.04), lens)
    round_half = 0.5 * (rx + ry)
    lens = torch.where(p["round_rims"] > 0.5, ellipse(ex, y, round_half, round_half), lens)
    lens = torch.where(p["half_rims"] > 0.5, box(ex, y, rx, ry * 0.8, 0.06), lens)
    frame = lens.abs() - rim * (1.0 - 0.8 * p["half_rims"] * soft(-y, 0.03))
    arched = y + 0.012 - 0.02 * (1.0 - (x / 0.08).square()).clamp(min=0.0)
    bridge = torch.maximum(arched.abs() - rim * 0.9, x.abs() - (p["eye_gap"] - rx * 0.96))
    arm = torch.maximum((y + 0.02).abs() - rim, torch.maximum(rx - ex, x.abs() - p["face_width"]))
    inside = p.cover(lens)
    image = tint(image, (0.12, 0.12, 0.14), inside * p["sunglasses"] * 0.9)
    streak = soft((torch.remainder((x + 1.2 * y) * 3.3, 1.0) - 0.5).abs() - 0.10, 0.06)
    image = lighten(image, inside * (0.05 + 0.10 * streak * (1.0 - 0.5 * p["real"])))
    below = soft((lens - 0.010).abs() - 0.008, 0.02) * p.cover(planes["head"]) * p["real"]
    image = tint(image, (0.7, 0.6, 0.6), below * 0.35)
    wire = torch.minimum(torch.minimum(frame, bridge), arm)
    image = over(image, p.colour("glasses"), p.cover(wire) * 0.97)
    return painted("image", lighten(image, p.cover(wire + 0.005) * bump(y + ry * 0.8, 0.03) * 0.3))


def _hat_light(p: Parameters, x: Tensor, y: Tensor) -> Tensor:
    strength = 0.22 + 0.35 * p["real"]
    light = 0.86 + strength * (p["light_x"] * x - 0.5 * (y + 0.45)).clamp(-0.5, 0.8)
    return light * (p["key.1"] + p["fill.1"])


def caps(p: Parameters, planes: Planes) -> Planes:
    """A baseball cap, a woolly hat, a headband."""
    width, height, hat = p["face_width"], p["face_height"], p.colour("hat")
    x, y = planes["hx"] - 0.06 * p["turn_sin"], planes["hy"] - 0.06 * p["nod_sin"]
    image, accent, bend = colour(planes, "image"), p.colour("accent"), 0.16 * x.square()
    dome = ellipse(x, y + 0.20, width + 0.085, height * 0.86 + 0.03)
    light = _hat_light(p, x, y)
    knit = 1.0 + 0.06 * torch.sin(x * 90.0) * (1.0 - p["flat"])
    crown = torch.maximum(dome, y + 0.33 - bend)
    brim = ellipse(x - 0.16 * p["turn_sin"], y + 0.31 - 0.7 * bend, width * 0.98, 0.075)
    seam = p.line(x.abs() - 0.16 * (1 + y), 0.004) * 0.3
    image = over(image, tint(scale(hat, light), (0.6, 0.6, 0.6), seam), p.cover(crown) * p["cap"])
    image = tint(image, (0.6, 0.5, 0.5), soft(brim - 0.03, 0.08) * 0.4 * p["cap"])
    image = over(image, scale(hat, 0.78 * light), p.cover(brim) * p["cap"])
    cuff = torch.maximum(dome - 0.015, (y + 0.36 - bend).abs() - 0.075)
    image = over(image, scale(hat, light * knit), p.cover(crown) * p["beanie"])
    pompom = ellipse(x, y + height + 0.17, 0.10, 0.095) + 0.008 * torch.sin(x * 80.0)
    image = over(image, scale(accent, light), p.cover(pompom) * p["beanie"] * (p["seed"] < 12.0))
    ribs = 0.93 + 0.09 * torch.sin(x * 75.0)
    image = over(image, scale(accent, 0.9 * ribs * light), p.cover(cuff) * p["beanie"])
    band = torch.maximum(dome + 0.01, (y + 0.40 - 1.6 * bend).abs() - 0.042)
    return painted("image", over(image, scale(hat, light), p.cover(band) * p["headband"]))


def tall_hats(p: Parameters, planes: Planes) -> Planes:
    """A hat with a brim, a wizard's hat, a crown."""
    width, height, hat = p["face_width"], p["face_height"], p.colour("hat")
    x, y = planes["hx"] - 0.05 * p["turn_sin"], planes["hy"] - 0.06 * p["nod_sin"]
    image, light = colour(planes, "image"), _hat_light(p, x, y)
    up = -(y + 0.36)
    straw = 1.0 + 0.07 * torch.sin(x * 70.0 + 20.0 * up) * torch.sin(up * 90.0) * (p["seed"] > 10.0)
    top = box(x, y + 0.56, width * (0.90 - 0.12 * up), 0.25, 0.10)
    brim = ellipse(x, y + 0.37 - 0.05 * x.square(), width + 0.32, 0.095)
    image = tint(image, (0.55, 0.45, 0.45), soft(brim - 0.06, 0.14) * 0.5 * p.cover(planes["head"]))
    image = over(image, scale(hat, light * straw), p.cover(top) * p["brim_hat"])
    ribbon = torch.maximum(top, (y + 0.42).abs() - 0.055)
    image = over(image, scale(p.colour("accent"), light), p.cover(ribbon) * p["brim_hat"])
    image = over(image, scale(hat, light * straw * 0.85), p.cover(brim) * p["brim_hat"])
    cone = torch.maximum((x - 0.10 * up * up).abs() - 0.46 + 0.46 * up, -up) * 0.9
    stars = soft(torch.sin(x * 23.0 + 2.0) * torch.sin(y * 21.0) * -1.0 + 0.86, 0.1)
    robe = over(scale(hat, light), constant(x, 0.96, 0.85, 0.40), stars)
    image = over(image, robe, p.cover(cone) * p["wizard_hat"])
    image = over(image, scale(hat, 0.8 * light), p.cover(brim) * p["wizard_hat"])
    spikes = 0.16 * (torch.remainder(x * 4.5, 1.0) - 0.5).abs()
    ring = torch.maximum(x.abs() - width * 0.86, (y + height * 0.86).abs() - 0.10 + spikes * 1.0)
    gold = scale(constant(x, 0.95, 0.77, 0.30), light * (0.85 + 0.3 * torch.sin(x * 9.0)))
    return painted("image", over(image, gold, p.cover(ring) * p["crown"]))


def head_scarf(p: Parameters, planes: Planes) -> Planes:
    """A scarf round the head and the shoulders, the face left free."""
    width, height, hat = p["face_width"], p["face_height"], p.colour("hat")
    x, y = planes["hx"], planes["hy"]
    around = ellipse(x, y + 0.06, width + 0.13, height + 0.09)
    drape = box(x, y - 0.78, width + 0.16 + 0.2 * (y - 0.6).clamp(min=0), 0.42, 0.2)
    outer = join(around, drape, 0.12)
    inner = ellipse(x - 0.10 * p["turn_sin"], y - 0.06, width * 0.86, height * 0.80)
    folds = 0.05 * torch.sin(torch.atan2(x, y - 0.6) * 23.0 + 5.0 * y) * (1.0 - p["flat"])
    tone = scale(hat, _hat_light(p, x, y) + folds - 0.16 * soft(inner, 0.16))
    image = tint(
        colour(planes, "image"),
        (0.6, 0.48, 0.46),
        soft(-inner - 0.02, 0.07) * p.cover(planes["head"]) * 0.5,
    )
    return painted("image", over(image, tone, p.cover(torch.maximum(outer, -inner))))


def headphones(p: Parameters, planes: Planes) -> Planes:
    width, height, hat = p["face_width"], p["face_height"], p.colour("hat")
    x, y = planes["hx"] + 0.04 * p["turn_sin"], planes["hy"]
    image, light = colour(planes, "image"), _hat_light(p, x, y)
    band = ellipse(x, y + 0.06, width + 0.10, height + 0.09).abs() - 0.030
    band = torch.maximum(band, y + 0.02)
    image = over(image, scale(hat, 0.7 * light), p.cover(band))
    pad = box(x.abs() - width - 0.05, y - 0.03, 0.075, 0.155, 0.06)
    image = over(image, scale(hat, light), p.cover(pad))
    shell = ellipse(x.abs() - width - 0.06, y - 0.03, 0.035, 0.09)
    return painted("image", over(image, scale(p.colour("accent"), light), p.cover(shell)))


def bow(p: Parameters, planes: Planes) -> Planes:
    hat = p.colour("hat")
    dx, dy = planes["hx"] - 0.24 - 0.03 * p["turn_sin"], planes["hy"] + p["face_height"] * 0.88
    along, up = dx * 0.92 + dy * 0.38, dy * 0.92 - dx * 0.38
    loop = ellipse(along.abs() - 0.075, up, 0.085, 0.075)
    loop = torch.maximum(loop, up.abs() - 0.012 - 0.62 * along.abs())
    knot = ellipse(along, up, 0.030, 0.035)
    image = over(colour(planes, "image"), scale(hat, 0.95 - 0.25 * bump(up, 0.015)), p.cover(loop))
    return painted("image", over(image, scale(hat, 0.75), p.cover(knot)))


def tuft(p: Parameters, planes: Planes) -> Planes:
    """A shock of fur on an animal's forehead."""
    hx, y, height = planes["hx"], planes["hy"], p["face_height"]
    shape = ellipse(hx - 0.08 * p["turn_sin"], y + height * 0.90, 0.13, 0.14)
    shape = torch.maximum(shape + 0.03 * torch.sin(hx * 46.0), -y - height * 1.14)
    tone: Colour = scale(p.colour("skin"), 0.93 + 0.06 * torch.sin(hx * 95.0))
    return painted("image", over(colour(planes, "image"), tone, p.cover(shape)))
