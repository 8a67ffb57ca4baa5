"""In: the configuration. Out: the family's generator, loaded, and the prompt of its sessions.

Knows nothing of steps, sessions or processes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from characters_serve.config import ModelConfig
from characters_serve.engine.denoiser import Generator
from characters_serve.model.decoders.latent_video import LatentVideoDecoder
from characters_serve.model.decoders.stream import StreamState
from characters_serve.model.linear import AllReduce, alone
from characters_serve.model.open.causal_wan import CausalWan
from characters_serve.model.open.live_avatar import EncodeStill, LiveAvatar, LiveAvatarGenerator
from characters_serve.model.open.wav2vec2 import load_speech_features
from characters_serve.model.shard import Shard
from characters_serve.model.weights import (
    WeightsError,
    load_decoder,
    load_generator,
    load_network,
)


def load_family(
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    shard: Shard | None = None,
    all_reduce: AllReduce = alone,
) -> Generator:
    """The generator of `model.family`, or a tensor-parallel rank's shard. Raises WeightsError.

    What open families have around their blocks, speech model and encoder, every rank has whole.
    """
    if model.family == "characters":
        return load_generator(
            model, device=device, dtype=dtype, seed=seed, shard=shard, all_reduce=all_reduce
        )
    if model.family == "causal_wan":
        assert model.causal_wan is not None
        wan = load_network(
            lambda: CausalWan(model, None, shard, all_reduce), model, "dit", device, dtype, seed
        )
        assert isinstance(wan, CausalWan)
        if model.causal_wan.start == "image":
            encode = _still_encoder(model, device, dtype)
            wan.encode_image = lambda image: encode(image, 1)
        return wan
    hear = load_speech_features(model, device=device, dtype=dtype, seed=seed)
    dit = load_network(
        lambda: LiveAvatar(model, shard, all_reduce), model, "dit", device, dtype, seed
    )
    assert isinstance(dit, LiveAvatar)
    return LiveAvatarGenerator(dit, hear, _still_encoder(model, device, dtype))


def load_prompt(model: ModelConfig, device: torch.device) -> Tensor | None:
    """The text encoder's rows (1, n, text_dim) of the configured prompt; None for families that
    take no text. With synthetic weights, random rows."""
    if model.wan is None:
        return None
    if model.weights == "synthetic":
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(1, model.wan.text_len, model.wan.text_dim, generator=generator)
        return rows.to(device)
    field = "model.wan.text_embedding"
    file = Path(model.wan.text_embedding or Path(model.weights) / "text.safetensors")
    if not file.is_file():
        raise WeightsError(f"{field}: no {file}; `characters embed-text` makes it of a prompt")
    try:
        text = load_file(file).get("text")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{field}: {file}: {error}") from error
    wan = model.wan
    if text is None or text.ndim != 2 or text.shape[1] != wan.text_dim or len(text) > wan.text_len:
        found = "nothing of that name" if text is None else tuple(text.shape)
        raise WeightsError(
            f"{field}: {file} has {found}; expected `text` (up to {wan.text_len}, {wan.text_dim})"
        )
    return text[None].to(device)


def _still_encoder(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> EncodeStill:
    decoder = load_decoder(model, device=device, dtype=dtype)
    if not isinstance(decoder, LatentVideoDecoder):
        raise WeightsError(f"model.decoder: {model.decoder} has no encoder for a reference")
    vae = decoder.vae

    def encode(image: Tensor, num_frames: int) -> Tensor:
        pixels = vae.darkest + (1 - vae.darkest) * image.permute(0, 2, 3, 1)[:, None]
        video = pixels.to(dtype).expand(-1, num_frames, -1, -1, -1)
        return vae.encode(video, StreamState()).movedim(-1, 1)

    return encode
