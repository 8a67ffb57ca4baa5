"""Projections in FP8: e4m3 weights and activations, one scale each, calibrated once a session.

In: a model with its weights. Out: the same model with its blocks' matrices as e4m3; the keys of
checkpoints stay those of the plain model, which is converted after it is filled. An activation's
scale comes from the largest value of the session's first forward pass (of an open family: of its
first chunks) and stays on the device; what does not fit it later is clamped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from characters_kernels.fp8 import E4M3, E4M3_MAX, computes_in_fp8, quantise, scale_for
from characters_kernels.linear_fp8 import linear_fp8
from characters_serve.config import ConfigError
from characters_serve.model.linear import AllReduce, RowParallelLinear, alone

Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""x (M, K) and weight (N, K), e4m3, and the scale of each -> (M, N), summed over the ranks. May be
memory that the next call writes."""


@dataclass(frozen=True, slots=True)
class MatmulThenSum:
    """The plain product: a library's matmul, and then the collective."""

    all_reduce: AllReduce
    dtype: torch.dtype
    bias: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        product = linear_fp8(x, weight, x_scale, weight_scale, self.dtype, self.bias)
        return self.all_reduce(product)


class Fp8Linear(nn.Module):
    """(..., K) -> (..., N), in the format of the linear it is made from, and like it summed over
    the tensor-parallel ranks where that is row-parallel; each rank has scales of its own.

    The input is e4m3 over `input_scale` (a fused kernel made it so), or a float format that is
    converted here. saturated: (1,) int32 on the device, counts clamped values.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    largest_input: Tensor

    def __init__(self, linear: nn.Linear, saturated: Tensor) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = (weight.abs().amax().float() / E4M3_MAX).reshape(1)
        self.register_buffer("weight", quantise(weight, scale, saturated))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", torch.ones(1, device=weight.device))
        self.register_buffer("largest_input", torch.zeros(1, device=weight.device))
        if isinstance(linear, RowParallelLinear):
            all_reduce, self.bias = linear.all_reduce, linear.added_bias
        else:
            all_reduce, self.bias = alone, linear.bias
        self.product: Product = MatmulThenSum(all_reduce, weight.dtype, self.bias)
        self.calibrating = False
        self.saturated = saturated

    def forward(self, x: Tensor) -> Tensor:
        if self.calibrating:
            torch.maximum(self.largest_input, x.abs().amax(), out=self.largest_input)
            self.input_scale.copy_(scale_for(self.largest_input))
        if x.dtype != E4M3:
            x = quantise(x, self.input_scale, self.saturated)
        rows = x.reshape(-1, x.shape[-1])
        out = self.product(rows, self.weight, self.input_scale, self.weight_scale)
        return out.reshape(*x.shape[:-1], out.shape[-1])


class HasProjections(Protocol):
    def projections(self) -> Iterable[tuple[nn.Module, str]]:
        """The matrices that every step multiplies by: modules, and the names of linears in them."""


def convert_projections(model: HasProjections, saturated: Tensor) -> None:
    """Converts one by one, in place: there is no room for a second copy of 57B weights.

    Raises ConfigError on a GPU that does not compute in FP8: its first matmul would fail.
    """
    if not computes_in_fp8(saturated.device):
        raise ConfigError(
            f"optimizations.fp8_gemm needs a GPU that computes in FP8, not {saturated.device}"
        )
    for module, name in model.projections():
        linear = getattr(module, name)
        if isinstance(linear, Fp8Linear):
            linear.saturated = saturated
        else:
            setattr(module, name, Fp8Linear(linear, saturated))


def input_scale(linear: nn.Module) -> Tensor:
    """(1,) float32: what a fused kernel divides its output by; 1 for a linear in a float format."""
    if isinstance(linear, Fp8Linear):
        return linear.input_scale
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return torch.ones(1, device=weight.device)


def forget_scales(modules: Iterable[nn.Module]) -> None:
    """For a new session: nothing was seen yet."""
    for module in modules:
        if isinstance(module, Fp8Linear):
            module.largest_input.zero_()


@contextmanager
def calibrating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, every projection's scale grows with the values that it is given."""
    linears = [module for module in modules if isinstance(module, Fp8Linear)]
    for linear in linears:
        linear.calibrating = True
    try:
        yield
    finally:
        for linear in linears:
            linear.calibrating = False
