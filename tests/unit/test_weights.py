"""Checkpoints: what is saved is what is loaded, and what does not fit is named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from characters_serve.config import ModelConfig
from characters_serve.model import weights
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.linear import cuts_of
from characters_serve.model.open.causal_wan import CausalWan
from characters_serve.model.open.live_avatar import LiveAvatar
from characters_serve.model.shard import deal
from characters_serve.model.weights import (
    WeightsError,
    load_decoder,
    load_generator,
    load_network,
    save_network,
)
from tests.unit import small_causal_wan, small_live_avatar
from tests.unit.small_model import SMALL

CPU = torch.device("cpu")
# Seven heads and MLP tiles: no number of ranks but one and seven shares them equally.
SHARED = ModelConfig(**{**SMALL.model_dump(), "num_heads": 7, "mlp_dim": 7 * 32})
# Half of fp16's spacing relative to a value, and of its smallest step.
FP16_RTOL, FP16_ATOL = 2.0**-11, 2.0**-25


def synthetic(name: str, seed: int = 0) -> nn.Module:
    load = load_generator if name == "dit" else load_decoder
    return load(SMALL, device=CPU, dtype=torch.float32, seed=seed)


def loaded(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    load = load_generator if name == "dit" else load_decoder
    model = SMALL.model_copy(update={"weights": str(folder)})
    # Another seed: nothing may be left of how the parameters start.
    return load(model, device=CPU, dtype=dtype, seed=99)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_network(synthetic("dit"), tmp_path, "dit")
    return tmp_path


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replaces tensors of the saved transformer, or drops those that are None."""
    state = load_file(folder / "dit.safetensors") | change
    save_file(
        {key: value for key, value in state.items() if value is not None},
        folder / "dit.safetensors",
    )


@pytest.mark.parametrize("name", ["dit", "decoder"])
def test_saved_is_loaded(name: str, tmp_path: Path) -> None:
    network = synthetic(name)
    save_network(network, tmp_path, name)
    assert {t.dtype for t in load_file(tmp_path / f"{name}.safetensors").values()} == {
        torch.float16
    }
    state = loaded(name, tmp_path).state_dict()
    assert state.keys() == network.state_dict().keys()
    for key, value in network.state_dict().items():
        assert state[key].dtype == torch.float32
        torch.testing.assert_close(state[key], value, rtol=FP16_RTOL, atol=FP16_ATOL)


def test_a_network_may_be_cut_into_files(checkpoint: Path) -> None:
    whole = loaded("dit", checkpoint).state_dict()
    state = load_file(checkpoint / "dit.safetensors")
    (checkpoint / "dit.safetensors").unlink()
    keys = sorted(state)
    for part in range(3):
        save_file(
            {key: state[key] for key in keys[part::3]},
            checkpoint / f"dit-{part + 1:05}-of-00003.safetensors",
        )
    cut = loaded("dit", checkpoint).state_dict()
    assert all(torch.equal(cut[key], whole[key]) for key in keys)

    (checkpoint / "dit-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"missing files dit-00002-of-00003\.saf") as refused:
        loaded("dit", checkpoint)
    assert str(checkpoint) in str(refused.value)


def test_a_key_in_two_files_is_refused(checkpoint: Path) -> None:
    save_file({"place": torch.zeros(8, 64)}, checkpoint / "dit-old.safetensors")
    with pytest.raises(WeightsError, match="unknown or repeated key place"):
        loaded("dit", checkpoint)


def test_a_missing_key_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, {"blocks.1.q_norm.weight": None})
    with pytest.raises(WeightsError, match=r"missing keys blocks\.1\.q_norm\.weight$") as refused:
        loaded("dit", checkpoint)
    assert str(checkpoint) in str(refused.value)


def test_an_unknown_key_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, {"blocks.2.q_norm.weight": torch.ones(32)})
    with pytest.raises(WeightsError, match=r"key blocks\.2\.q_norm\.weight$") as refused:
        loaded("dit", checkpoint)
    assert str(checkpoint / "dit.safetensors") in str(refused.value)


