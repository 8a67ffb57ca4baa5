"""Builds models and fills them: from safetensors, whole or in shards, or synthetic.

A checkpoint is a folder with `dit*.safetensors` and `decoder*.safetensors`; a network may be cut
into any number of files. Keys and shapes must match exactly: a missing, unknown or misshapen key
is an error that names it. `builtin` is the embedded character in the package's assets;
`synthetic` are seeded random numbers, for speed work on shapes that have no public weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from characters_serve.config import ModelConfig
from characters_serve.model.audio import log_mel_for
from characters_serve.model.decoders.latent_video import LatentVideoDecoder, make_autoencoder
from characters_serve.model.decoders.reference_warp import VideoDecoder
from characters_serve.model.decoders.taehv import TAEHV
from characters_serve.model.decoders.wan_layers import WanVAE
from characters_serve.model.dit import CharacterDiT

BUILTIN = Path(__file__).parent.parent / "assets" / "tiny"


class WeightsError(ValueError):
    """A checkpoint that does not fit the model; the message names the file and the keys."""


def load_generator(
    model: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> CharacterDiT:
    network = load_network(lambda: CharacterDiT(model), model, "dit", device, dtype, seed)
    assert isinstance(network, CharacterDiT)
    # Log-mel is computed in float32 whatever the weights are: its range is 14 nats.
    network.log_mel = log_mel_for(model).to(device)
    return network


class StreamDecoder(Protocol):
    """What a decoder process runs. Each kind has a state of its own, which its caller holds."""

    def start(self, image: Tensor) -> Any:
        """image: uint8 (H, W, 3) -> the state that a session begins with."""

    def decode(self, latent: Tensor, state: Any) -> tuple[Tensor, Any]:
        """latent: (tokens, C) -> frames (frames_per_chunk, 3, H, W) in [0, 1], the next state."""


def load_decoder(
    model: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> VideoDecoder | LatentVideoDecoder:
    if model.decoder == "reference_warp":
        network = load_network(lambda: VideoDecoder(model), model, "decoder", device, dtype, seed)
        assert isinstance(network, VideoDecoder)
        return network
    vae = load_network(lambda: make_autoencoder(model), model, "decoder", device, dtype, seed)
    assert isinstance(vae, WanVAE | TAEHV)
    return LatentVideoDecoder(vae, model)


def save_network(network: nn.Module, folder: Path, name: str) -> None:
    """Writes fp16 weights: half the size, and finer than bf16 for values near one."""
    state = {key: value.half().contiguous().cpu() for key, value in network.state_dict().items()}
    save_file(state, folder / f"{name}.safetensors")


def load_network(
    make: Callable[[], nn.Module],
    model: ModelConfig,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> nn.Module:
    """The network that `make` makes, filled from the files `name*.safetensors`."""
    torch.manual_seed(seed)
    with torch.device(device):
        network = make()
    if model.weights == "synthetic":
        _fill_synthetic(network)
    else:
        folder = BUILTIN if model.weights == "builtin" else Path(model.weights)
        _load(network, folder, name)
    return network.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def _fill_synthetic(network: nn.Module) -> None:
    """Layers that start at zero would hide wrong data paths; every parameter gets random values."""
    for parameter in network.parameters():
        if not parameter.any():
            parameter.normal_(std=0.02)


@torch.no_grad()
def _load(network: nn.Module, folder: Path, name: str) -> None:
    files = sorted(folder.glob(f"{name}*.safetensors"))
    if not files:
        raise WeightsError(f"model.weights: no {name}*.safetensors in {folder}")
    missing = dict(network.state_dict())
    for file in files:
        try:
            _load_file(file, missing)
        except SafetensorError as error:
            raise WeightsError(f"{file}: {error}") from error
    if missing:
        raise WeightsError(f"{folder}: missing keys {', '.join(sorted(missing)[:8])}")


def _load_file(file: Path, missing: dict[str, Tensor]) -> None:
    """Copies the file's tensors into the model's, and strikes them off the list."""
    with safe_open(file, framework="pt") as shard:
        for key in shard.keys():  # noqa: SIM118 (not a mapping)
            if key not in missing:
                raise WeightsError(f"{file}: unknown or repeated key {key}")
            into, value = missing.pop(key), shard.get_tensor(key)
            if into.shape != value.shape:
                raise WeightsError(
                    f"{file}: {key} is {tuple(value.shape)}, the model has {tuple(into.shape)}"
                )
            into.copy_(value)
