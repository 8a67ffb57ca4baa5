"""The scene: the camera's coordinates, the backgrounds, and what the camera makes of it all.

In: parameters (`attributes.py`) and the planes painted so far.  Out: the planes that change.  The
picture's coordinates are ``u``, ``v``, the body's ``x``, ``y``, the head's ``hx``, ``hy`` and the
face's ``fx``, ``fy``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.train_tiny.shapes import (
    Parameters,
    Planes,
    box,
    colour,
    constant,
    ellipse,
    lighten,
    noise,
    over,
    painted,
    ripples,
    scale,
    soft,
    tint,
)


def stage(p: Parameters, u: Tensor, v: Tensor) -> Planes:
    """All coordinates of the picture's points; what is not painted yet is nowhere near."""
    du, dv = u - p["camera_x"], v - p["camera_y"]
    x = (du * p["camera_cos"] + dv * p["camera_sin"]) / p["zoom"]
    y = (dv * p["camera_cos"] - du * p["camera_sin"]) / p["zoom"]
    # The head turns about its chin, moves and has its own size.
    dx, dy = (
        (x - p["lean_x"]) / p["head_scale"],
        (y - p["lean_y"] - p["head_y"] - 0.55) / p["head_scale"],
    )
    hx = dx * p["roll_cos"] + dy * p["roll_sin"]
    hy = dy * p["roll_cos"] - dx * p["roll_sin"] + 0.55
    fx, fy = onto_face(p, hx, hy)
    far = torch.zeros_like(hx) + 1.0
    return {
        **{"u": u + 0 * hx, "v": v + 0 * hx, "x": x, "y": y, "hx": hx, "hy": hy},
        **{"fx": fx, "fy": fy, "head": far, "body": far},
    }


def onto_face(p: Parameters, hx: Tensor, hy: Tensor) -> tuple[Tensor, Tensor]:
    """The point of the face that is seen at a point of the head: it is a sphere that turns."""
    a, b = hx / p["face_width"], hy / p["face_height"]
    depth = torch.sqrt((1.06 - 0.9 * (a.square() + b.square())).clamp(min=0.02))
    across = a * p["turn_cos"] - depth * p["turn_sin"]
    depth = depth * p["turn_cos"] + a * p["turn_sin"]
    down = b * p["nod_cos"] - depth * p["nod_sin"]
    return across * p["face_width"], down * p["face_height"]


def plain_background(p: Parameters, planes: Planes) -> Planes:
    """A gradient, and the light of a studio."""
    u, v, seed = planes["u"], planes["v"], p["back_seed"]
    part = (0.5 + 0.45 * v + 0.25 * u * torch.cos(seed * 6.0)).clamp(0.0, 1.0)
    part = part * part * (3.0 - 2.0 * part)
    image = over(p.colour("back"), p.colour("back2"), part)
    spot = torch.exp(-((u - p["camera_x"]).square() + (v + 0.1).square()) * 1.3)
    return painted("image", lighten(image, spot * (0.10 + 0.28 * p["studio"])))


def bokeh(p: Parameters, planes: Planes) -> Planes:
    u, v, seed = planes["u"], planes["v"], p["back_seed"]
    image = scale(colour(planes, "image"), 1.0 - 0.65 * p["night"])
    for index in range(9):
        phase = seed * (7.0 + 3.0 * index) + index * 1.7
        radius = 0.10 + 0.08 * torch.sin(phase * 2.7)
        disc = ellipse(
            u - 1.5 * torch.sin(phase),
            v + 0.25 - 0.75 * torch.sin(phase * 1.9 + 1.0),
            radius,
            radius,
        )
        ring = soft((disc + 0.01).abs() - 0.012, 0.02) * (1.0 - 0.8 * p["real"])
        light = 0.13 * soft(disc, 0.03 + 0.05 * p["real"]) + 0.09 * ring
        hue = [0.75 + 0.25 * torch.sin(phase * 3.1 + k) for k in (0.5, 1.6, 3.4)]
        lamp = [light * (1.0 + 2.2 * p["night"] * h) for h in hue]
        image = [i + (1.0 - i) * k.clamp(max=0.9) for i, k in zip(image, lamp, strict=True)]
    return painted("image", image)


