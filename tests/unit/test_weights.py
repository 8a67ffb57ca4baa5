"""Checkpoints: what is saved is what is loaded, and what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from characters_serve.model.weights import (
    WeightsError,
    load_decoder,
    load_generator,
    save_network,
)
from tests.unit.small_model import SMALL

CPU = torch.device("cpu")
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
    with pytest.raises(WeightsError, match="missing keys") as refused:
        loaded("dit", checkpoint)
    assert str(checkpoint) in str(refused.value) and keys[1] in str(refused.value)


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
    assert str(checkpoint / "dit.safetensors") in said
    assert "blocks.1.q_norm.weight" in said and str(shape) in said and "(32,)" in said


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
