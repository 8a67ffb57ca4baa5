"""How a model is dealt to tensor-parallel ranks, by numbers and by the shapes that follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from characters_serve.config import ConfigError, ModelConfig, Optimizations, load_config
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.kv_cache import make_cache
from characters_serve.model.linear import in_projection_cut, out_projection_cut
from characters_serve.model.shard import MAX_LOAD, deal
from tests.unit.small_model import SMALL

CONFIGS = Path(__file__).parents[2] / "configs"
PRODUCTION = load_config([CONFIGS / "characters-57b.yaml"]).model
SIZES = (1, 2, 3, 4, 7, 8)


def columns(model: ModelConfig, size: int) -> list[int]:
    """Columns of each rank's two projections."""
    return [
        in_projection_cut(model, shard).width + out_projection_cut(model, shard).width
        for shard in deal(model, size)
    ]


@settings(deadline=None, max_examples=60)
@given(
    heads=st.integers(1, 80),
    head_dim=st.sampled_from([32, 64, 128]),
    mlp_dim=st.integers(1, 300).map(lambda n: 32 * n),
    size=st.integers(1, 16),
)
def test_what_is_dealt_is_the_whole(heads: int, head_dim: int, mlp_dim: int, size: int) -> None:
    changes = {"num_heads": heads, "head_dim": head_dim, "mlp_dim": mlp_dim}
    model = SMALL.model_copy(update=changes)
    try:
        shards = deal(model, size)
    except ValueError:
        return
    assert [(shard.rank, shard.size) for shard in shards] == [(r, size) for r in range(size)]
    assert [i for shard in shards for i in shard.heads] == list(range(heads))
    assert [i for shard in shards for i in shard.mlp_columns] == list(range(mlp_dim))
    counts = [len(shard.heads) for shard in shards]
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1
    for cut_of in (in_projection_cut, out_projection_cut):
        cuts = [cut_of(model, shard) for shard in shards]
        rows = sorted(row for cut in cuts for run in cut.runs for row in run)
        assert rows == list(range(cuts[0].size))
        assert {cut.unit for cut in cuts} == {cuts[0].unit}
        ends = {end for cut in cuts for run in cut.runs for end in (run.start, run.stop)}
        assert all(end % cuts[0].unit == 0 for end in ends)
    load = columns(model, size)
    assert max(load) <= MAX_LOAD * sum(load) / size


@pytest.mark.parametrize("size", SIZES)
def test_production_ranks_differ_by_a_tile(size: int) -> None:
    load = columns(PRODUCTION, size)
    assert max(load) - min(load) <= 2 * 128
    assert all(len(shard.mlp_columns) % 128 == 0 for shard in deal(PRODUCTION, size))


def test_more_heads_mean_fewer_tiles() -> None:
    shares = [(len(s.heads), len(s.mlp_columns) // 128) for s in deal(PRODUCTION, 7)]
    assert shares == [(11, 34)] * 2 + [(10, 36)] * 5


def meta_shapes(size: int, rank: int) -> dict[str, tuple[int, ...]]:
    model = PRODUCTION.model_copy(update={"num_blocks": 2})
    with torch.device("meta"):
        state = CharacterDiT(model, deal(model, size)[rank]).state_dict()
    return {key: tuple(value.shape) for key, value in state.items()}


@pytest.mark.parametrize("size", SIZES)
def test_production_shards_have_the_keys_of_the_whole_and_add_up_to_it(size: int) -> None:
    whole = meta_shapes(1, 0)
    ranks = [meta_shapes(size, rank) for rank in sorted({0, size // 2, size - 1})]
    for shapes in ranks:
        assert shapes.keys() == whole.keys()
        cut = {key for key in whole if shapes[key] != whole[key]}
        expected = {
            f"blocks.{block}.{name}_projection.weight"
            for block in range(2)
            for name in ("in", "out")
        }
        assert cut == (expected if size > 1 else set())
    rows = inputs = 0
    for shard in deal(PRODUCTION, size):
        into, out = in_projection_cut(PRODUCTION, shard), out_projection_cut(PRODUCTION, shard)
        rows, inputs = rows + into.width, inputs + out.width
    assert rows == whole["blocks.0.in_projection.weight"][0] == 59_392
    assert inputs == whole["blocks.0.out_projection.weight"][1] == 40_960


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_runs_with_a_cache_of_its_own_heads(size: int) -> None:
    """One all-reduce a block, of the whole width; every rank gives latents of the whole shape."""
    one = PRODUCTION.model_copy(update={"num_blocks": 2})
    shard = deal(one, size)[-1]
    reduced: list[tuple[int, ...]] = []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        reduced.append(tuple(x.shape))
        return x

    with torch.device("meta"):
        dit = CharacterDiT(one, shard, all_reduce).eval().requires_grad_(False)
        cache = make_cache(dit.rank_config, Optimizations(), device="meta")
        cache.begin_step()
        mel = torch.zeros(1, dit.log_mel.num_frames, one.audio.num_mels)
        controls = torch.zeros(1, one.frames_per_chunk, one.num_controls)
        noisy = torch.zeros(1, one.video_tokens, one.token_channels)
        modulation = dit.modulate(torch.tensor(1.0))
        clean = dit(noisy, modulation, dit.condition_on_mel(mel, controls), cache, 0)
    assert clean.shape == noisy.shape
    assert reduced == [(1, 757, 9216)] * 2


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (4, "4 ranks cannot share 3 heads; nearest possible: 3"),
        (8, "8 ranks cannot share 3 heads; nearest possible: 3"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_a_config_error(size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.tensor_parallel: {said}"):
        load_config(overrides=[f"engine.tensor_parallel={size}"])


def test_too_uneven_a_deal_names_the_sizes_around_it() -> None:
    model = SMALL.model_copy(update={"num_heads": 8, "mlp_dim": 5 * 128})
    with pytest.raises(ValueError, match=r"one would have 1\.33 .*; nearest possible: 3 and 5"):
        deal(model, 4)
    few = SMALL.model_copy(update={"num_heads": 8, "mlp_dim": 32})
    with pytest.raises(ValueError, match=r"MLP of 32 columns; nearest possible: 1"):
        deal(few, 2)