def window(p: Parameters, planes: Planes) -> Planes:
    seed = p["back_seed"]
    side = torch.where(seed < 0.5, -1.0, 1.0)
    x, y = planes["u"] - side * (0.80 + 0.3 * torch.sin(seed * 9.0)), planes["v"] + 0.30
    blur = 0.02 + 0.10 * p["real"]
    half = box(x, y, 0.36, 0.46, 0.02)
    pane, frame = soft(half, blur), soft(half.abs() - 0.03, blur)
    bars = soft(torch.minimum(x.abs(), (y + 0.02).abs()) - 0.022, blur)
    sky = [0.72 + 0.15 * y, 0.86 + 0.08 * y, 0.97 + 0.0 * y]
    image = over(colour(planes, "image"), sky, pane * 0.85)
    wood = [c * 0.55 + 0.35 for c in p.colour("back2")]
    return painted("image", over(image, wood, torch.maximum(frame, bars * pane)))


def diagonal(p: Parameters, planes: Planes) -> Planes:
    seed = p["back_seed"]
    along = planes["u"] * torch.cos(seed * 5.0) + planes["v"] * torch.sin(seed * 5.0)
    wave = (torch.remainder(along * (1.2 + 2.0 * seed), 1.0) - 0.5).abs() - 0.25
    return painted("image", lighten(colour(planes, "image"), soft(wave, 0.04) * 0.12))


def shelf(p: Parameters, planes: Planes) -> Planes:
    """Shelves with books."""
    u, v, seed = planes["u"], planes["v"], p["back_seed"]
    deep = 0.40 + 0.16 * seed
    row, in_row = torch.floor((v + 1.05) / deep), torch.remainder(v + 1.05, deep)
    shift = row * 0.037
    width = 0.10
    column, in_column = torch.floor((u + shift) / width), torch.remainder(u + shift, width)
    pick = noise(column * 1.31 + row * 7.1 + seed * 5.0)
    tall = 0.08 + 0.14 * noise(column * 2.17 + row * 3.3 + seed * 3.0)
    blur = 0.012 + 0.03 * p["real"]
    inside = torch.maximum((in_column - width / 2).abs() - width * 0.44, tall - in_row)
    book = soft(inside, blur)
    board = soft((in_row - deep + 0.02).abs() - 0.02, blur)
    spine = soft((in_row - tall - 0.06).abs() - 0.012, 0.012)
    tone = [
        0.40 + 0.42 * pick,
        0.34 + 0.30 * torch.remainder(pick * 3.7, 1.0),
        0.32 + 0.34 * torch.remainder(pick * 7.3, 1.0),
    ]
    image = [0.45 * b + 0.12 for b in p.colour("back2")]
    books = [0.55 * t + 0.3 * b for t, b in zip(tone, p.colour("back"), strict=True)]
    image = lighten(over(image, books, book), spine * book * 0.25 * (1.0 - p["real"]))
    image = over(image, constant(u, 0.55, 0.42, 0.30), board)
    return painted("image", over(colour(planes, "image"), image, 0.85 + 0 * u))


def room(p: Parameters, planes: Planes) -> Planes:
    """Furniture, far out of focus."""
    u, v, seed = planes["u"], planes["v"], p["back_seed"]
    image = colour(planes, "image")
    floor_y = 0.35 + 0.4 * torch.sin(seed * 11.0)
    image = over(image, [0.6 * c + 0.05 for c in p.colour("back2")], soft(floor_y - v, 0.22))
    for index in range(7):
        phase = seed * (9.0 + 5.0 * index) + index * 2.1
        shape = box(
            u - 1.5 * torch.sin(phase),
            v + 0.15 - 0.6 * torch.sin(phase * 1.7 + 2.0),
            0.16 + 0.13 * torch.sin(phase * 2.3),
            0.28 + 0.22 * torch.sin(phase * 3.1),
            0.03,
        )
        bright = 0.45 + 0.40 * torch.sin(phase * 4.7)
        own = [bright * (0.75 + 0.25 * torch.sin(phase * 5.3 + k)) for k in (0.0, 0.7, 1.5)]
        tone = [0.5 * o + 0.5 * b for o, b in zip(own, p.colour("back"), strict=True)]
        blur = 0.10 + 0.07 * torch.sin(phase * 6.1)
        image = over(image, [t.clamp(0.0, 1.0) for t in tone], soft(shape, blur) * 0.85)
    lamp = ellipse(u - 1.1 * torch.sin(seed * 17.0), v + 0.55, 0.14, 0.14)
    return painted("image", lighten(image, soft(lamp, 0.20) * 0.8))


