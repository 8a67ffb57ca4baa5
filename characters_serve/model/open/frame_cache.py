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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from characters_serve.config import ModelConfig, Optimizations
from characters_serve.model.kv_numbers import Numbers
from characters_serve.model.ring_writer import QueryKeyNorm, RingWriter
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

    def of(self, times: range) -> Tensor:
        """One time for each latent -> float32 (latents x tokens, D/2)."""
        at = torch.arange(times.start, times.stop, dtype=torch.float64, device=self._time.device)
        time = (at[:, None] * self._time)[:, None].expand(-1, len(self._place), -1)
        place = self._place.expand(len(at), -1, -1)
        angles = torch.cat([time, place], dim=-1).flatten(0, 1)
        return angles.remainder(2 * math.pi).float()


class PlainFrameCache:
    """The published form: keys unrotated, the window moved by copying, all rotated at each read."""

    def __init__(
        self,
        model: ModelConfig,
        numbers: Numbers,
        batch: int,
        device: torch.device | str,
        saturated: Tensor,
    ) -> None:
        assert model.causal_wan is not None
        own = model.causal_wan
        self._numbers = numbers
        self._window, self._sink = own.window_latents, own.sink_latents
        self._sink_moves = own.sink_distance == "constant"
        self._chunk_latents = model.latents_per_chunk
        self._tokens = model.grid_rows * model.grid_columns
        self._positions = LatentPositions(model, device)
        slots = self._window * self._tokens
        shape = (model.num_blocks, model.num_caches, batch, slots, model.num_heads, model.head_dim)
        self._k = torch.zeros(shape, device=device, dtype=numbers.dtype)
        self._v = torch.zeros(shape, device=device, dtype=numbers.dtype)
        self.clear()

    def clear(self) -> None:
        """Forgets the stream."""
        self._k.zero_()
        self._v.zero_()
        self._next = 0
        self._calibrated_blocks = 0
        self.latents: list[int] = []

    def calibrate(self, block: int, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        self._numbers.calibrate(block, q_BSHD, k_BSHD, v_BSHD)

    def store_prefix(self, block: int, cache: int, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        raise NotImplementedError("a causal Wan model has no prefix but its stream's beginning")

    def begin_step(self, num_latents: int | None = None) -> None:
        """Makes room for the next chunk, in place of the oldest latents after the sink."""
        count = self._chunk_latents if num_latents is None else num_latents
        current = range(self._next, self._next + count)
        self._next += count
        self._runs = self._runs_of(self._take_slots(current))
        self._filled = self._slots_of(0, len(self.latents))
        self._chunk_angles = self._positions.of(current)
        self._turn(current)

    def attend(self, block: int, cache: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes the current chunk's k, v (not rotated); returns (B, S, H x D)."""
        self._calibrate_once(block, q, k, v)
        self._store(block, cache, k, v)
        numbers, k_scale = self._numbers, self._numbers.scales_QKV[1, block]
        keys = numbers.unpack(self._k[block, cache, :, self._filled], k_scale)
        keys = numbers.pack(rotate(keys, self._read_angles), k_scale)
        return self._read(block, cache, q, keys)

    def _calibrate_once(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The stream's first pass sets the scales: there is no prefix that could."""
        if block >= self._calibrated_blocks:
            self.calibrate(block, q, k, v)
            self._calibrated_blocks = block + 1

    def _store(self, block: int, cache: int, k: Tensor, v: Tensor) -> None:
        _, k_scale, v_scale = self._numbers.scales_QKV[:, block]
        k, v = self._numbers.pack(k, k_scale), self._numbers.pack(v, v_scale)
        for slots, tokens in self._runs:
            self._k[block, cache, :, slots] = k[:, tokens]
            self._v[block, cache, :, slots] = v[:, tokens]

    def _read(self, block: int, cache: int, q: Tensor, keys: Tensor) -> Tensor:
        """q not rotated; keys rotated, in the cache's format."""
        q = self._numbers.pack(rotate(q, self._chunk_angles), self._numbers.scales_QKV[0, block])
        return self._numbers.attend(block, q, keys, self._v[block, cache, :, self._filled])

    def _turn(self, current: range) -> None:
        """Once a chunk: whatever its keys' positions need."""
        sink = min(self._sink, len(self.latents))
        rest = len(self.latents) - sink
        self._read_angles = torch.cat(
            [self._sink_angles(sink), self._positions.of(range(self._next - rest, self._next))]
        )

    def _take_slots(self, current: range) -> list[int]:
        """The slot of each of the chunk's latents; here the window moves towards its start."""
        dropped = max(0, len(self.latents) + len(current) - self._window)
        if dropped:
            kept = self._slots_of(self._sink, len(self.latents) - dropped)
            moved = self._slots_of(self._sink + dropped, len(self.latents))
            self._k[:, :, :, kept] = self._k[:, :, :, moved].clone()
            self._v[:, :, :, kept] = self._v[:, :, :, moved].clone()
            del self.latents[self._sink : self._sink + dropped]
        self.latents += current
        return list(range(len(self.latents) - len(current), len(self.latents)))

    def _runs_of(self, slots: list[int]) -> list[tuple[slice, slice]]:
        """Cache slots and the chunk's tokens that go there, a pair for each run of neighbours."""
        breaks = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]
        return [
            (self._slots_of(slots[first], slots[first] + last - first), self._slots_of(first, last))
            for first, last in pairwise([0, *breaks, len(slots)])
        ]

    def _sink_angles(self, latents: int) -> Tensor:
        """Of the sink: at its latents' numbers, or, if it moves, at its place in the window."""
        moved = max(0, self._next - self._window) if self._sink_moves else 0
        return self._positions.of(range(moved, moved + latents))

    def _slots_of(self, first: int, last: int) -> slice:
        return slice(first * self._tokens, last * self._tokens)


class ShiftedFrameCache(PlainFrameCache):
    """Keys rotated once, when written; the window still moved by copying."""

    def __init__(
        self,
        model: ModelConfig,
        numbers: Numbers,
        batch: int,
        device: torch.device | str,
        saturated: Tensor,
    ) -> None:
        super().__init__(model, numbers, batch, device, saturated)
        # Rotating the rotated ones on and on would gather rounding errors.
        self._unrotated_sink = (
            torch.zeros_like(
                self._k[:, :, :, self._slots_of(0, self._sink)], dtype=numbers.model_dtype
            )
            if self._sink_moves
            else None
        )

    def attend(self, block: int, cache: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._calibrate_once(block, q, k, v)
        self._store(block, cache, rotate(k, self._chunk_angles), v)
        if self._unrotated_sink is not None and self._new_sink_tokens:
            into = slice(self._sink_start, self._sink_start + self._new_sink_tokens)
            self._unrotated_sink[block, cache, :, into] = k[:, : self._new_sink_tokens]
        return self._read(block, cache, q, self._k[block, cache, :, self._filled])

    def _turn(self, current: range) -> None:
        new_latents = max(0, min(self._sink, current.stop) - current.start)
        self._sink_start = current.start * self._tokens
        self._new_sink_tokens = new_latents * self._tokens
        if self._unrotated_sink is not None and self._next > self._window:
            angles, into = self._sink_angles(self._sink), self._slots_of(0, self._sink)
            for block, keys in enumerate(self._unrotated_sink):
                k_scale = self._numbers.scales_QKV[1, block]
                self._k[block, :, :, into] = self._numbers.pack(rotate(keys, angles), k_scale)


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


class FusedRingFrameCache(RingFrameCache):
    """One stream's ring, written by one kernel from the in-projection's output: norm, rotation,
    conversion and store.

    The chunks that hold the sink go through `attend`, which keeps their keys unrotated too.
    """

    def __init__(
        self,
        model: ModelConfig,
        numbers: Numbers,
        batch: int,
        device: torch.device | str,
        saturated: Tensor,
    ) -> None:
        self._writer = RingWriter(model, numbers, device, saturated)
        super().__init__(model, numbers, batch, device, saturated)

    def begin_step(self, num_latents: int | None = None) -> None:
        super().begin_step(num_latents)
        if num_latents is None:
            (slots, _), *others = self._runs
            if others:
                raise ValueError("fused_pre_attention needs a chunk's slots in one run")
            self._writer.aim(slots.start, self._chunk_angles)

    def attend_projected(
        self, block: int, cache: int, projected: Tensor, norm: QueryKeyNorm
    ) -> Tensor:
        """projected: (>= S, | q | k | v | ...), not normed -> (S, H x D)."""
        k, v = self._k[block, cache], self._v[block, cache]
        return self._writer.attend(block, projected, norm, k, v, self._filled)

    @property
    def is_full(self) -> bool:
        """All slots are read from now on, so that every step has the same shape."""
        return len(self.latents) == self._window

    @property
    def prefix_length(self) -> int:
        return 0

    @contextmanager
    def as_if_full(self) -> Iterator[None]:
        """For capturing a steady step before the stream has come to one. What that writes goes to
        the window's last slots, which a stream fills last."""
        self._filled = self._slots_of(0, self._window)
        self._writer.slot.fill_(self._slots_of(self._window - self._chunk_latents, 0).start)
        yield


def make_frame_cache(
    model: ModelConfig,
    optimizations: Optimizations,
    numbers: Numbers,
    batch: int,
    device: torch.device | str,
    saturated: Tensor,
) -> PlainFrameCache:
    kind = PlainFrameCache
    if optimizations.write_time_rope:
        kind = RingFrameCache if optimizations.ring_cache else ShiftedFrameCache
    if optimizations.fused_pre_attention:
        kind = FusedRingFrameCache
    return kind(model, numbers, batch, device, saturated)
