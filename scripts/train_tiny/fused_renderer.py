"""The whole drawing as one CUDA kernel, generated from the trace of the torch code.

Every operation of `renderer.LAYERS` is elementwise, so its trace is straight-line code for one
pixel: all of it stays in registers. Compiling layer by layer with Inductor took 141 s on an H200
and drew 11,600 frames/s; nvcc builds this in seconds, before any GPU is taken.

    python -m scripts.train_tiny.fused_renderer --out scripts/train_tiny/data/renderer.cubin
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from scripts.train_tiny.renderer import (
    HEIGHT,
    LAYERS,
    PARAMETER_INDEX,
    WIDTH,
    Planes,
    Renderer,
    pixel_grid,
    prepared,
)

_THREADS: Final = 256
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

_BINARY: Final[dict[str, str]] = {
    "mul.Tensor": "({} * {})",
    "add.Tensor": "({} + {})",
    "sub.Tensor": "({} - {})",
    "div.Tensor": "__fdividef({}, {})",
    "maximum.default": "fmaxf({}, {})",
    "minimum.default": "fminf({}, {})",
    "atan2.default": "atan2f({}, {})",
    "remainder.Scalar": "frem({}, {})",
    "gt.Scalar": "float({} > {})",
    "lt.Scalar": "float({} < {})",
}
_UNARY: Final[dict[str, str]] = {
    "abs.default": "fabsf({})",
    "sin.default": "fsin({})",
    "cos.default": "fcos({})",
    "sqrt.default": "sqrtf({})",
    "exp.default": "__expf({})",
    "neg.default": "(-{})",
    "floor.default": "floorf({})",
    "sign.default": "fsign({})",
    "unsqueeze.default": "{}",
    "scalar_tensor.default": "{}",
}


def kernel_source() -> str:
    """CUDA C: (table float (n, K), out bf16 (n, 3, HEIGHT, WIDTH)) -> one thread for each pixel."""

    def draw(table: Tensor, x: Tensor, y: Tensor) -> Tensor:
        planes: Planes = ()
        for layer in LAYERS:
            planes = layer(planes, table, x, y)
        return torch.stack(planes, dim=1)

    x, y = pixel_grid("cpu")
    table = torch.rand(2, len(PARAMETER_INDEX))
    graph = make_fx(draw)(table, x[..., :7], y[:, :5]).graph
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        match node.op:
            case "placeholder":
                names[node] = ("table", "x", "y")[len(names)]
            case "call_function" if node.target is torch.ops.aten.stack.default:
                channels = [names[part] for part in node.args[0]]
            case "call_function":
                names[node] = f"v{len(names)}"
                lines.append(f"const float {names[node]} = {_expression(node, names)};")
    body = "\n  ".join(lines)
    stores = "\n  ".join(
        f"out[(image * 3 + {i}) * {HEIGHT * WIDTH} + pixel] = __float2bfloat16({channel});"
        for i, channel in enumerate(channels)
    )
    x0, y0 = float(x[0, 0, 0]), float(y[0, 0, 0])
    step = float(x[0, 0, 1] - x[0, 0, 0])
    return f"""{_HEADER}
extern "C" __global__ void __launch_bounds__({_THREADS})
{_KERNEL}(const float* __restrict__ tables, __nv_bfloat16* __restrict__ out) {{
  __shared__ float table[{len(PARAMETER_INDEX)}];
  const long image = blockIdx.y;
  for (int i = threadIdx.x; i < {len(PARAMETER_INDEX)}; i += blockDim.x)
    table[i] = tables[image * {len(PARAMETER_INDEX)} + i];
  __syncthreads();
  const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = {x0!r}f + {step!r}f * (pixel % {WIDTH});
  const float y = {y0!r}f + {step!r}f * (pixel / {WIDTH});
  {body}
  {stores}
}}
"""


def _expression(node: fx.Node, names: dict[fx.Node, str]) -> str:
    def value(argument: Any) -> str:
        return names[argument] if isinstance(argument, fx.Node) else f"{float(argument)!r}f"

    operation = str(node.target).removeprefix("aten.")
    arguments = list(node.args)
    if operation in _BINARY and not node.kwargs:
        return _BINARY[operation].format(value(arguments[0]), value(arguments[1]))
    if operation in _UNARY:
        return _UNARY[operation].format(value(arguments[0]))
    match operation:
        case "select.int":
            return f"table[{arguments[2]}]"
        case "rsub.Scalar":
            return f"({value(arguments[1])} - {value(arguments[0])})"
        case "zeros_like.default":
            return "0.f"
        case "where.self":
            condition, first, second = (value(argument) for argument in arguments)
            return f"({condition} != 0.f ? {first} : {second})"
        case "pow.Tensor_Scalar" if arguments[1] == 2:
            return f"({value(arguments[0])} * {value(arguments[0])})"
        case "clamp.default":
            low, high = [*arguments, None, None][1:3]
            text = value(arguments[0])
            text = text if low is None else f"fmaxf({text}, {value(low)})"
            return text if high is None else f"fminf({text}, {value(high)})"
    raise NotImplementedError(f"no CUDA for {node.target} {node.args} {node.kwargs}")


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
    """Draws with the built kernel; the same pictures as Renderer to rounding."""

    def __init__(self, device: torch.device, cubin: Path) -> None:
        super().__init__(device, batch=1, compiled=False)
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
        table = prepared(attributes, controls)
        tables = torch.stack(list(table.values()), dim=1).contiguous()
        count = len(tables)
        out = torch.empty((count, 3, HEIGHT, WIDTH), device=tables.device, dtype=torch.bfloat16)
        pointers = (ctypes.c_void_p(tables.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(p) for p in pointers))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        blocks = HEIGHT * WIDTH // _THREADS
        _check(
            self._driver.cuLaunchKernel(
                self._function, blocks, count, 1, _THREADS, 1, 1, 0, stream, arguments, None
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
