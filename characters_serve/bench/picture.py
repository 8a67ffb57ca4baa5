"""In: a waterfall's result. Out: its picture, a PNG with one bar for each set of optimisations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw, ImageFont

from characters_serve.bench.rank_step import CATEGORIES

_WIDTH, _ROW, _LEFT, _TOP, _RIGHT = 1200, 44, 260, 90, 150
_COLOURS: Final = {
    "matmul": "#3b6fb6",
    "attention": "#6aa9d8",
    "cache": "#e07b39",
    "norm_quant": "#e8b04a",
    "other": "#9a9a9a",
}
_GAPS = "#dddddd"


def draw_waterfall(result: dict[str, Any], budget_ms: float, path: Path) -> None:
    """budget_ms: the real-time limit of a step, drawn as a line."""
    bars = result["waterfall"]
    scale = (_WIDTH - _LEFT - _RIGHT) / max(
        budget_ms * 1.05, *(bar["step_ms_median"] for bar in bars)
    )
    image = Image.new("RGB", (_WIDTH, _TOP + _ROW * len(bars) + 60), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(16)
    title = (
        f"One step of {result['model']}, one rank of {result['shard_of']}, synthetic weights, "
        f"{result['device']}"
    )
    draw.text((20, 16), title, "black", ImageFont.load_default(20))
    x = 20
    for name in (*CATEGORIES, "gaps"):
        draw.rectangle((x, 54, x + 16, 70), _COLOURS.get(name, _GAPS))
        draw.text((x + 22, 52), name.replace("_", " + "), "black", font)
        x += 50 + int(draw.textlength(name.replace("_", " + "), font))
    for index, bar in enumerate(bars):
        top = _TOP + index * _ROW
        label = bar["rung"] if index == 0 else f"+ {bar['rung']}"
        draw.text((20, top + 8), label, "black", font)
        end = _LEFT + bar["step_ms_median"] * scale
        draw.rectangle((_LEFT, top, end, top + _ROW - 12), _GAPS)
        left = float(_LEFT)
        for name, spent_ms in (bar["by_category"] or {}).items():
            right = min(end, left + spent_ms * scale)
            draw.rectangle((left, top, right, top + _ROW - 12), _COLOURS[name])
            left = right
        draw.text((end + 8, top + 8), f"{bar['step_ms_median']:.1f} ms", "black", font)
    bottom = _TOP + _ROW * len(bars)
    marks = {f"real time {budget_ms:.1f}": budget_ms}
    if "floor" in result:
        marks[f"bare matmul + attention {result['floor']['sum_ms']:.1f}"] = result["floor"][
            "sum_ms"
        ]
    for index, (label, at_ms) in enumerate(marks.items()):
        at = _LEFT + at_ms * scale
        draw.line((at, _TOP - 6, at, bottom), "black", 1)
        draw.text((at, bottom + 4 + 22 * index), label, "black", font, anchor="ma")
    image.save(path)
