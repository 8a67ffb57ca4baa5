"""In: a prompt. Out: the rows that umT5 makes of it, for the file that `wan.text_embedding` names.

Once a prompt, before serving: the encoder has 5.7 billion parameters, more than most models that
read it. Needs transformers (the extra `open`).
"""

from __future__ import annotations

import html
import importlib.util
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from characters_serve.config import WanConfig
from characters_serve.model.open.checkpoint import pretrained
from characters_serve.model.weights import WeightsError


@torch.no_grad()
def embed_text(
    folder: Path, prompt: str, wan: WanConfig, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """folder: google/umt5-xxl as transformers stores it -> (rows, text_dim).

    One row a token, the end's included; of longer prompts the first `text_len`. Markup and spaces
    are cleaned as the models' authors do. Raises WeightsError.
    """
    if importlib.util.find_spec("transformers") is None:
        raise WeightsError("umT5 needs transformers: pip install 'characters-serve[open]'")
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder}: expected the folder of umt5-xxl, with its config.json")
    from transformers import AutoTokenizer, UMT5EncoderModel

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = pretrained(UMT5EncoderModel, folder, dtype=dtype)
    if encoder.config.d_model != wan.text_dim:
        raise WeightsError(
            f"{folder}: rows of {encoder.config.d_model}, the model takes {wan.text_dim}"
        )
    text = " ".join(html.unescape(html.unescape(prompt)).split())
    tokens = tokenizer(text, truncation=True, max_length=wan.text_len, return_tensors="pt")
    rows: Tensor = encoder.to(device).eval()(tokens.input_ids.to(device)).last_hidden_state
    return rows[0]


def save_text(rows: Tensor, file: Path) -> None:
    save_file({"text": rows.cpu().contiguous()}, file)