def outdoors(p: Parameters, planes: Planes) -> Planes:
    """Sky, hills or a street's edge, and leaves: all out of focus."""
    u, v, seed = planes["u"], planes["v"], p["back_seed"]
    day = [
        0.62 + 0.22 * v + 0.2 * seed,
        0.76 + 0.12 * v + 0.06 * seed,
        0.92 - 0.10 * v - 0.2 * seed,
    ]
    cloud = ripples(u * 1.3 + seed * 9.0, v * 2.6, seed * 7.0)
    image = lighten(day, (0.35 * cloud + 0.1).clamp(0.0, 0.5))
    hill = v - 0.10 - 0.25 * torch.sin(seed * 13.0) - 0.12 * torch.sin(u * 1.7 + seed * 8.0)
    far = [0.35 + 0.2 * b for b in p.colour("back2")]
    near = [k * (0.55 + 0.7 * b) for k, b in zip((0.36, 0.46, 0.22), p.colour("back"), strict=True)]
    image = over(image, far, soft(-hill - 0.14, 0.12))
    image = over(image, near, soft(-hill, 0.16))
    leaves = ripples(u * 3.2 + seed * 5.0, v * 3.2, seed * 3.0)
    side = torch.where(seed < 0.5, -1.0, 1.0)
    tree = soft(0.75 - side * u - 0.35 * leaves - 0.15 * torch.sin(v * 2.0), 0.30)
    green = [k * (0.75 + 0.5 * leaves) for k in (0.22, 0.34, 0.12)]
    image = over(image, green, tree * 0.9)
    sparkle = soft(0.55 - leaves, 0.25) * tree
    image = lighten(image, sparkle * 0.35)
    return painted("image", [channel.clamp(0.0, 1.0) for channel in image])


def tiles(p: Parameters, planes: Planes) -> Planes:
    """A wall of tiles or bricks, or wallpaper with dots."""
    u, v, seed = planes["u"], planes["v"], p["back_seed"]
    size = 0.16 + 0.20 * torch.remainder(seed * 7.0, 1.0)
    row = torch.floor(v / size)
    x = u / (size * (1.0 + (seed > 0.5))) + 0.5 * torch.remainder(row, 2.0) * (seed > 0.3)
    joint_x = 0.5 - (torch.remainder(x, 1.0) - 0.5).abs()
    joint_y = 0.5 - (torch.remainder(v / size, 1.0) - 0.5).abs()
    joint = soft(torch.minimum(joint_x, joint_y) - 0.03, 0.05 + 0.06 * p["real"])
    tone = 0.90 + 0.18 * noise(torch.floor(x) * 1.7 + row * 5.3 + seed)
    image = scale(colour(planes, "image"), tone)
    image = tint(image, (0.72, 0.70, 0.70), joint * (seed < 0.75))
    dot = soft((joint_x - 0.5).square() + (joint_y - 0.5).square() - 0.03, 0.02)
    image = over(image, p.colour("accent"), dot * 0.35 * (seed > 0.75))
    return painted("image", [channel.clamp(0.0, 1.0) for channel in image])


def develop(p: Parameters, planes: Planes) -> Planes:
    """What lens, sensor and taste do to the picture; in [0, 1]."""
    u, v = planes["u"], planes["v"]
    red, green, blue = (channel * p["exposure"] for channel in colour(planes, "image"))
    grey = 0.30 * red + 0.59 * green + 0.11 * blue
    shade = 1.0 - p["vignette"] * (u * u * 0.45 + v * v)
    # Pixels are spread over a small range, since a fast sine of a large number is not precise.
    across, down = torch.remainder(u * 96.6243, 1.0), torch.remainder(v * 72.9395, 1.0)
    grain = p["grain"] * (noise(across * 7.1 + down * 3.3) + noise(down * 9.7 - across * 2.9) - 1.0)
    image = []
    for channel, cast in ((red, p["cast_red"]), (green, 1.0), (blue, p["cast_blue"])):
        value = (grey + (channel - grey) * p["saturation"]) * cast
        value = ((value - 0.5) * p["contrast"] + 0.5) * shade
        above = (value - 0.75).clamp(min=0.0)  # highlights roll off
        value = value - above + above / (1.0 + 1.3 * above) + grain
        image.append(value.clamp(0.0, 1.0))
    return painted("image", image)
