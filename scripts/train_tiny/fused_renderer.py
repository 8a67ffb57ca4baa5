"""The whole drawing as one CUDA kernel, generated from the traces of the torch code.

Every operation of a layer is elementwise, so its trace is straight-line code for one pixel: all of
it stays in registers. Layers that a picture or a pixel has no part in are branched over. Compiling
layer by layer with Inductor took 141 s on an H200; nvcc builds this in seconds, before any GPU is
taken.

    python -m scripts.train_tiny.fused_renderer --out scripts/train_tiny/data/renderer.cubin
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.train_tiny import scene
from scripts.train_tiny.attributes import PARAMETER_INDEX, parameter_table
from scripts.train_tiny.renderer import (
    HEIGHT,
    LAYERS,
    WIDTH,
    Renderer,
    pixel_grid,
)
from scripts.train_tiny.shapes import Parameters, Planes

_TILE_WIDTH: Final = 32
_TILE_HEIGHT: Final = 8
"""A block draws one tile, so that neighbouring threads leave out the same layers."""
_KERNEL: Final = "draw_characters"

_HEADER: Final = """
#include <cuda_bf16.h>
// Reduced to one turn first: the fast sine is only accurate near zero.
__device__ __forceinline__ float fsin(float v) {
  return __sinf(v - 6.283185307f * rintf(v * 0.159154943f));
}
__device__ __forceinline__ float fcos(float v) {
  return __cosf(v - 6.283185307f * rintf(v * 0.159154943f));
}
__device__ __forceinline__ float frem(float v, float m) { return v - m * floorf(v / m); }
__device__ __forceinline__ float fsign(float v) { return (v > 0.f) - (v < 0.f); }
"""

_FORMS: Final = {
    "mul.Tensor": "({} * {})",
    "add.Tensor": "({} + {})",
    "sub.Tensor": "({} - {})",
    "rsub.Scalar": "({1} - {0})",
    "div.Tensor": "__fdividef({}, {})",
    "maximum.default": "fmaxf({}, {})",
    "minimum.default": "fminf({}, {})",
    "atan2.default": "atan2f({}, {})",
    "remainder.Scalar": "frem({}, {})",
    "remainder.Tensor": "frem({}, {})",
    "gt.Scalar": "({} > {} ? 1.f : 0.f)",
    "lt.Scalar": "({} < {} ? 1.f : 0.f)",
    "lt.Tensor": "({} < {} ? 1.f : 0.f)",
    "where.self": "({} != 0.f ? {} : {})",
    "abs.default": "fabsf({})",
    "sin.default": "fsin({})",
    "cos.default": "fcos({})",
    "sqrt.default": "sqrtf({})",
    "exp.default": "__expf({})",
    "neg.default": "(-{})",
    "floor.default": "floorf({})",
    "sign.default": "fsign({})",
    "unsqueeze.default": "{}",
    "slice.Tensor": "{}",
    "detach.default": "{}",
    "scalar_tensor.default": "{}",
}
"""The C of each operation that drawings are made of."""


def pixel_source() -> str:
    """C: (float* table, float u, float v, float* rgb) drawing one pixel."""
    names = ["u", "v"]  # of the planes, in the order in which they come to be
    lines: list[str] = []

    def add(code: _Code, guard: str | None) -> None:
        for name in code.results:
            if name not in names:
                names.append(name)
                lines.append(f"float {_variable(name)} = 0.f;")
        body = [*code.lines, *(f"{_variable(n)} = {v};" for n, v in code.results.items())]
        lines.append(f"{'' if guard is None else f'if ({guard}) '}{{")
        lines.extend(f"  {line}" for line in body)
        lines.append("}")

    def stage(p: Parameters, planes: Planes) -> Planes:
        return scene.stage(p, planes["u"], planes["v"])

    add(_trace(stage, names, "s"), None)
    for index, layer in enumerate(LAYERS):
        guards = []
        if layer.when is not None:
            guards.append(f"table[{PARAMETER_INDEX[layer.when]}] != 0.f")
        if layer.within is not None:
            code = _trace(_as_plane(layer.within), names, f"w{index}_")
            lines.extend(code.lines)
            guards.append(f"{code.results['within']} < 0.f")
        add(_trace(layer.paint, names, f"v{index}_"), " && ".join(guards) or None)
    lines.extend(f"rgb[{c}] = {_variable(f'image.{c}')};" for c in range(3))
    body = "\n  ".join(lines)
    return f"""__device__ __forceinline__ void draw_pixel(
    const float* table, float plane_u, float plane_v, float* rgb) {{
  {body}
}}
"""


def kernel_source() -> str:
    """CUDA C: (table float (n, K), out bf16 (n, 3, HEIGHT, WIDTH)) -> one thread for each pixel."""
    u, v = pixel_grid("cpu")
    u0, v0 = float(u[0, 0, 0]), float(v[0, 0, 0])
    step = float(u[0, 0, 1] - u[0, 0, 0])
    across = WIDTH // _TILE_WIDTH
    return f"""{_HEADER}
{pixel_source()}
extern "C" __global__ void __launch_bounds__({_TILE_WIDTH * _TILE_HEIGHT})
{_KERNEL}(const float* __restrict__ tables, __nv_bfloat16* __restrict__ out) {{
  __shared__ float table[{len(PARAMETER_INDEX)}];
  const long image = blockIdx.y;
  for (int i = threadIdx.x; i < {len(PARAMETER_INDEX)}; i += blockDim.x)
    table[i] = tables[image * {len(PARAMETER_INDEX)} + i];
  __syncthreads();
  const int column = (blockIdx.x % {across}) * {_TILE_WIDTH} + threadIdx.x % {_TILE_WIDTH};
  const int row = (blockIdx.x / {across}) * {_TILE_HEIGHT} + threadIdx.x / {_TILE_WIDTH};
  float rgb[3];
  draw_pixel(table, {u0!r}f + {step!r}f * column, {v0!r}f + {step!r}f * row, rgb);
  for (int channel = 0; channel < 3; ++channel)
    out[((image * 3 + channel) * {HEIGHT} + row) * {WIDTH} + column] =
        __float2bfloat16(rgb[channel]);
}}
"""


class _Code(NamedTuple):
    """Statements, and for each result the expression that holds it after them."""

    lines: list[str]
    results: dict[str, str]


def _as_plane(
    within: Callable[[Parameters, Planes], Tensor],
) -> Callable[[Parameters, Planes], Planes]:
    return lambda p, planes: {"within": within(p, planes)}


def _variable(plane: str) -> str:
    return "plane_" + plane.replace(".", "_")


def _trace(paint: Callable[[Parameters, Planes], Planes], planes: list[str], prefix: str) -> _Code:
    """The C of what ``paint`` computes from these planes."""
    table = torch.rand(1, len(PARAMETER_INDEX))
    values = {name: torch.rand(1, 1, 1) for name in planes}
    named = [(table, "table"), *((value, _variable(name)) for name, value in values.items())]
    with _Recorder(named, prefix) as recorder:
        changed = paint(Parameters(table, PARAMETER_INDEX), values)
    return _Code(recorder.lines, {name: recorder.value(value) for name, value in changed.items()})


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation on tensors as a line of C."""

    def __init__(self, named: list[tuple[Tensor, str]], prefix: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self._prefix = prefix
        self._kept = [tensor for tensor, _ in named]  # an id is only good while its tensor lives
        self._names = {id(tensor): name for tensor, name in named}

    def value(self, argument: Any) -> str:
        if isinstance(argument, Tensor):
            return self._names[id(argument)]
        return f"{float(argument)!r}f"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        result: Tensor = func(*args, **(kwargs or {}))
        name = f"{self._prefix}{len(self.lines)}"
        self.lines.append(f"const float {name} = {self._expression(str(func), args)};")
        self._kept.append(result)
        self._names[id(result)] = name
        return result

    def _expression(self, function: str, arguments: Any) -> str:
        operation = function.removeprefix("aten.")
        if operation == "select.int":
            return f"table[{arguments[2]}]"
        if operation == "zeros_like.default":
            return "0.f"
        texts = [self.value(argument) for argument in arguments if argument is not None]
        if operation in _FORMS:
            return _FORMS[operation].format(*texts)
        if operation == "pow.Tensor_Scalar" and arguments[1] == 2:
            return "({0} * {0})".format(*texts)
        if operation == "clamp.default":
            low, high = [*arguments, None, None][1:3]
            text = texts[0]
            text = text if low is None else f"fmaxf({text}, {self.value(low)})"
            return text if high is None else f"fminf({text}, {self.value(high)})"
        raise NotImplementedError(f"no C for {function}")


def build(out: Path, architecture: str = "sm_90") -> None:
    """Needs nvcc, no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "renderer.cu"
        source.write_text(kernel_source())
        subprocess.run(
            ["nvcc", "-cubin", f"-arch={architecture}", "-O3", "-o", str(out), str(source)],
            check=True,
        )


class FusedRenderer(Renderer):
    """Draws with the built kernel, in bfloat16; the same pictures as Renderer to rounding."""

    def __init__(self, device: torch.device, cubin: Path) -> None:
        super().__init__(device)
        torch.zeros(1, device=device)  # makes the context that the module is loaded into
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._image = cubin.read_bytes()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(self._driver.cuModuleLoadData(ctypes.byref(module), self._image))
        _check(
            self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, _KERNEL.encode())
        )

    @torch.no_grad()
    def __call__(self, attributes: Tensor, controls: Tensor) -> Tensor:
        tables = parameter_table(attributes, controls).contiguous()
        count = len(tables)
        out = torch.empty((count, 3, HEIGHT, WIDTH), device=tables.device, dtype=torch.bfloat16)
        pointers = (ctypes.c_void_p(tables.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(p) for p in pointers))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        threads = _TILE_WIDTH * _TILE_HEIGHT
        blocks = HEIGHT * WIDTH // threads
        _check(
            self._driver.cuLaunchKernel(
                self._function, blocks, count, 1, threads, 1, 1, 0, stream, arguments, None
            )
        )
        return out


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA driver error {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
