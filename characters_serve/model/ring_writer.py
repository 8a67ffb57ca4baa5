"""A chunk's q, k, v from a block's in-projection into a ring of slots, in one kernel.

In: the in-projection's output, and where the chunk stands. Out: keys and values in their slots, and
what the rotated queries find there. Slot and angles live on the device, so that a captured step can
be replayed. Knows nothing of which slots are whose.

Letters: S tokens of a chunk, L slots, H heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from characters_kernels.ring_store import ring_store
from characters_serve.config import ModelConfig
from characters_serve.model.kv_numbers import Numbers


class QueryKeyNorm(NamedTuple):
    """RMS norms of q and k: of each head with weights (D,), or of the whole width with this rank's
    weights (H x D), the tokens' square sums (S, 2) over all ranks, and that width."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    square_sums: Tensor | None = None
    width: int = 0


class RingWriter:
    def __init__(
        self, model: ModelConfig, numbers: Numbers, device: torch.device | str, saturated: Tensor
    ) -> None:
        tokens, heads, head_dim = model.tokens_per_chunk, model.num_heads, model.head_dim
        self.slot = torch.zeros((), dtype=torch.int64, device=device)
        self._cos, self._sin = torch.zeros(2, tokens, head_dim // 2, device=device)
        self._q = torch.zeros(1, tokens, heads, head_dim, dtype=numbers.dtype, device=device)
        self._numbers = numbers
        self._saturated = saturated

    def aim(self, slot: int, angles_SD: Tensor) -> None:
        """Where the current chunk goes, and the angles of its tokens."""
        self.slot.fill_(slot)
        torch.cos(angles_SD, out=self._cos)
        torch.sin(angles_SD, out=self._sin)

    def attend(
        self,
        block: int,
        projected: Tensor,
        norm: QueryKeyNorm,
        k_1LHD: Tensor,
        v_1LHD: Tensor,
        read: slice,
    ) -> Tensor:
        """projected: (>= S, | q | k | v | ...), not normed. read: slots. Returns (S, H x D)."""
        ring_store(
            projected,
            norm.q_weight,
            norm.k_weight,
            self._cos,
            self._sin,
            self.slot,
            *self._numbers.scales_QKV[:, block],
            norm.eps,
            self._q[0],
            k_1LHD[0],
            v_1LHD[0],
            self._saturated,
            norm.square_sums,
            norm.width,
        )
        return self._numbers.attend(block, self._q, k_1LHD[:, read], v_1LHD[:, read])[0]
