"""Every kind of cache remembers the same, for as long as the talk lasts.

Plain, shifted and ring caches are held to one another through whole sessions, and to a reference
that recomputes every position from the chunk's number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from characters_serve.config import ConfigError, ModelConfig, Optimizations, load_config
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.attention import attention
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.kv_cache import (
    KVCache,
    PlainCache,
    RingCache,
    ShiftedCache,
    make_cache,
)
from characters_serve.model.kv_numbers import FloatNumbers
from characters_serve.model.rope import rotary_positions, rotate
from characters_serve.model.weights import load_generator
from tests.unit import small_model
from tests.unit.small_model import session, sharpen

SMALL = ModelConfig(**{**small_model.SMALL.model_dump(), "prompt_slots": 3, "prompt_dim": 16})
PLAIN = Optimizations(write_time_rope=False, ring_cache=False)
SHIFTED = Optimizations(write_time_rope=True, ring_cache=False)
RING = Optimizations(write_time_rope=True, ring_cache=True)
KINDS = {"plain": PLAIN, "shifted": SHIFTED, "ring": RING}
# Resets fall on chunks 47, 89 and 131.
STEPS = 136


@functools.cache
def network(policy: str) -> tuple[CharacterDiT, ModelConfig]:
    config = SMALL.model_copy(update={"cache_policy": policy})
    dit = load_generator(config, device=torch.device("cpu"), dtype=torch.float32)
    return sharpen(dit), config


def denoiser_for(policy: str, kind: str) -> Denoiser:
    dit, config = network(policy)
    return Denoiser(dit, config, KINDS[kind])


def chunk_qkv(model: ModelConfig, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (3, 1, model.tokens_per_chunk, model.num_heads, model.head_dim)
    q, k, v = torch.randn(shape, generator=random)
    return 2 * q, k, v


def prefix_kv(model: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(99)
    k, v = torch.randn((2, 1, length, model.num_heads, model.head_dim), generator=random)
    return k, v


def drive(cache: KVCache, model: ModelConfig, steps: int) -> Iterator[Tensor]:
    """What one block attends to, chunk after chunk, of invented q, k, v."""
    cache.store_prefix(0, 0, *prefix_kv(model, model.reference_tokens))
    for step in range(1, steps + 1):
        cache.begin_step()
        yield cache.attend(0, 0, *chunk_qkv(model, step))


def from_scratch(model: ModelConfig, step: int) -> Tensor:
    """The same from the definition: chunk `step` sees the prefix at time 0 and the last chunks
    at its own time less their age."""
    window, reset = model.window_chunks, model.position_reset_steps
    time = step if step < window else window + (step - window) % reset
    positions = rotary_positions(model)
    prefix_k, prefix_v = prefix_kv(model, model.reference_tokens)
    keys = [rotate(prefix_k, positions.prefix()[: model.reference_tokens])]
    values = [prefix_v]
    for age in range(min(step, window)):
        _, k, v = chunk_qkv(model, step - age)
        keys.append(rotate(k, positions.chunk(float(time - age))))
        values.append(v)
    q = rotate(chunk_qkv(model, step)[0], positions.chunk(float(time)))
    return attention(q, torch.cat(keys, 1), torch.cat(values, 1))


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in standard deviations of what is expected."""
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_is_what_the_definition_says_through_three_resets(kind: str) -> None:
    cache = make_cache(SMALL, KINDS[kind])
    for step, attended in enumerate(drive(cache, SMALL, STEPS), start=1):
        assert error(attended, from_scratch(SMALL, step)) < 1e-4, step


def test_kinds_follow_the_flags() -> None:
    assert type(make_cache(SMALL, PLAIN)) is PlainCache
    assert type(make_cache(SMALL, SHIFTED)) is ShiftedCache
    assert type(make_cache(SMALL, RING)) is RingCache


@pytest.mark.parametrize("policy", ["last_pass", "per_pass"])
def test_whole_sessions_agree_between_the_kinds(policy: str) -> None:
    expected = session(denoiser_for(policy, "plain"), STEPS)
    assert expected.std() > 0.1
    for kind in ("shifted", "ring"):
        found = session(denoiser_for(policy, kind), STEPS)
        for step in range(STEPS):
            assert error(found[step], expected[step]) < 2e-4, (kind, step + 1)


