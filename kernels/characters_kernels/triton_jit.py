"""Triton where it is installed. Without it the modules import, and their references serve CPUs.

`TRITON_INTERPRET=1`, set before the import, runs the kernels on CPU tensors, one program after
another: that is how they are checked without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

try:
    import triton
    from triton import language
except ModuleNotFoundError:
    triton = language = None

tl: Any = language
INSTALLED = triton is not None
INTERPRETED = INSTALLED and bool(triton.knobs.runtime.interpret)


class _Missing:
    """A kernel that was not compiled: launching it says what is missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: object) -> Callable[..., None]:
        raise RuntimeError(f"{self._name} needs Triton: install the extra `gpu`")


def jit(kernel: Callable[..., Any], **options: Any) -> Any:
    return triton.jit(kernel, **options) if INSTALLED else _Missing(kernel.__name__)


@jit
def _gpu_clock_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


# Within a kernel: a clock that all its programs share. The interpreter knows no assembly.
now_ns: Any = time.monotonic_ns if INTERPRETED else _gpu_clock_ns


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
