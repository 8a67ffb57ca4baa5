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

from characters_kernels.attention import backend, fp8_attention
from characters_kernels.delta_rotate import delta_rotate
from characters_kernels.fp8 import E4M3, dequantise, quantise, scale_for
from characters_kernels.ring_store import ring_store
from characters_serve.config import ModelConfig, Optimizations
from characters_serve.model.attention import attention
from characters_serve.model.open.frame_cache import make_frame_cache
from characters_serve.model.rope import RotaryPositions, rotary_positions, rotate


class KVCache(Protocol):
    def clear(self) -> None:
        """Forgets the session: prefix, window and position."""

    def calibrate(self, block: int, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        """Sets what the session's number formats need, from its first forward pass."""

    def store_prefix(self, block: int, cache: int, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        """Writes the prefix of one block (k not rotated). Shorter prefixes leave slots unused."""

    def begin_step(self) -> None:
        """Moves on to the next chunk: its position, its slots, and every 42 steps the reset."""

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
    if model.family == "causal_wan":
        return make_frame_cache(model, optimizations, batch=batch, device=device, dtype=dtype)
    positions = rotary_positions(model, device)
    if saturated is None:
        saturated = torch.zeros(1, dtype=torch.int32, device=device)
    numbers: Numbers = (
        Fp8Numbers(model, torch.device(device), dtype, saturated)
        if optimizations.fp8_kv_cache
        else FloatNumbers(model, torch.device(device), dtype)
    )
    kind: type[PlainCache | ShiftedCache] = PlainCache
    if optimizations.write_time_rope:
        kind = RingCache if optimizations.ring_cache else ShiftedCache
    if optimizations.fused_pre_attention:
        kind = FusedRingCache
    return kind(model, positions, numbers, batch, device, saturated)


class Numbers(Protocol):
    """The format of cached keys and values, and the attention that reads it."""

    dtype: torch.dtype
    scales_QKV: Tensor
    """(3, blocks, H) float32: of q, k and v. Ones where the format needs none."""

    def calibrate(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Takes the scales of one block from its q, k, v (B, S, H, D)."""

    def pack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        """From the model's format to the cache's."""

    def unpack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        """And back."""

    def attend(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All packed, (B, S, H, D) -> (B, S, H x D) in the model's format."""


class FloatNumbers:
    def __init__(self, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.scales_QKV = torch.ones(3, model.num_blocks, model.num_heads, device=device)

    def calibrate(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        pass

    def pack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        return x_BSHD

    def unpack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        return x_BSHD

    def attend(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)


class Fp8Numbers:
    """e4m3 with one scale a head for each of q, k and v, set once a session.

    A rotation may lengthen a component by up to the square root of two, within the headroom.
    """

    dtype = E4M3

    def __init__(
        self, model: ModelConfig, device: torch.device, dtype: torch.dtype, saturated: Tensor
    ) -> None:
        self.scales_QKV = torch.ones(3, model.num_blocks, model.num_heads, device=device)
        self.attention_backend = backend(device)
        self._attention = fp8_attention(self.attention_backend)
        self._model_dtype = dtype
        self._saturated = saturated

    def calibrate(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        for scales, x in zip(self.scales_QKV[:, block], (q, k, v), strict=True):
            scales.copy_(scale_for(x.abs().amax((0, 1, 3))))

    def pack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        return quantise(x_BSHD, scale_H[:, None], self._saturated)

    def unpack(self, x_BSHD: Tensor, scale_H: Tensor) -> Tensor:
        return dequantise(x_BSHD, scale_H[:, None], self._model_dtype)

    def attend(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scales = self.scales_QKV[:, block]
        sessions = [self._attention(*qkv, *scales) for qkv in zip(q, k, v, strict=True)]
        # One session, as in serving, is not copied.
        attended = sessions[0][None] if len(sessions) == 1 else torch.stack(sessions)
        return attended.flatten(-2).to(self._model_dtype)


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
            self._unrotated_prefix = torch.empty_like(self._k[:, 0, :, : self._prefix_slots])
        self._unrotated_prefix.zero_()

    def store_prefix(self, block: int, cache: int, k_BSHD: Tensor, v_BSHD: Tensor) -> None:
        length = self._check_prefix(k_BSHD)
        slots = slice(self._prefix_slots - length, self._prefix_slots)
        if self._unrotated_prefix is not None:
            self._unrotated_prefix[block, :, slots] = k_BSHD
            self._v[block, cache, :, slots] = v_BSHD
            return
        keys = rotate(k_BSHD, self._positions.prefix()[:length])
        self._write(block, cache, slots, keys, v_BSHD)

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
            self._k[block, :, :, slots] = rotate(keys[:, slots], angles)

    def _reset_if_due(self) -> None:
        """Every 42 steps one rotation moves all that is remembered; the prefix stays."""
        if self._advance():
            self._move_window()

    def _move_window(self) -> None:
        angles = self._positions.shift(-float(self._reset_steps))[0, : self._time_planes]
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
    conversion and store. Slot and angles live on the device, so a captured step can be replayed."""

    def __init__(
        self,
        model: ModelConfig,
        positions: RotaryPositions,
        numbers: Numbers,
        batch: int,
        device: torch.device | str,
        saturated: Tensor,
    ) -> None:
        if batch != 1:
            raise ValueError("fused_pre_attention serves one session: its batch must be 1")
        heads, head_dim = model.num_heads, model.head_dim
        tokens = model.tokens_per_chunk
        self._slot = torch.zeros((), dtype=torch.int64, device=device)
        self._cos, self._sin = torch.zeros(2, tokens, head_dim // 2, device=device)
        self._q = torch.zeros(1, tokens, heads, head_dim, dtype=numbers.dtype, device=device)
        super().__init__(model, positions, numbers, batch, device, saturated)

    def clear(self) -> None:
        super().clear()
        self._slot.fill_(self._prefix_slots)

    def begin_step(self) -> None:
        super().begin_step()
        self._slot.fill_(self._current_slots().start)
        torch.cos(self._chunk_angles, out=self._cos)
        torch.sin(self._chunk_angles, out=self._sin)

    def attend_projected(
        self,
        block: int,
        cache: int,
        projected: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
    ) -> Tensor:
        """projected: (>= S, | q | k | v | ...), not normed -> (S, H x D)."""
        k, v = self._k[block, cache], self._v[block, cache]
        ring_store(
            projected,
            q_weight,
            k_weight,
            self._cos,
            self._sin,
            self._slot,
            *self._numbers.scales_QKV[:, block],
            eps,
            self._q[0],
            k[0],
            v[0],
            self._saturated,
        )
        read = slice(self._first_slot, self._filled.stop)
        return self._numbers.attend(block, self._q, k[:, read], v[:, read])[0]

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
