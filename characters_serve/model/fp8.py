"""Projections in FP8: e4m3 weights and activations, one scale each, calibrated once a session.

In: a model with its weights. Out: the same model with its blocks' two matrices as e4m3; the keys
of checkpoints stay those of the plain model, which is converted after it is filled. An activation's
scale comes from the session's first forward pass and stays on the device; what does not fit it
later is clamped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from characters_kernels.fp8 import E4M3, E4M3_MAX, quantise, scale_for
from characters_kernels.linear_fp8 import linear_fp8
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.linear import AllReduce, RowParallelLinear, alone

Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""x (M, K) and weight (N, K), e4m3, and the scale of each -> (M, N), summed over the ranks. May be
memory that the next call writes."""


@dataclass(frozen=True, slots=True)
class MatmulThenSum:
    """The plain product: a library's matmul, and then the collective."""

    all_reduce: AllReduce
    dtype: torch.dtype

    def __call__(self, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        return self.all_reduce(linear_fp8(x, weight, x_scale, weight_scale, self.dtype))


class Fp8Linear(nn.Module):
    """(..., K) -> (..., N), in the format of the linear it is made from, and like it summed over
    the tensor-parallel ranks where that is row-parallel; each rank has scales of its own.

    The input is e4m3 over `input_scale` (a fused kernel made it so), or a float format that is
    converted here. saturated: (1,) int32 on the device, counts clamped values.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor

    def __init__(self, linear: nn.Linear, saturated: Tensor) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = (weight.abs().amax().float() / E4M3_MAX).reshape(1)
        self.register_buffer("weight", quantise(weight, scale, saturated))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", torch.ones(1, device=weight.device))
        all_reduce = linear.all_reduce if isinstance(linear, RowParallelLinear) else alone
        self.product: Product = MatmulThenSum(all_reduce, weight.dtype)
        self.calibrating = False
        self.saturated = saturated

    def forward(self, x: Tensor) -> Tensor:
        if self.calibrating:
            self.input_scale.copy_(scale_for(x.abs().amax()))
        if x.dtype != E4M3:
            x = quantise(x, self.input_scale, self.saturated)
        rows = x.reshape(-1, x.shape[-1])
        out = self.product(rows, self.weight, self.input_scale, self.weight_scale)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def convert_projections(model: CharacterDiT, saturated: Tensor) -> None:
    """Converts block by block, in place: there is no room for a second copy of 57B weights."""
    for block in model.blocks:
        for name in ("in_projection", "out_projection"):
            linear = getattr(block, name)
            if isinstance(linear, Fp8Linear):
                linear.saturated = saturated
            else:
                setattr(block, name, Fp8Linear(linear, saturated))


def input_scale(linear: nn.Module) -> Tensor:
    """(1,) float32: what a fused kernel divides its output by; 1 for a linear in a float format."""
    if isinstance(linear, Fp8Linear):
        return linear.input_scale
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return torch.ones(1, device=weight.device)


@contextmanager
def calibrating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, every projection takes its input's scale from the values that it is given."""
    linears = [module for module in modules if isinstance(module, Fp8Linear)]
    for linear in linears:
        linear.calibrating = True
    try:
        yield
    finally:
        for linear in linears:
            linear.calibrating = False
