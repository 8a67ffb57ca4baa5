"""Prompts through umT5: what the models' authors give their networks, without the padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from characters_serve import cli
from characters_serve.config import WanConfig
from characters_serve.engine.generator import load_prompt
from characters_serve.model.open.text import embed_text, save_text
from characters_serve.model.weights import WeightsError
from tests.unit.small_causal_wan import causal_wan

pytest.importorskip("transformers", reason="the extra `open` is not installed")
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

CPU = torch.device("cpu")
WAN = WanConfig(text_dim=24, text_len=8)
WORDS = ["<pad>", "</s>", "<unk>", "a", "woman", "&", "man", "wave"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small umT5 with random weights, and a tokenizer of eight words."""
    folder = tmp_path_factory.mktemp("umt5")
    torch.manual_seed(0)
    sizes = UMT5Config(
        vocab_size=len(WORDS), d_model=24, d_kv=6, num_heads=4, d_ff=32, num_layers=2
    )
    UMT5EncoderModel(sizes).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


def embedded(folder: Path, prompt: str, wan: WanConfig = WAN) -> Tensor:
    return embed_text(folder, prompt, wan, device=CPU, dtype=torch.float32)


def test_rows_are_those_of_the_padded_and_masked_prompt(folder: Path) -> None:
    """The authors fill prompts up, mask that, and cut it off again."""
    encoder = UMT5EncoderModel.from_pretrained(folder)
    ids = torch.tensor([[3, 4, 5, 6, 7, 1, 0, 0]])
    with torch.no_grad():
        expected = encoder(ids, attention_mask=(ids > 0).long()).last_hidden_state[0, :6]
    rows = embedded(folder, "  a woman  &amp;amp;\n man wave ")
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)


def test_long_prompts_are_cut(folder: Path) -> None:
    assert embedded(folder, "a woman " * 20).shape == (WAN.text_len, WAN.text_dim)


def test_the_file_is_what_the_engine_reads(folder: Path, tmp_path: Path) -> None:
    rows = embedded(folder, "a man")
    save_text(rows, tmp_path / "text.safetensors")
    wan = {"freq_dim": 32, "text_dim": 24, "text_len": 8}
    named = {"text_embedding": str(tmp_path / "text.safetensors")}
    prompt = load_prompt(causal_wan(weights="/somewhere", wan=wan | named), CPU)
    assert prompt is not None and torch.equal(prompt, rows[None])


def test_another_encoder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="rows of 24, the model takes 4096"):
        embedded(folder, "a man", WanConfig())
    with pytest.raises(WeightsError, match=r"with its config\.json"):
        embedded(tmp_path, "a man")


def test_the_command_writes_the_file_and_names_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.yaml"
    small.write_text(json.dumps({"model": causal_wan().model_dump(), "engine": {"device": "cpu"}}))
    arguments = ["embed-text", "--config", str(small), "--prompt", "a man"]
    out = tmp_path / "text.safetensors"
    assert cli.main([*arguments, str(folder), str(out)]) == 0
    assert capsys.readouterr().out.strip() == f"--set model.wan.text_embedding={out}"
    assert load_file(out)["text"].shape == (3, 24)
    assert cli.main([*arguments, str(tmp_path), str(out)]) == cli.EXIT_FAILED
    without = ["embed-text", "--prompt", "a man", str(folder), str(out)]
    assert cli.main(without) == cli.EXIT_CONFIG