@pytest.mark.parametrize("policy", ["last_pass", "per_pass"])
def test_fewer_passes_keep_the_kinds_together(policy: str) -> None:
    def passes(step: int) -> int:
        return {0: 4, 1: 2, 2: 4, 3: 3, 4: 1}[step // 7 % 5]

    expected = session(denoiser_for(policy, "plain"), 60, passes=passes)
    for kind in ("shifted", "ring"):
        found = session(denoiser_for(policy, kind), 60, passes=passes)
        for step in range(60):
            assert error(found[step], expected[step]) < 2e-4, (kind, step + 1)
    full = session(denoiser_for(policy, "ring"), 60)
    # Under per_pass every pass writes a cache of its own, so none is left out.
    assert torch.equal(full, found) == (policy == "per_pass")


def test_the_policies_differ_in_what_they_remember() -> None:
    """per_pass: each pass finds its own keys; last_pass: every pass finds the last one's."""
    last = session(denoiser_for("last_pass", "ring"), 3)
    each = session(denoiser_for("per_pass", "ring"), 3)
    assert torch.equal(last[0], each[0])
    assert error(last[1], each[1]) > 1e-2


def test_ring_without_write_time_rope_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="ring_cache needs write_time_rope"):
        load_config(
            overrides=["optimizations.ring_cache=true", "optimizations.write_time_rope=false"]
        )


