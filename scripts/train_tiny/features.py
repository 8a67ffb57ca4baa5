"""The face: skin in its light, markings, beard, nose, mouth, eyes and brows.

In: parameters (`attributes.py`) and the planes painted so far.  Out: the planes that change.  Works
in the face's own coordinates (``fx``, ``fy``), which turn with the head; paints on ``face``, which
is laid into the picture at the end, within the head's outline (``head``, a signed distance).
"""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.train_tiny.shapes import (
    Colour,
    Parameters,
    Planes,
    box,
    bump,
    colour,
    constant,
    ellipse,
    lighten,
    over,
    painted,
    ripples,
    scale,
    soft,
    tint,
)

_REDDISH = (0.72, 0.50, 0.46)
"""What little light leaves of skin: red goes deepest."""


def hair_tone(p: Parameters, strand: Tensor, along: Tensor, light: Tensor) -> Colour:
    """Hair with strands: ``strand`` runs across them, ``along`` from the root outwards."""
    seed, curl = p["seed"], p["curl"]
    wave = strand + curl * 0.07 * torch.sin(along * 16.0 + seed + 2.5 * torch.sin(strand * 5.0))
    fine = torch.sin(wave * 31.0 + 2.0 * torch.sin(wave * 11.0 + seed))
    finer = torch.sin(wave * 67.0 + seed + along * 2.0)
    thin = torch.sin(wave * 113.0 + 2.0 * torch.sin(along * 5.0 + seed + wave * 9.0))
    hairs = thin + torch.sin(wave * 191.0 + 2.0 * torch.sin(wave * 37.0) - along * 7.0)
    coils = torch.sin(strand * 44.0 + 2.2 * torch.sin(along * 30.0)) * torch.sin(
        along * 52.0 + seed
    )
    finer = finer + (coils - finer) * p["afro"]
    fine = fine * (1.0 - p["afro"])
    bold = 1.0 - 0.60 * p["real"] * (1.0 - p["afro"])
    lines = (0.50 * fine + 0.40 * finer) * bold + 0.22 * hairs * p["real"]
    lines = lines * (1.0 - 0.65 * p["flat"])
    sheen = bump(along - 0.30 - 0.04 * fine, 0.10) * (1.0 - 0.4 * p["real"])
    shade = 0.84 + (0.10 + 0.08 * p["real"]) * lines + (0.22 + 0.20 * p["real"]) * light
    return [
        (h * shade * (k + f) * 1.02 + (0.07 + 0.26 * h) * sheen * k * (0.75 + 0.5 * lines)).clamp(
            0.0, 1.0
        )
        for h, k, f in zip(p.colour("hair"), p.colour("key"), p.colour("fill"), strict=True)
    ]


