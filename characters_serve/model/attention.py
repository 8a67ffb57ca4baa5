"""Attention of one chunk's queries over all cached slots. B batch, S slots, H heads, D head dim."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def attention(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> Tensor:
    """Softmax attention, every query over every key: (B, S, H, D) -> (B, S, H x D)."""
    out = functional.scaled_dot_product_attention(
        q_BSHD.transpose(1, 2), k_BSHD.transpose(1, 2), v_BSHD.transpose(1, 2)
    )
    return out.transpose(1, 2).flatten(-2)