class RotatedBySlotOrder(PlainCache):
    """What the config refuses: keys kept unrotated in a ring, rotated by slot when read."""

    def begin_step(self) -> None:
        self._advance()

    def attend(self, block: int, cache: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        current = self._window_slots((self._chunks - 1) % self._window_chunks)
        self._k[block, cache, :, current] = k
        self._v[block, cache, :, current] = v
        read = slice(self._first_slot, self._filled.stop)
        keys = rotate(self._k[block, cache, :, read], self._read_angles())
        return attention(rotate(q, self._chunk_angles), keys, self._v[block, cache, :, read])


def test_why_a_ring_needs_write_time_rope() -> None:
    """Right until the ring wraps; then slot order is time order once in a round only, which is
    why it went unnoticed: nothing fails, the positions are wrong."""
    numbers = FloatNumbers(SMALL, torch.device("cpu"), torch.float32)
    positions, counter = rotary_positions(SMALL), torch.zeros(1, dtype=torch.int32)
    refused = RotatedBySlotOrder(SMALL, positions, numbers, 1, "cpu", counter)
    for step, attended in enumerate(drive(refused, SMALL, 3 * SMALL.window_chunks), start=1):
        wrong = error(attended, from_scratch(SMALL, step))
        if step <= SMALL.window_chunks or step % SMALL.window_chunks == 0:
            assert wrong < 1e-4, step
        else:
            assert wrong > 0.1, step


def test_scores_depend_on_differences_of_positions_alone() -> None:
    positions = rotary_positions(SMALL)
    q, k, _ = chunk_qkv(SMALL, 0)

    def scores(query_time: float, key_time: float) -> Tensor:
        rotated_q = rotate(q, positions.chunk(query_time))
        rotated_k = rotate(k, positions.chunk(key_time))
        return torch.einsum("bqhd,bkhd->bhqk", rotated_q, rotated_k)

    for shift in (1.0, 5.0, 42.0):
        moved = scores(3.0 + shift, 1.0 + shift)
        torch.testing.assert_close(moved, scores(3.0, 1.0), rtol=1e-4, atol=1e-4)
    assert (scores(3.0, 1.0) - scores(3.0, 2.0)).abs().max() > 1


def test_one_delta_rotation_equals_rotating_again() -> None:
    positions = rotary_positions(SMALL)
    _, k, _ = chunk_qkv(SMALL, 0)
    for time in (43.0, 44.0, 46.0):
        moved = rotate(rotate(k, positions.chunk(time)), positions.shift(-42.0))
        torch.testing.assert_close(
            moved, rotate(k, positions.chunk(time - 42.0)), rtol=1e-4, atol=1e-5
        )


def test_times_as_numbers_and_as_tensors_give_the_same_angles() -> None:
    positions = rotary_positions(SMALL)
    times = torch.arange(47)
    for time, angles in zip(times, positions.chunk(times), strict=True):
        assert torch.equal(positions.chunk(float(time)), angles)


def test_rotation_keeps_lengths() -> None:
    _, k, _ = chunk_qkv(SMALL, 0)
    rotated = rotate(k, rotary_positions(SMALL).chunk(17.0))
    torch.testing.assert_close(rotated.norm(dim=-1), k.norm(dim=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_never_grows_or_moves(kind: str) -> None:
    denoiser = denoiser_for("per_pass", kind)
    cache: Any = denoiser._cache
    before = [(t.data_ptr(), t.shape, t.untyped_storage().nbytes()) for t in (cache._k, cache._v)]
    owned = set(vars(cache))
    session(denoiser, 60)
    session(denoiser, 3, prompt=0)
    after = [(t.data_ptr(), t.shape, t.untyped_storage().nbytes()) for t in (cache._k, cache._v)]
    assert before == after
    assert set(vars(cache)) == owned
    tensors = {name for name, value in vars(cache).items() if isinstance(value, Tensor)}
    assert tensors == {"_k", "_v", "_chunk_angles", "_saturated"}
    assert cache._chunk_angles.shape == (SMALL.tokens_per_chunk, SMALL.head_dim // 2)


class NothingOnTheHost(TorchFunctionMode):
    """Fails where a step makes a tensor of Python numbers: its copy to a GPU waits for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy), func
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, Tensor) or result.device.type == "meta", func
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_makes_no_tensor_on_the_host(kind: str) -> None:
    cache = make_cache(SMALL, KINDS[kind], device="meta")
    cache.store_prefix(0, 0, *(t.to("meta") for t in prefix_kv(SMALL, 8)))
    q, k, v = (t.to("meta") for t in chunk_qkv(SMALL, 1))
    with NothingOnTheHost():
        for _ in range(50):
            cache.begin_step()
            cache.attend(0, 0, q, k, v)


@pytest.mark.parametrize("prompt", [0, 1, 3])
def test_prefixes_shorter_than_their_slots_agree_between_the_kinds(prompt: int) -> None:
    expected = session(denoiser_for("last_pass", "plain"), 12, prompt=prompt)
    for kind in ("shifted", "ring"):
        found = session(denoiser_for("last_pass", kind), 12, prompt=prompt)
        assert error(found, expected) < 1e-4


def test_unused_prefix_slots_are_not_attended_to() -> None:
    """Poison in the slots that a short prefix leaves free must not be seen."""
    denoiser = denoiser_for("last_pass", "ring")
    clean = session(denoiser, 1, prompt=1)
    cache: Any = denoiser._cache
    forget = cache.clear

    def poisoned() -> None:
        forget()
        cache._k[:, :, :, : SMALL.prompt_slots - 1] = math.nan
        cache._v[:, :, :, : SMALL.prompt_slots - 1] = math.nan

    cache.clear = poisoned
    assert torch.equal(session(denoiser, 1, prompt=1), clean)


@pytest.mark.parametrize("kind", KINDS)
def test_too_long_a_prefix_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="a prefix of 12 tokens exceeds the 11 slots"):
        session(denoiser_for("last_pass", kind), 1, prompt=4)


@pytest.mark.parametrize("policy", ["last_pass", "per_pass"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("earlier_steps", [1, 4, 53])
def test_a_new_session_knows_nothing_of_the_last(
    policy: str, kind: str, earlier_steps: int
) -> None:
    fresh = session(denoiser_for(policy, kind), 8, seed=5, prompt=1)
    used = denoiser_for(policy, kind)
    session(used, earlier_steps, seed=4, prompt=3)
    assert torch.equal(session(used, 8, seed=5, prompt=1), fresh)
    used.reset()
    cache: Any = used._cache
    assert not cache._k.any() and not cache._v.any()
    assert torch.equal(session(used, 8, seed=5, prompt=1), fresh)
