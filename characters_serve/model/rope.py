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
    """Angles of one chunk's and the prefix's tokens at time 0, and what a chunk adds to them.

    chunk_SD, prefix_SD: (S, D/2). time_D: (D/2,), the angle of one chunk's time, zero outside of
    the time planes. The first `followers` tokens of the prefix keep their distance to the current
    chunk; when `prefix_ages`, the others stay where they were in the stream, ever further behind.
    """

    chunk_SD: Tensor
    prefix_SD: Tensor
    time_D: Tensor
    followers: int = 0
    prefix_ages: bool = False

    def chunk(self, time: Tensor | float) -> Tensor:
        """Angles of a chunk's tokens at a time position. time: (...,) -> (..., S, D/2)."""
        if not isinstance(time, Tensor):
            # Not as a tensor: its copy to a GPU would make every step wait for the device.
            return self.chunk_SD + time * self.time_D
        return self.chunk_SD + time.float()[..., None, None] * self.time_D

    @property
    def prefix_moves(self) -> bool:
        return self.followers > 0 or self.prefix_ages

    def prefix(self, position: int = 0, moved_back: int = 0) -> Tensor:
        """Angles (S, D/2) of the prefix for a chunk at `position`, in a stream whose positions
        were moved back by `moved_back` chunks so far. Where nothing moves, it stays at time 0."""
        if not self.prefix_moves:
            return self.prefix_SD
        following = self.prefix_SD[: self.followers] + position * self.time_D
        ageing = self.prefix_SD[self.followers :]
        return torch.cat([following, ageing - moved_back * self.time_D])

    def shift(self, steps: float) -> Tensor:
        """Angles that move a key by a number of time steps: (1, D/2)."""
        return (self.time_D * steps)[None]


def rotary_positions(model: ModelConfig, device: torch.device | str = "cpu") -> RotaryPositions:
    if model.family == "live_avatar":
        return _live_avatar_positions(model, device)
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


def _live_avatar_positions(model: ModelConfig, device: torch.device | str) -> RotaryPositions:
    """Time counts latents: a chunk at position p has the times n p, n p + 1, .., with n latents a
    chunk; the first one stands at p = 1. The reference keeps a fixed distance to each chunk's
    first latent. The motion latents are those just before the stream: they end one latent before
    its start, and fall behind as it goes on. Their rows and columns are spread over the picture.
    In float64, because an hour of talk is 22,500 latents.
    """
    assert model.live_avatar is not None
    latents, rows, columns = model.latents_per_chunk, model.grid_rows, model.grid_columns
    time, row, column = (
        theta ** (-torch.arange(part // 2, dtype=torch.float64) * 2 / part)
        for part, theta in zip(model.rope_split, model.rope_theta, strict=True)
    )

    def angles(times: list[int], rows: list[int], columns: list[int]) -> Tensor:
        """Of a grid of tokens, in the order time, row, column."""
        axes = torch.meshgrid(*map(torch.tensor, (times, rows, columns)), indexing="ij")
        planes = zip(axes, (time, row, column), strict=True)
        return torch.cat([axis.reshape(-1, 1) * frequency for axis, frequency in planes], dim=-1)

    def spread(first: int, last: int, count: int) -> list[int]:
        """Whole numbers from first to last, rounded down; a single one is the first."""
        return [first + i * (last - first) // max(count - 1, 1) for i in range(count)]

    whole = list(range(rows)), list(range(columns))
    prefix = [angles([model.live_avatar.reference_distance], *whole)]
    newest = latents - 1  # one before the stream's first latent, which has the time `latents`
    for count, grid in zip(model.live_avatar.motion_latents, model.motion_grids, strict=True):
        oldest = newest - count + 1
        times = spread(oldest, newest, grid[0])
        prefix.append(angles(times, spread(0, rows - 1, grid[1]), spread(0, columns - 1, grid[2])))
        newest = oldest - 1
    time_plane = torch.cat([time * latents, torch.zeros(len(row) + len(column))])
    return RotaryPositions(
        angles(list(range(latents)), *whole).to(device),
        torch.cat(prefix).to(device),
        time_plane.to(device),
        followers=model.reference_tokens,
        prefix_ages=True,
    )


def rotate(x_BSHD: Tensor, angles_SD: Tensor) -> Tensor:
    """Turns each rotation plane by its angle. angles: (S, D/2) or with leading batch dims."""
    cos = angles_SD.cos().unsqueeze(-2).to(x_BSHD.dtype)
    sin = angles_SD.sin().unsqueeze(-2).to(x_BSHD.dtype)
    first, second = x_BSHD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