# The second would broadcast into place without a word.
@pytest.mark.parametrize("shape", [(16,), (1,)])
def test_a_misshapen_key_is_named(checkpoint: Path, shape: tuple[int, ...]) -> None:
    rewrite(checkpoint, {"blocks.1.q_norm.weight": torch.ones(shape)})
    with pytest.raises(WeightsError) as refused:
        loaded("dit", checkpoint)
    said = str(refused.value)
    assert said.startswith(f"model.weights: {checkpoint / 'dit.safetensors'}: ")
    assert "blocks.1.q_norm.weight" in said and str(shape) in said and "(32,)" in said


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_numbers_are_refused(dtype: torch.dtype, checkpoint: Path) -> None:
    """Copied as they are, they would lack their scale, without a word."""
    rewrite(checkpoint, {"blocks.1.q_norm.weight": torch.ones(32).to(dtype)})
    with pytest.raises(WeightsError, match=r"q_norm\.weight is in .*; quantised") as refused:
        loaded("dit", checkpoint)
    assert str(checkpoint / "dit.safetensors") in str(refused.value)


def test_everything_is_checked_before_anything_is_read(
    checkpoint: Path, read: Counter[str]
) -> None:
    save_file({"unknown": torch.zeros(2)}, checkpoint / "dit-last.safetensors")
    with pytest.raises(WeightsError, match="unknown or repeated key unknown"):
        loaded("dit", checkpoint)
    assert not read


def test_a_folder_without_the_network_is_named(checkpoint: Path) -> None:
    with pytest.raises(WeightsError, match=r"no decoder\*\.safetensors in ") as refused:
        loaded("decoder", checkpoint)
    assert str(checkpoint) in str(refused.value)


@pytest.mark.parametrize("kept", [0, 4, 1000])
def test_a_file_cut_short_is_named(checkpoint: Path, kept: int) -> None:
    file = checkpoint / "dit.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightsError) as refused:
        loaded("dit", checkpoint)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize("name", ["dit", "decoder"])
def test_synthetic_weights_are_seeded_and_nowhere_zero(name: str) -> None:
    one, same, other = (synthetic(name, seed) for seed in (1, 1, 2))
    others = dict(other.named_parameters())
    again = dict(same.named_parameters())
    for key, value in one.named_parameters():
        assert value.any(), key
        assert not value.requires_grad
        assert torch.equal(value, again[key]), key
        # Norms start at one, whatever the seed.
        assert not torch.equal(value, others[key]) or bool((value == 1).all()), key


def test_bf16_weights_leave_the_log_mel_in_float32(checkpoint: Path) -> None:
    dit = load_generator(
        SMALL.model_copy(update={"weights": str(checkpoint)}), device=CPU, dtype=torch.bfloat16
    )
    assert {parameter.dtype for parameter in dit.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in dit.log_mel.buffers()} == {torch.float32}
    pcm = 0.1 * torch.randn(1, dit.log_mel.window_samples)
    in_float32 = load_generator(SMALL, device=CPU, dtype=torch.float32).log_mel(pcm)
    assert torch.equal(dit.log_mel(pcm), in_float32)
    condition = dit.condition(pcm, torch.zeros(1, SMALL.frames_per_chunk, SMALL.num_controls))
    assert condition.tokens.dtype == torch.bfloat16 and condition.tokens.isfinite().all()


def test_networks_come_ready_to_serve(checkpoint: Path) -> None:
    dit = loaded("dit", checkpoint)
    assert not dit.training
    assert not any(parameter.requires_grad for parameter in dit.parameters())


def shard_of(model: ModelConfig, rank: int, size: int, dtype: torch.dtype) -> CharacterDiT:
    return load_generator(model, device=CPU, dtype=dtype, shard=deal(model, size)[rank])


def assert_is_part_of(shard: CharacterDiT, whole: CharacterDiT) -> None:
    """Every tensor of the shard is the whole one, or exactly its cut of it."""
    parts, cuts = shard.state_dict(), cuts_of(shard)
    assert len(cuts) == 2 * SHARED.num_blocks
    for key, value in whole.state_dict().items():
        if key in cuts:
            kept = torch.tensor([row for run in cuts[key].runs for row in run])
            value = value.index_select(cuts[key].dim, kept)
        assert torch.equal(parts[key], value), key


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("stored", [False, True], ids=["synthetic", "checkpoint"])
def test_shards_are_parts_of_one_whole(stored: bool, size: int, tmp_path: Path) -> None:
    model, dtype = SHARED, torch.float32
    whole = load_generator(model, device=CPU, dtype=dtype)
    if stored:
        whole.half()  # as it is saved
        save_network(whole, tmp_path, "dit")
        whole.float()
        model = SHARED.model_copy(update={"weights": str(tmp_path)})
    for rank in {0, size - 1}:
        assert_is_part_of(shard_of(model, rank, size, dtype), whole)


