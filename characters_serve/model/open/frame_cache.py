"""What a causal Wan model remembers: the stream's first latents (the sink) and the last ones.

In: a chunk's q, k, v in each block and pass. Out: attention over what is remembered. Owns its
buffers and which latent is where; knows nothing of the model around it. The same protocol as
model/kv_cache.py; its prefix is the stream's own beginning, and its window counts latents.

Letters: B batch, S tokens, H heads, D head dim. Slots: [sink_latents | the rest of window_latents],
and the current chunk is part of the window. Each pass writes the chunk's slots before it reads, so
what stays is what the last pass wrote.

Where a model wants its sink at a constant distance, the published code rotates every key by its
slot at each read. Scores depend on differences of times only: it is the same to rotate keys once,
by their latent's number, and to move the few of the sink once a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from characters_serve.config import ModelConfig, Optimizations
from characters_serve.model.attention import attention
from characters_serve.model.rope import rotate


class LatentPositions:
    """Angles of the tokens of whole latents, whose times are their numbers in the stream.

    Made in float64 and brought back to one turn, so that a stream may run for ever; the published
    models look times up in a table that ends at 1,024.
    """

    def __init__(self, model: ModelConfig, device: torch.device | str) -> None:
        time, row, column = (
            theta ** (-torch.arange(part // 2, device=device, dtype=torch.float64) * 2 / part)
            for part, theta in zip(model.rope_split, model.rope_theta, strict=True)
        )
        rows = torch.arange(model.grid_rows, device=device)
        columns = torch.arange(model.grid_columns, device=device)
        at_row = rows.repeat_interleave(model.grid_columns)[:, None] * row
        at_column = columns.repeat(model.grid_rows)[:, None] * column
        self._time = time
        self._place = torch.cat([at_row, at_column], dim=-1)

    def of(self, times: Iterable[int]) -> Tensor:
        """times: one for each latent -> float32 (latents x tokens, D/2)."""
        at = torch.tensor(list(times), dtype=torch.float64).to(self._time.device)
        time = (at[:, None] * self._time)[:, None].expand(-1, len(self._place), -1)
        place = self._place.expand(len(at), -1, -1)
        angles = torch.cat([time, place], dim=-1).flatten(0, 1)
        return angles.remainder(2 * math.pi).float()


class PlainFrameCache:
    """The published form: keys unrotated, the window moved by copying, all rotated at each read."""

    def __init__(
        self, model: ModelConfig, batch: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        assert model.causal_wan is not None
        own = model.causal_wan
        self._window, self._sink = own.window_latents, own.sink_latents
        self._sink_moves = own.sink_distance == "constant"
        self._chunk_latents = model.latents_per_chunk
        self._tokens = model.grid_rows * model.grid_columns
        self._positions = LatentPositions(model, device)
        slots = self._window * self._tokens
        shape = (model.num_blocks, model.num_caches, batch, slots, model.num_heads, model.head_dim)
        self._k = torch.zeros(shape, device=device, dtype=dtype)
        self._v = torch.zeros(shape, device=device, dtype=dtype)
        self.clear()

    def clear(self) -> None:
        """Forgets the stream."""
        self._k.zero_()
        self._v.zero_()
        self._next = 0
        self.latents: list[int] = []

    def calibrate(self, block: int, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        """Keys and values stay in the model's own format."""

    def store_prefix(self, block: int, cache: int, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        raise NotImplementedError("a causal Wan model has no prefix but its stream's beginning")

    def begin_step(self, num_latents: int | None = None) -> None:
        """Makes room for the next chunk, in place of the oldest latents after the sink."""
        count = self._chunk_latents if num_latents is None else num_latents
        current = range(self._next, self._next + count)
        self._next += count
        slots = self._take_slots(current)
        first = torch.tensor(slots) * self._tokens
        self._slots = (first[:, None] + torch.arange(self._tokens)).flatten().to(self._k.device)
        self._filled = self._slots_of(0, len(self.latents))
        self._chunk_angles = self._positions.of(current)
        self._turn(current)

    def attend(self, block: int, cache: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes the current chunk's k, v (not rotated); returns (B, S, H x D)."""
        self._store(block, cache, k, v)
        keys = rotate(self._k[block, cache, :, self._filled], self._read_angles)
        return attention(
            rotate(q, self._chunk_angles), keys, self._v[block, cache, :, self._filled]
        )

    def _store(self, block: int, cache: int, k: Tensor, v: Tensor) -> None:
        self._k[block, cache].index_copy_(1, self._slots, k)
        self._v[block, cache].index_copy_(1, self._slots, v)

    def _turn(self, current: range) -> None:
        """Once a chunk: whatever its keys' positions need."""
        self._read_angles = self._positions.of(map(self._time, self.latents))

    def _take_slots(self, current: range) -> list[int]:
        """The chunk's slots, in order; here the window moves towards its start."""
        dropped = max(0, len(self.latents) + len(current) - self._window)
        if dropped:
            kept = self._slots_of(self._sink, len(self.latents) - dropped)
            moved = self._slots_of(self._sink + dropped, len(self.latents))
            self._k[:, :, :, kept] = self._k[:, :, :, moved].clone()
            self._v[:, :, :, kept] = self._v[:, :, :, moved].clone()
            del self.latents[self._sink : self._sink + dropped]
        self.latents += current
        return list(range(len(self.latents) - len(current), len(self.latents)))

    def _time(self, latent: int) -> int:
        """Where a latent stands: at its number, or in a moving sink at its place in the window."""
        moved = self._sink_moves and latent < self._sink
        return latent + max(0, self._next - self._window) if moved else latent

    def _slots_of(self, first: int, last: int) -> slice:
        return slice(first * self._tokens, last * self._tokens)


class ShiftedFrameCache(PlainFrameCache):
    """Keys rotated once, when written; the window still moved by copying."""

    def __init__(
        self, model: ModelConfig, batch: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__(model, batch, device, dtype)
        # Rotating the rotated ones on and on would gather rounding errors.
        self._unrotated_sink = (
            torch.zeros_like(self._k[:, :, :, self._slots_of(0, self._sink)])
            if self._sink_moves
            else None
        )

    def attend(self, block: int, cache: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._store(block, cache, rotate(k, self._chunk_angles), v)
        if self._unrotated_sink is not None and self._new_sink_tokens:
            into = slice(self._sink_start, self._sink_start + self._new_sink_tokens)
            self._unrotated_sink[block, cache, :, into] = k[:, : self._new_sink_tokens]
        return attention(
            rotate(q, self._chunk_angles),
            self._k[block, cache, :, self._filled],
            self._v[block, cache, :, self._filled],
        )

    def _turn(self, current: range) -> None:
        new_latents = max(0, min(self._sink, current.stop) - current.start)
        self._sink_start = current.start * self._tokens
        self._new_sink_tokens = new_latents * self._tokens
        if self._unrotated_sink is not None and self._next > self._window:
            angles = self._positions.of(map(self._time, range(self._sink)))
            into = self._slots_of(0, self._sink)
            self._k[:, :, :, into] = rotate(self._unrotated_sink, angles)


class RingFrameCache(ShiftedFrameCache):
    """Keys rotated once, when written, over the oldest latents: nothing moves. A rotated key
    carries its own time, and attention sums over slots in any order."""

    def _take_slots(self, current: range) -> list[int]:
        turning = self._window - self._sink
        slots = [
            latent if latent < self._window else self._sink + (latent - self._sink) % turning
            for latent in current
        ]
        for latent, slot in zip(current, slots, strict=True):
            self.latents[slot : slot + 1] = [latent]
        return slots


def make_frame_cache(
    model: ModelConfig,
    optimizations: Optimizations,
    *,
    batch: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> PlainFrameCache:
    kind = PlainFrameCache
    if optimizations.write_time_rope:
        kind = RingFrameCache if optimizations.ring_cache else ShiftedFrameCache
    return kind(model, batch, device, dtype)
