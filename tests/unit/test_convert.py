"""Published checkpoints become this project's, and what does not fit is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from characters_serve import cli
from characters_serve.model.decoders.latent_video import LatentVideoDecoder, make_autoencoder
from characters_serve.model.open.checkpoint import Checkpoint
from characters_serve.model.open.convert import Lora, convert
from characters_serve.model.open.live_avatar import LiveAvatar
from characters_serve.model.open.recipes import lora_targets, recipes_for
from characters_serve.model.weights import WeightsError, load_decoder, load_network
from tests.unit.small_causal_wan import causal_wan
from tests.unit.small_live_avatar import SMALL, drawn, network, published

AUTHORS = Path(__file__).parents[1] / "data" / "parity" / "live_avatar" / "authors.npz"
RANK, ALPHA = 4, 2.0


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return published(SMALL)


@pytest.fixture
def source(tmp_path: Path, state: dict[str, Tensor]) -> Path:
    """As it is published: a folder of shards, with other files beside them."""
    folder = tmp_path / "published"
    folder.mkdir()
    names = sorted(state)
    for part in range(3):
        save_file(
            {name: state[name] for name in names[part::3]},
            folder / f"diffusion_pytorch_model-{part + 1:05}-of-00003.safetensors",
        )
    (folder / "config.json").write_text("{}")
    return folder


def lora_state(form: str = "{module}.lora_{part}.default.weight") -> dict[str, Tensor]:
    shapes = {k: v for recipe in recipes_for(SMALL).values() for k, v in recipe.sources.items()}
    found = {}
    for seed, name in enumerate(sorted(lora_targets(recipes_for(SMALL)))):
        outputs, inputs = shapes[name]
        module = name.removesuffix(".weight")
        found[form.format(module=module, part="A")] = drawn((RANK, inputs), 5000 + seed)
        found[form.format(module=module, part="B")] = drawn((outputs, RANK), 6000 + seed)
    return found


def loaded(files: list[Path]) -> dict[str, Tensor]:
    return {key: value for file in files for key, value in load_file(file).items()}


def test_a_converted_folder_is_the_network(source: Path, tmp_path: Path) -> None:
    into = tmp_path / "ours"
    files = convert(SMALL, source, into, dtype=torch.float32, shard_bytes=200_000)
    assert len(files) > 3
    # A tensor is never cut.
    assert all(file.stat().st_size < 250_000 or len(load_file(file)) == 1 for file in files)
    found, expected = loaded(files), network().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)

    with pytest.raises(WeightsError, match=r"there are dit\*\.safetensors in it already"):
        convert(SMALL, source, into)


def test_weights_are_written_in_bf16(source: Path, tmp_path: Path) -> None:
    (file,) = convert(SMALL, source, tmp_path / "ours")
    assert {value.dtype for value in load_file(file).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "form",
    [
        "{module}.lora_{part}.default.weight",
        "{module}.lora_{part}.weight",
        "base_model.model.{module}.lora_{part}.default.weight",
        "base_model.model.{module}.lora_{part}.weight",
    ],
)
def test_a_lora_is_merged_however_its_names_are_written(
    form: str, source: Path, state: dict[str, Tensor], tmp_path: Path
) -> None:
    lora = lora_state(form)
    save_file(lora, tmp_path / "lora.safetensors")
    files = convert(
        SMALL,
        source,
        tmp_path / "ours",
        lora=tmp_path / "lora.safetensors",
        lora_alpha=ALPHA,
        dtype=torch.float32,
    )
    changed = dict(state)
    for name in lora_targets(recipes_for(SMALL)):
        module = name.removesuffix(".weight")
        a, b = (lora[form.format(module=module, part=part)] for part in "AB")
        changed[name] = state[name] + ALPHA / RANK * b @ a
    found = loaded(files)
    for key, recipe in recipes_for(SMALL).items():
        expected = recipe.build(*(changed[name] for name in recipe.sources))
        torch.testing.assert_close(found[key], expected, rtol=0, atol=1e-6)
    assert not torch.equal(
        found["injectors.0.attn.q.weight"], state["audio_injector.injector.0.q.weight"]
    )


def test_a_lora_merges_to_the_authors_bits(tmp_path: Path) -> None:
    """bfloat16: their weights, their LoRA, their result."""
    with np.load(AUTHORS) as arrays:
        bits = {name: arrays[name] for name in arrays.files if name.startswith("lora.")}
    tensors = {name: torch.from_numpy(value).view(torch.bfloat16) for name, value in bits.items()}
    modules = {name.removeprefix("lora.").rpartition(".")[0] for name in tensors}
    parts = {
        f"{module}.lora_{part}.default.weight": tensors[f"lora.{module}.{part}"]
        for module in modules
        for part in "AB"
    }
    save_file(parts, tmp_path / "lora.safetensors")
    targets = {f"{module}.weight" for module in modules}
    lora = Lora(Checkpoint(tmp_path / "lora.safetensors"), targets, alpha=4.0)
    assert len(modules) == 3
    for module in modules:
        merged = lora.merged(f"{module}.weight", tensors[f"lora.{module}.base"])
        assert torch.equal(merged, tensors[f"lora.{module}.merged"]), module


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"blocks.1.ffn.2.lora_B.default.weight": None}, "blocks.1.ffn.2.weight has only its"),
        (
            {
                "blocks.1.ffn.2.lora_A.default.weight": None,
                "blocks.1.ffn.2.lora_B.default.weight": None,
            },
            "missing key blocks.1.ffn.2.weight; the nearest is blocks.",
        ),
        (
            {"blocks.1.ffn.1.lora_A.default.weight": (4, 4)},
            "the model has no matrix blocks.1.ffn.1.weight",
        ),
        ({"blocks.1.ffn.2.lora_C.weight": (4, 4)}, "lora_C.weight is no part of a LoRA"),
        ({"blocks.0.self_attn.q.lora_A.default.weight": (4, 47)}, "does not fit blocks.0.self"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused(
    damage: dict[str, tuple[int, ...] | None], says: str, source: Path, tmp_path: Path
) -> None:
    lora = lora_state()
    for name, shape in damage.items():
        if shape is None:
            del lora[name]
        else:
            lora[name] = torch.zeros(shape)
    save_file(lora, tmp_path / "lora.safetensors")
    with pytest.raises(WeightsError) as refused:
        convert(SMALL, source, tmp_path / "ours", lora=tmp_path / "lora.safetensors")
    assert says in str(refused.value) and "lora.safetensors" in str(refused.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("entries", "prefix"),
    [
        ((), "model."),
        (("generator_ema",), "model._fsdp_wrapped_module."),
        (("generator",), "model._checkpoint_wrapped_module."),
        (("state_dict", "model"), "module."),
    ],
)
def test_pickled_files_are_read_under_their_training_names(
    entries: tuple[str, ...], prefix: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    held: object = {
        prefix + name.replace("blocks.1.", "blocks.1._orig_mod."): tensor
        for name, tensor in state.items()
    }
    for entry in reversed(entries):
        held = {entry: held, "step": 600}
    if entries == ("generator_ema",):
        held |= {"generator": {name: torch.zeros(1) for name in state}}  # type: ignore[operator]
    torch.save(held, tmp_path / "model.pt")
    checkpoint = Checkpoint(tmp_path / "model.pt")
    assert checkpoint.names == state.keys()
    assert torch.equal(checkpoint.get("blocks.1.ffn.0.bias"), state["blocks.1.ffn.0.bias"])


def test_a_file_in_torchs_older_format_is_read(state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "model.pth", _use_new_zipfile_serialization=False)
    checkpoint = Checkpoint(tmp_path / "model.pth")
    assert checkpoint.names == state.keys()
    assert torch.equal(checkpoint.get("blocks.1.ffn.0.bias"), state["blocks.1.ffn.0.bias"])


def test_an_object_in_a_pickled_file_is_named_without_advice_to_run_it(tmp_path: Path) -> None:
    torch.save({"generator": {"w": torch.zeros(1)}, "at": Path("x")}, tmp_path / "model.pt")
    with pytest.raises(WeightsError, match=r"model\.pt: it holds a pathlib\S+; only") as refused:
        Checkpoint(tmp_path / "model.pt")
    assert "weights_only" not in str(refused.value) and "\n" not in str(refused.value)


class _Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("/this/must/not/be/made",)


@pytest.mark.parametrize("held", [_Payload(), {"epoch": 3}, [1, 2], {}], ids=str)
def test_what_holds_no_weights_is_refused(held: object, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "model.pt")
    with pytest.raises(WeightsError, match=r"model\.pt"):
        Checkpoint(tmp_path / "model.pt")


def test_a_folder_or_file_without_tensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no \*\.safetensors in .*; it holds nothing"):
        Checkpoint(tmp_path)
    (tmp_path / "transformer").mkdir()
    with pytest.raises(WeightsError, match=r"no \*\.safetensors in .*; it holds transformer"):
        Checkpoint(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    with pytest.raises(WeightsError, match=r"broken\.safetensors"):
        Checkpoint(tmp_path)
    with pytest.raises(WeightsError, match=r"nowhere\.pt"):
        Checkpoint(tmp_path / "nowhere.pt")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            {"blocks.0.norm3.bias": None},
            "missing key blocks.0.norm3.bias; the nearest is blocks.",
        ),
        ({"blocks.0.norm3.bias": (47,)}, "blocks.0.norm3.bias is (47,), the model has (48,)"),
        ({"blocks.3.norm3.bias": (48,)}, "unknown key blocks.3.norm3.bias"),
        ({"blocks.0.norm3.bias ": (48,)}, "unknown key blocks.0.norm3.bias "),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(
    damage: dict[str, tuple[int, ...] | None], says: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    changed = dict(state)
    for name, shape in damage.items():
        if shape is None:
            del changed[name]
        else:
            changed[name] = torch.zeros(shape)
    save_file(changed, tmp_path / "all.safetensors")
    with pytest.raises(WeightsError) as refused:
        convert(SMALL, tmp_path / "all.safetensors", tmp_path / "ours")
    assert says in str(refused.value) and "all.safetensors" in str(refused.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_checkpoints_are_refused(
    dtype: torch.dtype, suffix: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    changed = state | {"blocks.0.ffn.0.weight": state["blocks.0.ffn.0.weight"].to(dtype)}
    save = save_file if suffix == "safetensors" else torch.save
    save(changed, tmp_path / f"quantised.{suffix}")
    with pytest.raises(WeightsError, match=r"blocks\.0\.ffn\.0\.weight is in .*; quantised") as no:
        convert(SMALL, tmp_path / f"quantised.{suffix}", tmp_path / "ours")
    assert f"quantised.{suffix}" in str(no.value)
    assert not (tmp_path / "ours").exists()


def test_half_precision_is_read(state: dict[str, Tensor], tmp_path: Path) -> None:
    half = {name: value.half() for name, value in state.items()}
    save_file(half, tmp_path / "half.safetensors")
    files = convert(SMALL, tmp_path / "half.safetensors", tmp_path / "ours", dtype=torch.float32)
    assert torch.equal(loaded(files)["blocks.0.ffn.0.bias"], half["blocks.0.ffn.0.bias"].float())


def test_a_missing_shard_is_named(source: Path, tmp_path: Path) -> None:
    gone = "diffusion_pytorch_model-00002-of-00003.safetensors"
    (source / gone).unlink()
    with pytest.raises(WeightsError, match=f"published: missing files {gone}$"):
        convert(SMALL, source, tmp_path / "ours")


@pytest.mark.parametrize("name", ["blocks.0.attn1.to_q.weight", "decoder.conv_in.weight"])
def test_diffusers_layout_is_told_by_its_names(name: str, tmp_path: Path) -> None:
    save_file({name: torch.zeros(2)}, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(WeightsError, match="diffusers' layout; the authors' own is needed"):
        convert(SMALL, tmp_path, tmp_path / "ours")


def test_the_autoencoder_comes_along_in_its_own_precision(source: Path, tmp_path: Path) -> None:
    published_vae = make_autoencoder(SMALL).state_dict()
    torch.save(published_vae, tmp_path / "vae.pth")
    files = convert(SMALL, source, tmp_path / "ours", vae=tmp_path / "vae.pth")
    assert [file.name.partition("-")[0] for file in files] == ["dit", "decoder"]
    found = load_file(files[1])
    assert found.keys() == published_vae.keys()
    assert all(torch.equal(found[key], value) for key, value in published_vae.items())
    # What was written is what the loaders of this project take.
    model = SMALL.model_copy(update={"weights": str(tmp_path / "ours")})
    cpu = torch.device("cpu")
    load_network(lambda: LiveAvatar(model), model, "dit", cpu, torch.float32, 0)
    decoder = load_decoder(model, device=cpu, dtype=torch.float32)
    assert isinstance(decoder, LatentVideoDecoder)
    key = "decoder.conv1.weight"
    assert torch.equal(decoder.vae.state_dict()[key], published_vae[key])

    torch.save({key: published_vae[key]}, tmp_path / "part.pth")
    with pytest.raises(WeightsError, match=r"part\.pth: missing key"):
        convert(SMALL, source, tmp_path / "others", vae=tmp_path / "part.pth")
    assert not (tmp_path / "others").exists()


def test_an_unconverted_checkpoint_does_not_fit_the_network(state: dict[str, Tensor]) -> None:
    """Its q and k are ordered otherwise, so it must not load by mistake."""
    assert LiveAvatar(SMALL).state_dict().keys() - state.keys()
    assert not {"blocks.0.self_attn.qkv.weight", "blocks.0.self_attn.qkv.bias"} & state.keys()


def test_the_command_converts_and_says_what_is_wrong(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "small.yaml"
    model = SMALL.model_dump_json()
    config.write_text(f'{{"model": {model}, "engine": {{"degraded_passes": 4, "idle_passes": 4}}}}')
    arguments = ["convert", "--config", str(config), "--family", "live_avatar", "--merged"]
    into = tmp_path / "ours"
    assert cli.main([*arguments, str(source), str(into)]) == 0
    said = capsys.readouterr()
    assert said.out == f"--set model.weights={into}\n"
    assert "100%" in said.err
    assert list(into.iterdir()) == [into / "dit-00001-of-00001.safetensors"]

    assert cli.main([*arguments, str(tmp_path / "nowhere"), str(into)]) == cli.EXIT_FAILED
    assert "nowhere" in capsys.readouterr().err
    assert cli.main([*arguments[:1], *arguments[3:], str(source), "x"]) == cli.EXIT_CONFIG
    assert "model.family" in capsys.readouterr().err


def test_a_lora_and_its_scale_are_not_forgotten(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base model converts as well without, and looks like a bad LiveAvatar."""
    talker, film = tmp_path / "talker.yaml", tmp_path / "film.yaml"
    passes = '"engine": {"degraded_passes": 4, "idle_passes": 4}'
    talker.write_text(f'{{"model": {SMALL.model_dump_json()}, {passes}}}')
    film.write_text(f'{{"model": {causal_wan().model_dump_json()}}}')
    places = [str(source), str(tmp_path / "ours")]
    for config, family, more, says in (
        (talker, "live_avatar", [], "liveavatar.safetensors"),
        (film, "causal_wan", ["--lora", "lora.pt"], "--lora-alpha: "),
    ):
        command = ["convert", "--config", str(config), "--family", family, *more, *places]
        assert cli.main(command) == cli.EXIT_CONFIG
        assert says in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
