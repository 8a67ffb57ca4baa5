"""What the character remembers: the prefix and a window of the last chunks, for every block.

In: a chunk's q, k, v in each block and pass. Out: attention over everything cached. A cache owns
its buffers and the chunk's time position; it knows nothing of the model around it.

Letters: B batch (sessions rolled out together; 1 when serving), S slots, H heads, D head dim.
Slots: [prefix | window_chunks x tokens_per_chunk]. Each pass writes the current chunk's slots
before it reads, so under `last_pass` the last pass's keys remain, and under `per_pass` each pass
keeps a cache of its own.

Positions: the prefix stays at time 0, chunks count up from 1. When a chunk would reach
window_chunks + position_reset_steps, it and all it remembers move back by position_reset_steps,
so that positions stay in the range the model was trained on, for as long as the talk lasts.
Where the prefix moves (open models: a reference that keeps its distance to the current chunk), its
keys are kept unrotated too, and written anew for each chunk: rotating the rotated ones on and on
would gather rounding errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from characters_kernels.delta_rotate import delta_rotate
from characters_serve.config import ModelConfig, Optimizations
from characters_serve.model.attention import attention
from characters_serve.model.kv_numbers import Numbers, make_numbers
from characters_serve.model.open.frame_cache import FusedRingFrameCache, make_frame_cache
from characters_serve.model.ring_writer import QueryKeyNorm, RingWriter
from characters_serve.model.rope import RotaryPositions, rotary_positions, rotate


class KVCache(Protocol):
    def clear(self) -> None:
        """Forgets the session: prefix, window and position."""

    def calibrate(self, block: int, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        """Sets what the session's number formats need, from its first forward pass."""

    def store_prefix(self, block: int, cache: int, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        """Writes the prefix of one block (k not rotated). Shorter prefixes leave slots unused."""

    def begin_step(self) -> None:
        """Moves on to the next chunk: its position, its slots, and the reset when it is due."""

    def attend(self, block: int, cache: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes the current chunk's k, v (not rotated); returns (B, S, H x D)."""


def make_cache(
    model: ModelConfig,
    optimizations: Optimizations,
    *,
    batch: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    saturated: Tensor | None = None,
) -> KVCache:
    """saturated: (1,) int32 on the device, counts values that did not fit FP8."""
    if optimizations.fused_pre_attention and batch != 1:
        raise ValueError("fused_pre_attention serves one session: its batch must be 1")
    if saturated is None:
        saturated = torch.zeros(1, dtype=torch.int32, device=device)
    numbers = make_numbers(model, optimizations, torch.device(device), dtype, saturated)
    if model.family == "causal_wan":
        return make_frame_cache(model, optimizations, numbers, batch, device, saturated)
    kind: type[PlainCache | ShiftedCache] = PlainCache
    if optimizations.write_time_rope:
        kind = RingCache if optimizations.ring_cache else ShiftedCache
    if optimizations.fused_pre_attention:
        kind = FusedRingCache
    return kind(model, rotary_positions(model, device), numbers, batch, device, saturated)


def attend_and_store(
    cache: KVCache, block: int, num_caches: int, angles_SD: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """A prefix, q and k not rotated, attends to itself alone, and each of the block's caches keeps
    it: (B, S, H x D)."""
    cache.calibrate(block, q, k, v)
    for index in range(num_caches):
        cache.store_prefix(block, index, k, v)
    return attention(rotate(q, angles_SD), rotate(k, angles_SD), v)


class _CacheBuffers:
    """Buffers, the position clock and the count of valid slots, which all kinds share."""

    def __init__(
        self,
        model: ModelConfig,
        positions: RotaryPositions,
        numbers: Numbers,
        batch: int,
        device: torch.device | str,
        saturated: Tensor,
    ) -> None:
        self._positions = positions
        self._numbers = numbers
        self._saturated = saturated
        self._tokens = model.tokens_per_chunk
        self._window_chunks = model.window_chunks
        self._reset_steps = model.position_reset_steps
        self._prefix_slots = model.prefix_slots
        self._time_planes = model.rope_split[0] // 2
        shape = (
            model.num_blocks,
            model.num_caches,
            batch,
            model.cache_slots,
            model.num_heads,
            model.head_dim,
        )
        self._k = torch.zeros(shape, device=device, dtype=numbers.dtype)
        self._v = torch.zeros(shape, device=device, dtype=numbers.dtype)
        self.clear()

    def clear(self) -> None:
        self._k.zero_()
        self._v.zero_()
        self._prefix_length = 0
        self._chunks = 0
        self._position = 0
        self._moved_back = 0
        self._chunk_angles = self._positions.chunk(0.0)

    def calibrate(self, block: int, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        self._numbers.calibrate(block, q_BSHD, k_BSHD, v_BSHD)

    def _write(self, block: int, cache: int, slots: slice, k: Tensor, v: Tensor) -> None:
        _, k_scale, v_scale = self._numbers.scales_QKV[:, block]
        self._k[block, cache, :, slots] = self._numbers.pack(k, k_scale)
        self._v[block, cache, :, slots] = self._numbers.pack(v, v_scale)

    def _read(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q in the model's format, k and v in the cache's."""
        q_scale = self._numbers.scales_QKV[0, block]
        return self._numbers.attend(block, self._numbers.pack(q, q_scale), k, v)

    def _advance(self) -> bool:
        """Counts one chunk; True when the window must move back by the reset's steps."""
        self._chunks += 1
        self._position += 1
        reset = self._position == self._window_chunks + self._reset_steps
        if reset:
            self._position -= self._reset_steps
            self._moved_back += self._reset_steps
        self._chunk_angles = self._positions.chunk(float(self._position))
        return reset

    def _shift_window(self) -> None:
        """Makes room for a chunk by copying a full window one chunk towards its start."""
        if self._chunks >= self._window_chunks:
            kept = slice(self._prefix_slots, self._filled.stop - self._tokens)
            moved = slice(self._prefix_slots + self._tokens, self._filled.stop)
            self._k[:, :, :, kept] = self._k[:, :, :, moved].clone()
            self._v[:, :, :, kept] = self._v[:, :, :, moved].clone()

    def _check_prefix(self, k_BSHD: Tensor) -> int:
        length = k_BSHD.shape[1]
        if length > self._prefix_slots:
            raise ValueError(f"a prefix of {length} tokens exceeds the {self._prefix_slots} slots")
        self._prefix_length = length
        return length

    @property
    def _first_slot(self) -> int:
        """The prefix lies against the window, so that the valid slots are one run."""
        return self._prefix_slots - self._prefix_length

    def _window_slots(self, index: int) -> slice:
        start = self._prefix_slots + index * self._tokens
        return slice(start, start + self._tokens)

    @property
    def _filled(self) -> slice:
        """The window slots that hold chunks."""
        chunks = min(self._chunks, self._window_chunks)
        return slice(self._prefix_slots, self._prefix_slots + chunks * self._tokens)


class PlainCache(_CacheBuffers):
    """The launch form: keys unrotated, the window shifted by copying, every key rotated at read,
    and converted again after that where the cache is FP8."""

    def store_prefix(self, block: int, cache: int, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        slots = slice(self._prefix_slots - self._check_prefix(k_BSHD), self._prefix_slots)
        self._write(block, cache, slots, k_BSHD, v_BSHD)

    def begin_step(self) -> None:
        self._shift_window()
        self._advance()

    def attend(self, block: int, cache: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        current = self._window_slots(min(self._chunks, self._window_chunks) - 1)
        self._write(block, cache, current, k, v)
        read = slice(self._first_slot, self._filled.stop)
        k_scale = self._numbers.scales_QKV[1, block]
        keys = self._numbers.unpack(self._k[block, cache, :, read], k_scale)
        keys = self._numbers.pack(rotate(keys, self._read_angles()), k_scale)
        return self._read(
            block, rotate(q, self._chunk_angles), keys, self._v[block, cache, :, read]
        )

    def _read_angles(self) -> Tensor:
        chunks = min(self._chunks, self._window_chunks)
        times = self._position - torch.arange(chunks - 1, -1, -1, device=self._k.device)
        window = self._positions.chunk(times).flatten(0, 1)
        prefix = self._positions.prefix(self._position, self._moved_back)
        used = prefix[: self._prefix_length]
        return torch.cat([used, window])


class ShiftedCache(_CacheBuffers):
    """Keys rotated once, when written; the window still shifted by copying."""

    _unrotated_prefix: Tensor | None = None

    def clear(self) -> None:
        super().clear()
        # Of zeros, so that no session's first reset has to wait for the kernel to be compiled.
        self._move_window()
        if not self._positions.prefix_moves:
            return
        if self._unrotated_prefix is None:
            # All passes' caches hold the same prefix.
            like = self._k[:, 0, :, : self._prefix_slots]
            self._unrotated_prefix = torch.empty_like(like, dtype=self._numbers.model_dtype)
        self._unrotated_prefix.zero_()

    def store_prefix(self, block: int, cache: int, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        length = self._check_prefix(k_BSHD)
        slots = slice(self._prefix_slots - length, self._prefix_slots)
        if self._unrotated_prefix is None:
            k_BSHD = rotate(k_BSHD, self._positions.prefix()[:length])
        else:
            self._unrotated_prefix[block, :, slots] = k_BSHD
        self._write(block, cache, slots, k_BSHD, v_BSHD)

    def begin_step(self) -> None:
        self._shift_window()
        self._reset_if_due()
        self._move_prefix()

    def _move_prefix(self) -> None:
        if self._unrotated_prefix is None:
            return
        slots = slice(self._first_slot, self._prefix_slots)
        angles = self._positions.prefix(self._position, self._moved_back)[: self._prefix_length]
        for block, keys in enumerate(self._unrotated_prefix):
            k_scale = self._numbers.scales_QKV[1, block]
            rotated = self._numbers.pack(rotate(keys[:, slots], angles), k_scale)
            self._k[block, :, :, slots] = rotated

    def _reset_if_due(self) -> None:
        """In one rotation of all that is remembered; the prefix stays."""
        if self._advance():
            self._move_window()

    def _move_window(self) -> None:
        angles = self._positions.shift(-float(self._reset_steps))[0, : self._time_planes].float()
        caches = self._k.flatten(0, 2)
        delta_rotate(caches, angles.cos(), angles.sin(), self._prefix_slots, self._saturated)

    def attend(self, block: int, cache: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        current = self._current_slots()
        self._write(block, cache, current, rotate(k, self._chunk_angles), v)
        read = slice(self._first_slot, self._filled.stop)
        return self._read(
            block,
            rotate(q, self._chunk_angles),
            self._k[block, cache, :, read],
            self._v[block, cache, :, read],
        )

    def _current_slots(self) -> slice:
        return self._window_slots(min(self._chunks, self._window_chunks) - 1)


class RingCache(ShiftedCache):
    """Keys rotated once, when written, over the oldest chunk. No order of slots is needed:
    a rotated key carries its own time, and attention sums over slots in any order."""

    def begin_step(self) -> None:
        self._reset_if_due()
        self._move_prefix()

    def _current_slots(self) -> slice:
        return self._window_slots((self._chunks - 1) % self._window_chunks)


class FusedRingCache(RingCache):
    """One session's ring, written by one kernel from the in-projection's output: norm, rotation,
    conversion and store."""

    def __init__(
        self,
        model: ModelConfig,
        positions: RotaryPositions,
        numbers: Numbers,
        batch: int,
        device: torch.device | str,
        saturated: Tensor,
    ) -> None:
        self._writer = RingWriter(model, numbers, device, saturated)
        super().__init__(model, positions, numbers, batch, device, saturated)

    def clear(self) -> None:
        super().clear()
        self._writer.slot.fill_(self._prefix_slots)

    def begin_step(self) -> None:
        super().begin_step()
        self._writer.aim(self._current_slots().start, self._chunk_angles)

    def attend_projected(
        self, block: int, cache: int, projected: Tensor, norm: QueryKeyNorm
    ) -> Tensor:
        """projected: (>= S, | q | k | v | ...), not normed -> (S, H x D)."""
        read = slice(self._first_slot, self._filled.stop)
        k, v = self._k[block, cache], self._v[block, cache]
        return self._writer.attend(block, projected, norm, k, v, read)

    @property
    def is_full(self) -> bool:
        """All slots are read from now on, so that every step has the same shape."""
        return self._chunks >= self._window_chunks

    @property
    def prefix_length(self) -> int:
        return self._prefix_length

    @contextmanager
    def as_if_full(self) -> Iterator[None]:
        """For capturing a steady step before the session has come to one."""
        chunks, self._chunks = self._chunks, self._window_chunks
        try:
            yield
        finally:
            self._chunks = chunks


FusedCache = FusedRingCache | FusedRingFrameCache
"""The caches that a kernel writes to, and that a captured step can be replayed on."""
