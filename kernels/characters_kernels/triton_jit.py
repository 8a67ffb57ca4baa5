"""Triton where it is installed. Without it the modules import, and their references serve CPUs.

`TRITON_INTERPRET=1`, set before the import, runs the kernels on CPU tensors, one program after
another: that is how they are checked without a GPU.
"""

from __future__ import annotations

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


def jit(kernel: Callable[..., Any]) -> Any:
    return triton.jit(kernel) if INSTALLED else _Missing(kernel.__name__)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
