"""Builds models and fills them: from safetensors, whole or in shards, or synthetic.

A checkpoint is a folder with `dit*.safetensors` and `decoder*.safetensors`; a network may be cut
into any number of files. Keys and shapes must match exactly: a missing, unknown or misshapen key
is an error that names it, before any tensor is read. `builtin` is the embedded character in the
package's assets; `synthetic` are seeded random numbers, for speed work on shapes that have no
public weights.

A tensor-parallel rank reads and makes its own part only, in the target's format and on its device:
of 57 billion parameters a float32 copy would take 229 GB. The whole model is the same for every
number of ranks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from characters_serve.config import ConfigError, ModelConfig
from characters_serve.model.audio import log_mel_for
from characters_serve.model.decoders.latent_video import LatentVideoDecoder, make_autoencoder
from characters_serve.model.decoders.reference_warp import VideoDecoder
from characters_serve.model.decoders.taehv import TAEHV
from characters_serve.model.decoders.wan_layers import WanVAE
from characters_serve.model.dit import CharacterDiT
from characters_serve.model.linear import AllReduce, Cut, alone, cuts_of
from characters_serve.model.shard import Shard

BUILTIN = Path(__file__).parent.parent / "assets" / "tiny"

_SMALL_STD = 0.02
_FLOATS = {
    *("F64", "F32", "F16", "BF16"),
    *map(str, (torch.float64, torch.float32, torch.float16, torch.bfloat16)),
}
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")


class WeightsError(ConfigError):
    """A checkpoint that does not fit the model; the message names the file and the keys."""


def load_generator(
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    shard: Shard | None = None,
    all_reduce: AllReduce = alone,
) -> CharacterDiT:
    """shard: the part of a tensor-parallel rank; without it the whole model."""
    network = load_network(
        lambda: CharacterDiT(model, shard, all_reduce), model, "dit", device, dtype, seed
    )
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
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    fused: bool = False,
) -> VideoDecoder | LatentVideoDecoder:
    """fused: see LatentVideoDecoder; the embedded character's decoder has one path only."""
    if model.decoder == "reference_warp":
        network = load_network(lambda: VideoDecoder(model), model, "decoder", device, dtype, seed)
        assert isinstance(network, VideoDecoder)
        return network
    vae = load_network(lambda: make_autoencoder(model), model, "decoder", device, dtype, seed)
    assert isinstance(vae, WanVAE | TAEHV)
    return LatentVideoDecoder(vae, model, fused=fused)


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
    with torch.device(device), _made_in(dtype):
        network = make()
    cuts = cuts_of(network)
    if model.weights == "synthetic":
        _fill_synthetic(network, cuts, seed)
    else:
        folder = BUILTIN if model.weights == "builtin" else Path(model.weights)
        _load(network, cuts, folder, name)
    return network.eval().requires_grad_(False)


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _fill_synthetic(network: nn.Module, cuts: dict[str, Cut], seed: int) -> None:
    """Random values for all but norms, which stay one: zeros would hide wrong data paths.

    Matrices get the spread that torch starts them with, uniform in +-1/sqrt(inputs); those that
    training starts at zero, and vectors, a small one. Each unit of a cut weight has a seed of its
    own, whichever rank makes it.
    """
    for key, parameter in network.named_parameters():
        if bool((parameter == 1).all()):
            continue
        starts_at_zero = not bool(parameter.any())
        cut = cuts.get(key)
        inputs = cut.size if cut and cut.dim == 1 else parameter[0].numel()
        small = starts_at_zero or parameter.ndim == 1
        std = _SMALL_STD if small else (3 * inputs) ** -0.5
        if cut is None:
            _fill_normal(parameter, std, f"{seed}/{key}")
            continue
        units = (unit for run in cut.runs for unit in run[:: cut.unit])
        parts = torch.split(parameter, cut.unit, cut.dim)
        for part, unit in zip(parts, units, strict=True):
            _fill_normal(part, std, f"{seed}/{key}/{unit}")


