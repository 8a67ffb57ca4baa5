"""Three-axis rotary positions: time (the chunk), row and column of each token.

Letters: B batch, S slots or tokens, H heads, D head dim. The D/2 rotation planes of a head pair
dimension i with i + D/2 and are split between time, row and column. Attention scores depend only
on differences of positions, which is what lets a cache rotate keys once, when they are written,
and later move a whole window with one rotation (Su et al. 2021, arXiv 2104.09864).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from characters_serve.config import ModelConfig

# Audio and control tokens sit above the picture, one row each, spread over its columns.
_AUDIO_ROW = -2.0
_CONTROL_ROW = -3.0


@dataclass(frozen=True)
class RotaryPositions:
    """Fixed row and column angles of one chunk's and the prefix's tokens, and the time frequencies.

    chunk_SD, prefix_SD: (S, D/2), zero in the time planes. time_D: (D/2,), zero elsewhere.
    """

    chunk_SD: Tensor
    prefix_SD: Tensor
    time_D: Tensor

    def chunk(self, time: Tensor | float) -> Tensor:
        """Angles of a chunk's tokens at a time position. time: (...,) -> (..., S, D/2)."""
        if not isinstance(time, Tensor):
            # Not as a tensor: its copy to a GPU would make every step wait for the device.
            return self.chunk_SD + time * self.time_D
        return self.chunk_SD + time.float()[..., None, None] * self.time_D

    def prefix(self) -> Tensor:
        """The prefix stays at time 0."""
        return self.prefix_SD

    def shift(self, steps: float) -> Tensor:
        """Angles that move a key by a number of time steps: (1, D/2)."""
        return (self.time_D * steps)[None]


def rotary_positions(model: ModelConfig, device: torch.device | str = "cpu") -> RotaryPositions:
    pairs = [part // 2 for part in model.rope_split]
    time, row, column = (
        theta ** (-torch.arange(n, dtype=torch.float32) / n)
        for n, theta in zip(pairs, model.rope_theta, strict=True)
    )
    zeros = torch.zeros(pairs[0])

    def angles(rows: Tensor, columns: Tensor) -> Tensor:
        return torch.cat(
            [zeros.expand(len(rows), -1), rows[:, None] * row, columns[:, None] * column], dim=-1
        )

    chunk_rows = torch.arange(model.grid_rows).repeat_interleave(model.grid_columns).float()
    chunk_columns = torch.arange(model.grid_columns).repeat(model.grid_rows).float()
    audio_columns = torch.arange(model.audio_tokens) * (model.grid_columns / model.audio_tokens)
    control_columns = torch.arange(model.control_tokens).float()
    # The reference covers the same picture, whatever its own grid.
    row_step = model.grid_rows / model.reference_rows
    column_step = model.grid_columns / model.reference_columns
    reference_rows = torch.arange(model.reference_rows).repeat_interleave(model.reference_columns)
    reference_columns = torch.arange(model.reference_columns).repeat(model.reference_rows)
    prompt = torch.arange(model.prompt_slots).float()
    chunk = angles(
        torch.cat(
            [
                chunk_rows,
                torch.full((model.audio_tokens,), _AUDIO_ROW),
                torch.full((model.control_tokens,), _CONTROL_ROW),
            ]
        ),
        torch.cat([chunk_columns, audio_columns, control_columns]),
    )
    prefix = angles(
        torch.cat([reference_rows * row_step, torch.full_like(prompt, _CONTROL_ROW - 1)]),
        torch.cat([reference_columns * column_step, prompt]),
    )
    time_plane = torch.cat([time, torch.zeros(pairs[1] + pairs[2])])
    return RotaryPositions(chunk.to(device), prefix.to(device), time_plane.to(device))


def rotate(x_BSHD: Tensor, angles_SD: Tensor) -> Tensor:
    """Turns each rotation plane by its angle. angles: (S, D/2) or with leading batch dims."""
    cos = angles_SD.cos().unsqueeze(-2).to(x_BSHD.dtype)
    sin = angles_SD.sin().unsqueeze(-2).to(x_BSHD.dtype)
    first, second = x_BSHD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