def _relief(p: Parameters, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes along x and y of the face's height above a sphere: a sum of Gaussian hills."""
    side, ax = torch.sign(x), x.abs()
    slope_x, slope_y = torch.zeros_like(x), torch.zeros_like(x)
    human = p["human"]
    eye_y, nose_y, mouth_y = p["eye_y"], p["nose_y"], p["mouth_y"]
    nose, flesh = human + 0.35 * p["alien"], 1.0 - p["robot"]
    paired: tuple[tuple[Tensor | float, ...], ...] = (
        # x, y, width, height, amplitude: sockets, brow bones, cheekbones, nostrils, jaw
        (p["eye_gap"] * 0.94, eye_y, p["eye"] * 1.25, p["eye_height"] + 0.050, -0.030 * flesh),
        (p["eye_gap"], p["brow_rest_y"] + 0.01, 0.13, 0.045, 0.013 * flesh),
        (p["eye_gap"] * 1.30, eye_y + 0.155, 0.105, 0.085, 0.016 + 0.12 * p["cheek"]),
        (p["nose_width"] * 0.92, nose_y - 0.004, 0.026, 0.026, 0.013 * nose),
        (0.20, p["face_height"] * 0.72, 0.11, 0.10, 0.010 * human),
    )
    single: tuple[tuple[Tensor | float, ...], ...] = (
        # y, width, height, amplitude: bridge, tip, lips, chin, the dip below the lip
        ((eye_y + nose_y) * 0.5, 0.038, 0.11, 0.026 * nose),
        (nose_y - 0.018, p["nose_width"] * 0.92, 0.042, 0.033 * nose),
        (mouth_y, 0.16, 0.075, 0.016 * human),
        (mouth_y + 0.078, 0.085, 0.022, -0.010 * human),
        (p["face_height"] - 0.115 + p["jaw_drop"], 0.105, 0.065, p["chin"] * 0.22 * human),
        (nose_y + 0.035, 0.17, 0.16, 0.080 * p["animal"]),
    )
    for at_x, at_y, width, height, amplitude in paired:
        dx, dy = ax - at_x, y - at_y
        hill = torch.exp(-((dx / width).square() + (dy / height).square())) * (-2.0 * amplitude)
        slope_x = slope_x + side * hill * dx / (width * width)
        slope_y = slope_y + hill * dy / (height * height)
    for at_y, width, height, amplitude in single:
        dy = y - at_y
        hill = torch.exp(-((x / width).square() + (dy / height).square())) * (-2.0 * amplitude)
        slope_x = slope_x + hill * x / (width * width)
        slope_y = slope_y + hill * dy / (height * height)
    return slope_x, slope_y


def head_outline(p: Parameters, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The head's signed distance and its half width at each height, in head coordinates."""
    face_width, face_height = p["face_width"], p["face_height"]
    low = (y / face_height).clamp(0.0, 1.0)
    stretched = y - p["jaw_drop"] * low
    half = face_width * (1.0 - p["jaw"] * low * low) + p["cheek"] * bump(stretched - 0.20, 0.17)
    half = half + p["tufts"] * bump(y - 0.20, 0.10)
    rounded = ellipse(x, stretched, half, face_height)
    squared = box(x, stretched + 0.02, half, face_height * 0.95, 0.20)
    furry = p["animal"] * (1.0 - p["flat"])
    round_it = torch.atan2(x, y + 1e-4)
    fringe = torch.sin(round_it * 57.0 + 3.0 * y) + torch.sin(round_it * 91.0) + torch.sin(37.0 * x)
    fringe = 0.0032 * fringe * furry
    head = rounded + (squared - rounded) * p["square"] + fringe
    # What of a beard hangs below the chin.
    hang = ellipse(x, y - face_height + 0.13, face_width * 0.62, 0.13 + p["beard_length"])
    hang = hang + 0.010 * torch.sin(x * 47.0 + p["seed"])
    return torch.where(p["beard_length"] > 0.0, torch.minimum(head, hang), head), half


def skin(p: Parameters, planes: Planes) -> Planes:
    """Starts the face, and throws the head's shadow on the body."""
    x, y, fx, fy = planes["hx"], planes["hy"], planes["fx"], planes["fy"]
    real, flat, human = p["real"], p["flat"], p["human"]
    head, half = head_outline(p, x, y)
    u, v = x / half, y / p["face_height"]
    far = u.square() + v.square()
    slope_x, slope_y = _relief(p, fx, fy)
    relief = p["relief"] * soft(far - 0.9, 0.4)
    nx, ny = 0.92 * u - relief * slope_x, 0.80 * v - relief * slope_y
    nz = torch.sqrt((1.0 - 0.85 * far).clamp(min=0.05))
    length = torch.sqrt(nx.square() + ny.square() + nz.square())
    nx, ny, nz = nx / length, ny / length, nz / length
    lit = nx * p["light_x"] + ny * p["light_y"] + nz * p["light_z"]
    # The nose's shadow, on the side away from the light.
    away_x, away_y = fx + 0.085 * p["light_x"], fy - p["nose_y"] + 0.035 * p["light_y"] - 0.01
    cast = soft(ellipse(away_x, away_y, p["nose_width"] * 1.0, 0.060), 0.07) * human * real
    cast = cast * (1.0 - bump(fx, 0.030)) * 0.55
    lit = lit - cast * 0.5
    step = 0.46 + 0.26 * soft(p["cel"] - lit, 0.05)
    socket = bump((fx.abs() - p["eye_gap"] * 0.86) / p["eye"], 1.15) * bump(
        fy - p["eye_y"] + 0.01, p["eye_height"] + 0.035
    )
    under = bump(fx, p["nose_width"] * 1.3) * bump(fy - p["nose_y"] - 0.055, 0.030) * human
    hollow = 1.0 - relief * (0.34 * socket + 0.22 * under + 0.16 * (far - 0.55).clamp(0.0, 1.0))
    sky = hollow * (0.90 - 0.16 * ny)
    shades = []
    for wrap, key, fill in zip((0.42, 0.24, 0.20), p.colour("key"), p.colour("fill"), strict=True):
        spread = 0.15 + wrap * (0.4 + 0.6 * p["relief"])
        diffuse = ((lit + spread) / (1.0 + spread)).clamp(0.0, 1.0)
        diffuse = diffuse + (step - diffuse) * flat
        shades.append((key * diffuse * (0.6 + 0.4 * hollow) + fill * sky) * 1.06)

    cloud = ripples(fx * 5.0, fy * 5.0, p["skin_seed"]) * (0.022 * real * human + 0.02 * p["clay"])
    pores = torch.sin(fx * 190.0 + 4.0 * torch.sin(fy * 57.0)) * torch.sin(
        fy * 210.0 + 3.0 * torch.sin(fx * 71.0)
    )
    pores = pores * 0.010 * real * human
    prints = torch.sin(x * 37.0 + 3.0 * torch.sin(y * 11.0)) * torch.sin(y * 31.0 + p["seed"])
    out_x = torch.atan2(fx, fy - p["nose_y"] + 0.2)
    fur = torch.sin(out_x * 46.0 + 5.0 * torch.sin(far * 9.0)) * torch.sin(far * 26.0 + out_x * 9.0)
    fur = fur * p["animal"] * (1.0 - flat) * (0.03 + 0.07 * real)
    texture = 1.0 + cloud + pores + fur + 0.018 * prints * p["clay"]
    flush = bump(fx.abs() - p["eye_gap"] * 1.2, 0.12) * bump(fy - p["eye_y"] - 0.17, 0.10)
    flush = (flush + bump(fx, 0.07) * bump(fy - p["nose_y"] + 0.01, 0.06)) * real * human
    base = tint(p.colour("skin"), (1.0, 0.86, 0.85), flush * 0.75)
    face = [s * h * texture for s, h in zip(base, shades, strict=True)]
    # Two lobes: a broad sheen and an oily shine, most of it on forehead, nose and cheeks.
    mirror = 1.0 - (nx * p["half_x"] + ny * p["half_y"] + nz * p["half_z"])
    shine = 0.55 * torch.exp(-18.0 * mirror) + 0.9 * torch.exp(-95.0 * mirror)
    oily = 0.55 + 0.45 * bump(fx, 0.16) + 0.3 * flush + 2.0 * pores
    face = [f + p["gloss"] * shine * oily * k for f, k in zip(face, p.colour("key"), strict=True)]
    rim = (1.0 - nz).clamp(0.0, 1.0)
    face = [
        f + 0.20 * rim * rim * rim * b * real for f, b in zip(face, p.colour("back"), strict=True)
    ]
    shade = 0.32 * shades[0] + 0.58 * shades[1] + 0.10 * shades[2]

    below = (y - 0.1).clamp(0.0, 0.6)
    drop = torch.exp(-((head.clamp(min=0.0) - 0.10 * below * real) / 0.11).square())
    image = tint(colour(planes, "image"), (0.50, 0.42, 0.44), drop * p.cover(planes["body"]) * 0.5)
    return {
        **painted("image", image),
        **painted("face", face),
        "head": head,
        "shade": shade,
        "light": (lit - 0.5).clamp(-0.6, 0.7),
    }


def fur_markings(p: Parameters, planes: Planes) -> Planes:
    """What animals, robots and mascots wear on their skin."""
    x, y, shade = planes["fx"], planes["fy"], planes["shade"]
    face, face_height = colour(planes, "face"), p["face_height"]
    patch = ellipse(x - p["eye_gap"], y - p["eye_y"], 0.16, 0.19)
    face = tint(face, (0.60, 0.55, 0.52), soft(patch, 0.05) * p["patch"])
    band = ellipse(x.abs() - p["eye_gap"] * 1.1, y - p["eye_y"] - 0.02, 0.15, 0.13)
    face = tint(face, (0.42, 0.38, 0.37), soft(band, 0.06) * p["mask"])
    stripes = soft((torch.remainder(x * 7.0, 1.0) - 0.5).abs() - 0.20, 0.12)
    stripes = stripes * soft(y + 0.28, 0.06) * soft(x.abs() - 0.20, 0.05)
    flanks = soft((torch.remainder(y * 6.0 + x.abs() * 2.0, 1.0) - 0.5).abs() - 0.18, 0.12)
    stripes = torch.maximum(stripes, flanks * soft(0.30 - x.abs(), 0.06))
    face = tint(face, (0.58, 0.52, 0.50), stripes * p["tabby"])
    dots = torch.sin(x * 17.0 + p["skin_seed"]) * torch.sin(y * 15.0 + 2.0 * p["skin_seed"])
    face = tint(face, (0.72, 0.70, 0.76), soft(0.62 - dots, 0.3) * p["spots"])
    muzzle_y = (p["nose_y"] + p["mouth_rest_y"]) / 2 + 0.02
    muzzle = soft(ellipse(x, y - muzzle_y, 0.225, 0.150 + 0.5 * p["jaw_drop"]), 0.05)
    cheeks = soft(0.25 - 0.45 * x.abs() - y, 0.08)
    white = torch.maximum(muzzle, cheeks * p["fox"])
    tone = [m * (0.25 + 0.75 * shade) for m in p.colour("muzzle")]
    face = over(face, tone, white * p["animal"] * 0.92)
    plate = box(x, y - 0.06, p["face_width"] * 0.84, face_height * 0.66, 0.12)
    face = lighten(face, soft(plate, 0.02) * 0.16 * p["robot"])
    face = tint(face, (0.55, 0.55, 0.6), p.line(plate, 0.004) * 0.5 * p["robot"])
    rivets = ellipse(x.abs() - p["face_width"] * 0.72, y.abs() - face_height * 0.42, 0.016, 0.016)
    return painted("face", tint(face, (0.5, 0.5, 0.55), p.cover(rivets) * p["robot"]))


def complexion(p: Parameters, planes: Planes) -> Planes:
    """Blush, freckles, and the folds of age and of a smile."""
    x, y, face = planes["fx"], planes["fy"], colour(planes, "face")
    glow = bump(x.abs() - p["eye_gap"] * 1.22, 0.10) * bump(y - p["eye_y"] - 0.17, 0.065)
    rosy = [f * k + c for f, k, c in zip(face, (0.55, 0.62, 0.62), (0.38, 0.08, 0.10), strict=True)]
    face = over(face, rosy, glow * p["blush"])
    spots = torch.sin(x * 83.0 + 2.0 * torch.sin(y * 31.0)) * torch.sin(y * 89.0 + x * 23.0) - 0.62
    area = bump(x.abs() - 0.17, 0.13) * bump(y - p["eye_y"] - 0.15, 0.07)
    face = tint(face, (0.72, 0.56, 0.46), (spots * 5.0).clamp(0, 1) * area * p["freckles"] * 0.75)
    # From the nostrils round the corners of the mouth; across the forehead; beside the eyes.
    fold_x = x.abs() - p["nose_width"] - 0.045 - 0.42 * (y - p["nose_y"])
    fold = bump(fold_x, 0.011) * soft((y - p["nose_y"] - 0.055).abs() - 0.05, 0.05)
    lines = bump(torch.remainder(y + 0.36, 0.055) - 0.027 + 0.01 * torch.cos(x * 9.0), 0.006)
    lines = lines * soft((y + 0.32).abs() - 0.07, 0.03) * soft(x.abs() - 0.20, 0.12) * p["old"]
    out = x.abs() - p["eye_gap"] - p["eye"] * 1.15
    feet = bump(torch.remainder((y - p["eye_y"]) - 0.35 * out, 0.034) - 0.017, 0.005)
    feet = feet * soft((out - 0.02).abs() - 0.025, 0.02) * soft((y - p["eye_y"]).abs() - 0.05, 0.02)
    folds = fold * 0.5 * p["fold"] + (lines * 0.4 + feet * 0.45) * p["old"]
    return painted("face", tint(face, _REDDISH, folds * p["human"]))


def beard(p: Parameters, planes: Planes) -> Planes:
    x, y, face = planes["fx"], planes["fy"], colour(planes, "face")
    dy, ax = y - p["mouth_y"], x.abs()
    line = p["mouth_y"] - 0.115 + p["beard_line"] + 0.10 * bump(ax - 0.20, 0.12)
    line = line - (0.40 - 0.8 * p["beard_line"]) * (ax - 0.30).clamp(min=0.0)
    fuzz = 0.012 * torch.sin(x * 70.0 + p["seed"]) + 0.008 * torch.sin(x * 131.0)
    grown = soft(line + fuzz - y, 0.035)
    reach = ellipse(x, dy - 0.35 * p["mouth_open"], p["mouth_half"], 0.034 + 0.62 * p["mouth_open"])
    bare = soft(reach, 0.020)
    upper = 1.0 - soft(ellipse(x, dy + 0.105, 0.10, 0.070), 0.05) * (1.0 - p["moustache"])
    chin = soft(ellipse(x, dy - 0.10, 0.15, 0.15 + p["beard_length"]) + fuzz, 0.035)
    tone = hair_tone(p, x * 1.6, dy + 0.15, planes["light"] * 0.8)
    specks = torch.sin(x * 171.0 + 2.0 * torch.sin(y * 83.0)) * torch.sin(y * 187.0)
    shadow = soft(line - 0.02 - y, 0.10) * (1.0 - 0.95 * bare) * upper * (0.85 + 0.3 * specks)
    face = tint(face, (0.62, 0.60, 0.62), shadow * p["stubble"] * 0.55)
    mask = (grown * p["beard"] + chin * p["goatee"]) * (1.0 - bare) * upper
    return painted("face", over(face, scale(tone, 0.86), mask * 0.96))


def nose(p: Parameters, planes: Planes) -> Planes:
    width, ny, kind, lx = p["nose_width"], p["nose_y"], p["nose_kind"], p["light_x"]
    face, shade, real = colour(planes, "face"), planes["shade"], p["real"]
    x = planes["fx"] - 0.045 * p["turn_sin"]
    y = planes["fy"]
    dy = y - ny - 0.03 * p["nod_sin"]
    ax = x.abs()
    drawn = (p["human"] + p["alien"] * 0.4) * (1.0 - 0.75 * real * p["human"])
    bridge = bump(x + lx * 0.03, 0.030) * soft((dy + 0.07).abs() - 0.06, 0.08) * 0.16
    under = bump(x, width * 1.05) * bump(dy - 0.028, 0.016) * 0.46
    side = bump(ax - width, 0.014) * bump(dy, 0.026) * 0.30
    face = tint(face, (0.66, 0.47, 0.42), (under + side + bridge) * drawn)
    hole = p.cover(ellipse(ax - width * 0.50, dy - 0.020, 0.013, 0.0075)) * 0.6 * (kind < 0.6)
    face = tint(face, (0.42, 0.27, 0.26), hole * drawn)
    shine = bump(x - lx * 0.012, width * 0.42) * bump(dy + 0.012, 0.018)
    face = lighten(face, shine * 0.30 * drawn * (1.0 - 0.6 * p["flat"]))
    # A photograph's: the nostrils, the shadow below the tip, the furrow beside the wings.
    photo = p["human"] * real
    hole = soft(ellipse(ax - width * 0.47, dy - 0.024 - 0.10 * ax, width * 0.27, 0.0085), 0.012)
    face = tint(face, (0.30, 0.17, 0.16), hole * 0.75 * photo)
    base = bump(x, width * 0.95) * bump(dy - 0.036, 0.014)
    wing = bump(ax - width * 1.12 - 0.10 * (dy + 0.02), 0.009) * bump(dy + 0.002, 0.026)
    face = tint(face, _REDDISH, (base * 0.34 + wing * 0.36) * photo)
    # Animals: ball, button or snout; and the line to the mouth.
    ball = ellipse(x, dy, width * 1.15, 0.042) - 0.004
    button = torch.maximum(ellipse(x, dy + 0.010, 0.072, 0.044), (ax * 0.72 + dy - 0.036) * 0.8)
    disc = ellipse(x, dy - 0.01, 0.125, 0.085)
    dark, rosy = constant(x, 0.13, 0.09, 0.10), constant(x, 0.86, 0.50, 0.52)
    tip = over(dark, rosy, p["cat"] * 0.8 + p["rabbit"] + p["mouse"])
    tip = scale(tip, 0.35 + 0.65 * shade)
    buttoned = p["animal"] - p["pig"]
    face = over(face, tip, p.cover(button) * buttoned)
    face = lighten(face, bump(x + 0.018, 0.016) * bump(dy + 0.024, 0.009) * 0.6 * buttoned)
    snout = [s * (0.45 + 0.45 * shade) for s in p.colour("skin")]
    face = over(face, snout, p.cover(disc) * p["pig"])
    face = tint(face, (0.6, 0.5, 0.5), p.line(disc, 0.005) * 0.6 * p["pig"])
    face = tint(
        face, (0.4, 0.3, 0.3), p.cover(ellipse(ax - 0.045, dy - 0.01, 0.018, 0.028)) * p["pig"]
    )
    middle = (ny + p["mouth_y"]) / 2
    line = p.cover(torch.maximum(ax - 0.005, (y - middle).abs() - (p["mouth_y"] - ny) / 2))
    face = tint(face, (0.42, 0.32, 0.32), line * buttoned * 0.75)
    lamp = over(scale(p.colour("skin"), 0.72), p.colour("iris"), 0.5 * (kind < 0.15))
    return painted("face", over(face, lamp, p.cover(ball) * p["robot"] * (kind < 0.3)))


def near_mouth(p: Parameters, planes: Planes) -> Tensor:
    """Negative where :func:`mouth` may paint."""
    below = planes["fy"] - p["mouth_y"] - 0.03
    return torch.maximum(planes["fx"].abs() - 0.34, below.abs() - 0.22)


def mouth(p: Parameters, planes: Planes) -> Planes:
    """Lips, what is behind them, and the chin's shadow."""
    face, shade, real = colour(planes, "face"), planes["shade"], p["real"]
    half, gape, thick = p["mouth_half"], p["mouth_open"], p["lip_thick"]
    teeth, tongue = p["teeth"], p["tongue"]
    x, y = planes["fx"] - 0.020 * p["turn_sin"], planes["fy"] - p["mouth_y"]
    u = x / half
    u2 = u.square().clamp(max=1.4)
    inside = (1.0 - u2).clamp(0.0, 1.0)
    arch = torch.sqrt(inside + 1e-6)
    arch = arch * (0.65 + 0.35 * arch)
    middle = -p["smile"] * (u2 - 0.4) + 0.012 * p["lopsided"] * u.clamp(-1.2, 1.2)
    upper, lower = middle - 0.36 * gape * arch, middle + 0.78 * gape * arch
    bow = 1.0 - 0.24 * bump(u, 0.17) + 0.10 * bump(u.abs() - 0.30, 0.16)
    rounded = torch.sqrt(inside + 1e-6)
    lip_top = upper - thick * rounded * 0.95 * bow
    lip_bottom = lower + thick * rounded * 1.25
    ends = (u.abs() - 1.0) * half
    lips = torch.maximum(torch.maximum(lip_top - y, y - lip_bottom) * 0.92, ends)
    hole = torch.maximum(torch.maximum(upper - y, y - lower) * 0.92, ends + 0.004)
    dip = bump(y - lip_bottom - 0.024, 0.016) * inside * (1.0 - p["animal"])
    face = tint(face, (0.68, 0.52, 0.48), dip * (0.32 - 0.10 * real))
    groove = bump(x, 0.016) * bump(y - lip_top + 0.035, 0.022) * real * p["human"]
    face = tint(face, _REDDISH, groove * 0.16)
    # The upper lip lies in its own shadow, the lower one catches the light.
    on_upper = ((middle - y) * 60.0 + 0.5).clamp(0.0, 1.0)
    creases = 1.0 + 0.03 * torch.sin(x * 150.0 + p["seed"]) * rounded * real
    tone = (1.04 - 0.22 * on_upper) * (0.25 + 0.75 * shade) * creases
    edge = p.cover(lips) + (soft(lips, 0.016) - p.cover(lips)) * real
    face = over(face, scale(p.colour("lip"), tone), edge * p["lip_strength"])
    gloss = bump(y - lower - thick * 0.55, thick * 0.30) * bump(u - 0.2 * p["light_x"], 0.45)
    gloss = (
        gloss * (0.16 + 0.5 * p["gloss"]) * (1.0 + 0.35 * torch.sin(x * 150.0 + p["seed"]) * real)
    )
    face = lighten(face, gloss * p.cover(lips) * (1.0 - p["flat"]))
    # Behind them: the dark, the tongue, two rows of teeth.
    part = p.cover(hole) * (gape * 160.0).clamp(0.0, 1.0)
    depth = ((y - upper) / (1.14 * gape + 0.004)).clamp(0.0, 1.0)
    dark = [0.16 + 0.14 * depth, 0.035 + 0.03 * depth, 0.045 + 0.04 * depth]
    face = over(face, dark, part)
    raised = gape * (0.98 - 0.62 * tongue)
    flat_tongue = ellipse(
        x, y - middle - raised, half * (0.60 + 0.06 * tongue), 0.50 * gape + 0.010
    )
    body = (0.5 - flat_tongue / (0.25 * gape + 0.02)).clamp(0.0, 1.0)
    flesh = [0.62 + 0.20 * body, 0.27 + 0.12 * body, 0.29 + 0.12 * body]
    flesh = scale(flesh, 1.0 - 0.22 * bump(u, 0.05) * (1.0 - tongue * 0.5))
    wet = bump(u - 0.18, 0.10) * bump(flat_tongue + 0.018, 0.010) * 0.30
    flesh = lighten(flesh, wet)
    face = over(face, flesh, p.cover(flat_tongue) * part * (0.45 + 0.55 * tongue))
    height = (0.012 + 0.034 * teeth) * (gape * 30.0).clamp(0.25, 1.0)
    row = torch.maximum(y - upper - height * (0.72 + 0.28 * inside), (u.abs() - 0.88) * half)
    across = torch.remainder(x * 25.0, 1.0) - 0.5
    gaps = 1.0 - 0.20 * soft(across.abs() / 25.0 - 0.001, 0.006)
    enamel = (1.0 - 0.28 * u2) * gaps * (0.60 + 0.40 * shade)
    white = [0.985 * enamel, 0.96 * enamel, (0.93 - 0.05 * real) * enamel]
    face = over(face, white, p.cover(row) * part * (0.20 + 0.80 * teeth))
    low = torch.maximum(lower - 0.022 * teeth - y, (u.abs() - 0.72) * half)
    face = over(face, scale(white, 0.84), p.cover(low) * part * ((teeth - 0.4) * 1.4).clamp(0, 1))
    face = tint(face, (0.40, 0.33, 0.35), bump(y - upper, 0.011) * part * 0.55)
    # The line of closed lips, and the corners.
    shut = 1.0 - (gape * 60.0).clamp(0.0, 1.0)
    line = p.cover(torch.maximum((y - middle).abs() - 0.0055, ends)) * shut
    face = tint(face, (0.40, 0.26, 0.27), line * (0.85 - 0.15 * real))
    corner = bump(x.abs() - half - 0.004, 0.014) * bump(y - middle, 0.014)
    return painted("face", tint(face, (0.60, 0.44, 0.42), corner * 0.45))


def moustache(p: Parameters, planes: Planes) -> Planes:
    x = planes["fx"] - 0.030 * p["turn_sin"]
    y = planes["fy"] - p["mouth_y"] + 0.050 + 0.34 * p["mouth_open"]
    long = 0.070 + 0.5 * p["beard_line"]
    droop = (0.20 + 2.0 * p["beard_line"]) * (x.abs() - 0.05).clamp(min=0.0)
    shape = ellipse(x.abs() - 0.060, y - droop, 0.02 + long, 0.026)
    shape = shape + 0.004 * torch.sin(x * 120.0 + p["seed"])
    tone = hair_tone(p, x * 1.5 + y, y + 0.2, planes["light"])
    return painted(
        "face", over(colour(planes, "face"), scale(tone, 0.82), soft(shape, 0.014) * p["moustache"])
    )


def near_eyes(p: Parameters, planes: Planes) -> Tensor:
    """Negative where :func:`eyes` may paint."""
    across = (planes["fx"].abs() - p["eye_gap"]).abs() - p["eye"] * 2.1
    return torch.maximum(across, (planes["fy"] - p["eye_y"]).abs() - 2.3 * p["eye_height"] - 0.08)


def eyes(p: Parameters, planes: Planes) -> Planes:
    face, shade = colour(planes, "face"), planes["shade"]
    eye, height, real = p["eye"], p["eye_height"], p["real"]
    side = torch.sign(planes["fx"])
    x = planes["fx"].abs() - p["eye_gap"]  # positive is outwards
    y = planes["fy"] - p["eye_y"] + p["eye_tilt"] * x
    u2 = (x / eye).square()
    arch = torch.sqrt((1.0 - u2).clamp(min=0.0) + 1e-6)
    # A photograph's eye is an almond: its corners are sharper.
    arch = arch * (1.0 - 0.30 * real * p["human"] * (1.0 - arch))
    flesh = 1.0 - p["robot"]
    socket = torch.exp(-((x / (eye * 1.35)).square() + (y / (height * 1.5)).square()).square())
    face = tint(face, (0.76, 0.62, 0.62), socket * (0.22 - 0.10 * real) * flesh)
    painted_lid = soft(ellipse(x, y + height * 1.05, eye * 1.08, height * 0.62 + 0.02), 0.05)
    face = over(face, scale(p.colour("eye_shadow"), shade), painted_lid * p["made_up"])
    lid_y = height * (-1.0 + 1.80 * p["lid"]) * arch
    low_y = height * p["low_lid"] * arch
    ends = (x.abs() - eye) * 0.8
    ball = torch.maximum(torch.maximum(-height * arch - y, y - height * 0.82 * arch) * 0.9, ends)
    opened = torch.maximum(torch.maximum(lid_y - y, y - low_y) * 0.9, ends)
    face = over(face, constant(x, 0.10, 0.12, 0.16), p.cover(ball - 0.03) * p["robot"])
    # A lid is of the skin around it: a tone of its own turned grey where it was painted.
    lid_skin = scale(face, 0.97 - 0.07 * (y / height).clamp(-1.0, 1.0))
    face = over(face, lid_skin, p.cover(ball))
    white = p.cover(opened)
    under = 1.0 - (0.34 + 0.12 * real) * (1.0 - (y - lid_y) / (height * 0.55)).clamp(0.0, 1.0)
    ball_shade = (1.0 - (0.14 + 0.16 * real) * u2) * under * (1.0 + (shade - 1.0) * 0.7 * real)
    sclera = [p["white"] * ball_shade * k for k in (1.0, 0.985, 0.985)]
    duct = soft(ellipse(x + eye * 0.92, y, eye * 0.16, height * 0.4), 0.015) * real * p["human"]
    sclera = over(sclera, constant(x, 0.72, 0.45, 0.42), duct * 0.8)
    sclera = over(sclera, constant(x, 0.10, 0.13, 0.18), p["robot"])
    sclera = over(sclera, constant(x, 0.07, 0.07, 0.10), p["alien"] * 0.92)
    face = over(face, sclera, white)
    # The iris moves with the picture, not with the side.
    ix, iy = side * x - p["gaze_x"], y - p["gaze_y"] - 0.04 * height
    radius, size = torch.sqrt(ix.square() + iy.square() + 1e-8), p["iris_size"]
    ratio = radius / size
    angle = torch.atan2(iy, ix + 1e-5)
    ray = 0.06 * torch.sin(angle * 17.0) + 0.07 * real * torch.sin(angle * 29.0 + 3.0 * ratio)
    glaze = 0.62 + 0.50 * (0.35 + 0.6 * iy / size).clamp(0.0, 1.0) + ray * (1.0 - p["flat"])
    ring = 1.0 - 0.55 * ((ratio - 0.78) * 5.0).clamp(0.0, 1.0)
    iris = [i * glaze * ring * (0.45 + 0.55 * under) for i in p.colour("iris")]
    face = over(face, iris, soft(radius - size, 0.010) * white)
    squeezed = torch.sqrt((ix * (1.0 + 1.2 * p["slit"])).square() + iy.square() + 1e-8)
    black = p.cover(squeezed - p["pupil"]) * (1.0 - 0.7 * p["robot"])
    face = over(face, constant(x, 0.035, 0.03, 0.045), black * white)
    tilt = torch.where(p["light_x"] > 0, 1.0, -1.0)
    dot = size * (0.27 - 0.07 * real)
    spot = p.cover(ellipse(ix - size * 0.34 * tilt, iy + size * 0.36, dot, dot))
    other = p.cover(ellipse(ix + size * 0.36 * tilt, iy - size * 0.40, size * 0.13, size * 0.13))
    face = lighten(face, torch.maximum(spot, other * (0.75 - 0.45 * real)) * white)
    # Lids and lashes.
    lash = p["lash"] * (0.65 + 0.45 * (x / eye + 0.6).clamp(0.0, 1.4) * 0.6)
    wing = p["wing"] * (x / eye - 0.75).clamp(min=0.0) * eye * (0.9 - 0.4 * real)
    stroke = torch.maximum(
        (y - lid_y + wing).abs() - lash, x.abs() - eye * (1.02 + 0.16 * p["wing"] * (x > 0))
    )
    ink = [0.40 * b + 0.025 for b in p.colour("brow")]
    face = over(face, ink, soft(stroke, 0.009) * 0.95 * flesh)
    hairs = soft((torch.remainder(x * 42.0 + y * 9.0, 1.0) - 0.5).abs() - 0.16, 0.2)
    fringe = soft((y - lid_y + 0.012).abs() - 0.011, 0.008) * hairs * (x.abs() < eye)
    face = over(face, ink, fringe * p["wing"] * (1.0 - p["blink"]) * (0.7 - 0.4 * real))
    below = torch.maximum((y - low_y).abs() - 0.004, ends)
    face = tint(face, (0.52, 0.40, 0.40), p.cover(below) * 0.5 * flesh)
    wet = soft((y - low_y + 0.006).abs() - 0.002, 0.006) * white * real
    face = lighten(face, wet * 0.25)
    crease_y = -height * (1.32 + 0.12 * real) * arch - 0.010 * real + 0.5 * height * p["blink"]
    crease = torch.maximum((y - crease_y).abs() - 0.004, x.abs() - eye * 0.92)
    plain = flesh * (1.0 - p["animal"])
    face = tint(face, (0.58, 0.44, 0.42), soft(crease, 0.012) * 0.45 * plain)
    bag_y = low_y + 0.030 + 0.012 * real
    bag = bump(y - bag_y, 0.009) * soft(x.abs() - eye * 0.7, 0.06)
    return painted("face", tint(face, _REDDISH, bag * (p["old"] * 0.45 + 0.14 * real * plain)))


def brows_and_whiskers(p: Parameters, planes: Planes) -> Planes:
    x, y, face = planes["fx"], planes["fy"], colour(planes, "face")
    width, real = p["brow_width"], p["real"]
    dx = x.abs() - p["eye_gap"] - 0.01
    v = dx / width
    dy = y - p["brow_y"] + p["brow_tilt"] * dx - 0.022 * v * v
    dy = dy + 0.012 * p["lopsided"] * torch.sign(x)
    dy = dy + 0.030 * (v - 0.35).clamp(min=0.0) * v * real
    thick = p["brow_thick"] * (1.0 - 0.42 * (v + 0.25).clamp(min=-0.2, max=1.3))
    stroke = torch.maximum(dy.abs() - thick, (v.abs() - 1.0) * width)
    hairs = torch.sin(dx * 160.0 + dy * 110.0) * (1.0 - p["flat"])
    edge = soft(stroke + 0.0015 * hairs * real, 0.014 + 0.012 * real)
    tone = scale(p.colour("brow"), (0.96 + 0.06 * hairs) * (0.5 + 0.5 * planes["shade"]))
    face = over(face, tone, edge * p["brow_strength"])
    whisk_y = (y - p["mouth_y"] + 0.05).abs() - 0.02 - 0.10 * (x.abs() - 0.2)
    whiskers = torch.maximum(whisk_y.abs() - 0.003, (x.abs() - 0.32).abs() - 0.12)
    return painted("face", lighten(face, p.cover(whiskers) * 0.6 * p["whiskers"]))


def lay_in(p: Parameters, planes: Planes) -> Planes:
    """The finished face becomes part of the picture."""
    head = planes["head"]
    outline = soft(head.abs() - 0.008, 0.012)
    strength = outline * (0.10 + 0.55 * p["flat"]) * (1.0 - 0.6 * p["real"])
    face = tint(colour(planes, "face"), (0.42, 0.34, 0.34), strength)
    return painted("image", over(colour(planes, "image"), face, p.cover(head)))