def _fill_normal(into: Tensor, std: float, seed: str) -> None:
    """In float32, so that every format gets the same numbers but for rounding."""
    generator = torch.Generator(into.device)
    digest = hashlib.blake2b(seed.encode(), digest_size=7).digest()
    generator.manual_seed(int.from_bytes(digest, "big"))
    values = torch.empty(into.shape, dtype=torch.float32, device=into.device)
    into.copy_(values.normal_(std=std, generator=generator))


def check_network(network: nn.Module, folder: Path, name: str) -> dict[Path, list[str]]:
    """Holds the files `name*.safetensors` against the network, by their headers alone.

    The network may be on the meta device. Returns the keys of each file. Raises WeightsError.
    """
    try:
        return _check_files(network, folder, name)
    except WeightsError as error:
        raise WeightsError(f"model.weights: {error}") from error


def _check_files(network: nn.Module, folder: Path, name: str) -> dict[Path, list[str]]:
    files = sorted(folder.glob(f"{name}*.safetensors"))
    if not files:
        raise WeightsError(
            f"no {name}*.safetensors in {folder}; `characters convert` makes them "
            "of a published checkpoint and its --vae"
        )
    refuse_absent_shards(files)
    cuts, missing, found = cuts_of(network), dict(network.state_dict()), {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                found[file] = list(stored.keys())
                for key in found[file]:
                    if key not in missing:
                        raise WeightsError(f"{file}: unknown or repeated key {key}")
                    _check_tensor(file, key, stored.get_slice(key), missing.pop(key), cuts.get(key))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file}: {error}") from error
    if missing:
        raise WeightsError(f"{folder}: missing keys {', '.join(sorted(missing)[:8])}")
    return found


def _check_tensor(file: Path, key: str, stored: Any, into: Tensor, cut: Cut | None) -> None:
    shape, whole = tuple(stored.get_shape()), list(into.shape)
    if cut is not None:
        whole[cut.dim] = cut.size
    if shape != tuple(whole):
        raise WeightsError(f"{file}: {key} is {shape}, the model has {tuple(whole)}")
    refuse_quantised(file, key, stored.get_dtype())


def refuse_quantised(file: Path, key: str, dtype: str) -> None:
    """dtype: as safetensors or torch names it. Copied, such numbers would silently lack a scale."""
    if dtype not in _FLOATS:
        raise WeightsError(
            f"{file}: {key} is in {dtype}; quantised weights are not read: float32, float16 or "
            "bfloat16 is needed"
        )


def refuse_absent_shards(files: list[Path]) -> None:
    """files: of one folder; `X-00001-of-00003.safetensors` says that there are two more."""
    present = {file.name for file in files}
    for file in files:
        shard = _SHARD.fullmatch(file.name)
        if shard is None:
            continue
        name, count, ending = shard.groups()
        numbered = (f"{name}-{number:05}-of-{count}{ending}" for number in range(1, int(count) + 1))
        if absent := [name for name in numbered if name not in present]:
            raise WeightsError(f"{file.parent}: missing files {', '.join(absent[:8])}")


@torch.no_grad()
def _load(network: nn.Module, cuts: dict[str, Cut], folder: Path, name: str) -> None:
    """Copies what the files hold, or the parts wanted, into the model's tensors.

    Of a cut tensor only the rank's runs are read from the disk.
    """
    state = network.state_dict()
    for file, keys in check_network(network, folder, name).items():
        with safe_open(file, framework="pt") as stored:
            for key in keys:
                into, cut = state[key], cuts.get(key)
                if cut is None:
                    into.copy_(stored.get_tensor(key))
                    continue
                value = stored.get_slice(key)
                parts = torch.split(into, [len(run) for run in cut.runs], cut.dim)
                for part, run in zip(parts, cut.runs, strict=True):
                    rows = slice(run.start, run.stop)
                    part.copy_(value[rows] if cut.dim == 0 else value[:, rows])
