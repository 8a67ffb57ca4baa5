"""The renderer's operations as C for the CPU: forty times as fast as torch, and no GPU needed.

In: what `fused_renderer.pixel_source` writes, and a C compiler. Out: the renderer's pictures.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from scripts.train_tiny.attributes import parameter_table
from scripts.train_tiny.fused_renderer import pixel_source
from scripts.train_tiny.renderer import HEIGHT, WIDTH, Renderer

_PRELUDE = """
#include <math.h>
#define __device__ static
#define __forceinline__ inline
#define fsin sinf
#define fcos cosf
#define __expf expf
#define __fdividef(a, b) ((a) / (b))
static float frem(float v, float m) { return v - m * floorf(v / m); }
static float fsign(float v) { return (v > 0.f) - (v < 0.f); }
"""


class HostRenderer(Renderer):
    """Draws with compiled C; the same pictures as Renderer to rounding.

    every: one pixel of so many in a row and a column is drawn. optimise: the compiler's level,
    which pays from a few dozen pictures on.
    """

    def __init__(self, *, every: int = 1, optimise: int = 1) -> None:
        super().__init__("cpu")
        self._shape = (HEIGHT // every, WIDTH // every)
        rows, columns = self._shape
        loop = f"""
void draw(const float* table, float* out) {{
  for (int row = 0; row < {rows}; ++row)
    for (int column = 0; column < {columns}; ++column) {{
      const float u = (column * {every} + 0.5f) / 128.f - 1.5f;
      const float v = (row * {every} + 0.5f) / 128.f - 1.f;
      draw_pixel(table, u, v, out + 3 * (row * {columns} + column));
    }}
}}
"""
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "pixel.c", Path(folder) / "pixel.so"
            source.write_text(_PRELUDE + pixel_source() + loop)
            flags = [f"-O{optimise}", "-w", "-shared", "-fPIC"]
            subprocess.run(["cc", *flags, "-o", library, source, "-lm"], check=True)
            self._draw = ctypes.CDLL(str(library)).draw

    @torch.no_grad()
    def __call__(self, attributes: Tensor, controls: Tensor) -> Tensor:
        table = parameter_table(attributes, controls).contiguous()
        drawn = torch.empty(len(table), *self._shape, 3)
        for one, out in zip(table, drawn, strict=True):
            self._draw(ctypes.c_void_p(one.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        return drawn.permute(0, 3, 1, 2).contiguous()