def test_synthetic_weights_are_the_same_in_every_format() -> None:
    exact = shard_of(SHARED, 1, 2, torch.float32).state_dict()
    for key, value in shard_of(SHARED, 1, 2, torch.bfloat16).state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, exact[key].bfloat16()), key


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Numbers that are read from checkpoints' files, by key."""
    read: Counter[str] = Counter()

    class Slice:
        def __init__(self, key: str, stored: Any) -> None:
            self.key, self.stored = key, stored

        def get_shape(self) -> list[int]:
            shape: list[int] = self.stored.get_shape()
            return shape

        def get_dtype(self) -> str:
            dtype: str = self.stored.get_dtype()
            return dtype

        def __getitem__(self, index: Any) -> Tensor:
            value: Tensor = self.stored[index]
            read[self.key] += value.numel()
            return value

    class File:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.stored: Any = safe_open(*arguments, **options)

        def __enter__(self) -> File:
            self.stored.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.stored.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self.stored.keys())

        def get_slice(self, key: str) -> Slice:
            return Slice(key, self.stored.get_slice(key))

        def get_tensor(self, key: str) -> Tensor:
            value: Tensor = self.stored.get_tensor(key)
            read[key] += value.numel()
            return value

    monkeypatch.setattr(weights, "safe_open", File)
    return read


def test_a_rank_reads_its_own_part_of_a_checkpoint(tmp_path: Path, read: Counter[str]) -> None:
    save_network(load_generator(SHARED, device=CPU, dtype=torch.float32), tmp_path, "dit")
    model = SHARED.model_copy(update={"weights": str(tmp_path)})
    state = shard_of(model, 2, 3, torch.float32).state_dict()
    assert dict(read) == {key: value.numel() for key, value in state.items()}


@pytest.mark.parametrize("family", ["causal_wan", "live_avatar"])
def test_a_rank_of_an_open_family_reads_and_makes_its_own_part(
    family: str, tmp_path: Path, read: Counter[str]
) -> None:
    """Heads of q, k, v, of their biases and of the norms over all heads; columns of the MLP."""
    model = small_causal_wan.causal_wan() if family == "causal_wan" else small_live_avatar.SMALL

    def load(model: ModelConfig, rank: int, size: int) -> nn.Module:
        shard = deal(model, size)[rank]
        kind = CausalWan(model, None, shard) if family == "causal_wan" else LiveAvatar(model, shard)
        return load_network(lambda: kind, model, "dit", CPU, torch.float32, 0)

    whole = load(model, 0, 1).half()
    save_network(whole, tmp_path, "dit")
    stored = model.model_copy(update={"weights": str(tmp_path)})
    for rank in range(2):
        read.clear()
        for shard in (load(stored, rank, 2), load(model, rank, 2).half()):
            cuts, parts = cuts_of(shard), shard.state_dict()
            assert len(cuts) == len([key for key in parts if _is_cut(key)])
            for key, value in whole.state_dict().items():
                if key in cuts:
                    kept = torch.tensor([row for run in cuts[key].runs for row in run])
                    value = value.index_select(cuts[key].dim, kept)
                torch.testing.assert_close(parts[key].float(), value.float(), rtol=0, atol=0)
        assert dict(read) == {key: value.numel() for key, value in parts.items()}


def _is_cut(key: str) -> bool:
    """By its name: all of attention and MLP but the biases of what is summed over the ranks."""
    of_ranks = ".self_attn." in key or ".cross_attn." in key or ".ffn." in key or ".attn." in key
    return of_ranks and not key.endswith((".o.bias", ".ffn.2.bias"))


def test_a_cut_weight_of_another_size_is_named_with_its_whole_shape(tmp_path: Path) -> None:
    save_network(load_generator(SMALL, device=CPU, dtype=torch.float32), tmp_path, "dit")
    model = SHARED.model_copy(update={"weights": str(tmp_path)})
    whole = (7 * 3 * 32 + 7 * 32, 64)
    with pytest.raises(WeightsError, match=r"in_projection.* the model has ") as refused:
        shard_of(model, 0, 2, torch.float32)
    assert str(whole) in str(refused.value)


class LargestFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of the largest float32 tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                self.elements = max(self.elements, value.numel())
        return result


def test_a_rank_never_holds_a_cut_weight_in_float32() -> None:
    """Of the 57B model such a copy is 2 GB for each block's in-projection, and 229 GB in all."""
    model = SHARED.model_copy(update={"mlp_dim": 7 * 128 * 32})
    in_projection = (3 * 7 * 32 + model.mlp_dim) * model.dim
    with LargestFloat32() as largest:  # type: ignore[no-untyped-call]
        shard_of(model, 0, 1, torch.bfloat16)
    assert 0 < largest.elements < in_projection / 2
