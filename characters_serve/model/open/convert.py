"""In: a published checkpoint, and a LoRA if there is one. Out: a folder that `model.weights` names.

Every tensor is read, merged and written once, in shards, so that the memory holds one shard at a
time. All names and shapes are checked before the first is read. Knows nothing of any one family:
its recipes say what is made from what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from characters_serve.config import ModelConfig
from characters_serve.model.decoders.latent_video import make_autoencoder
from characters_serve.model.open.checkpoint import Checkpoint, missing_key
from characters_serve.model.open.recipes import Recipe, Recipes, lora_targets, recipes_for
from characters_serve.model.weights import WeightsError

LIVE_AVATAR_ALPHA = 64.0
_SHARD_BYTES = 4 * 1024**3
# In a transformer's names, and in an autoencoder's.
_DIFFUSERS = (".attn1.", ".conv_in.")


class Lora:
    """Low-rank changes of a checkpoint's matrices: W + alpha / rank x B A.

    Names are `[base_model.model.]MODULE.lora_{A,B}[.default].weight`. A file that fits no matrix,
    or not all that it should, would silently leave the base model as it is: it is refused.
    """

    def __init__(self, checkpoint: Checkpoint, targets: set[str], alpha: float) -> None:
        self._checkpoint = checkpoint
        self._alpha = alpha
        self._parts: dict[str, dict[str, str]] = {}
        for name in checkpoint.names:
            bare = name.removeprefix("base_model.model.").removeprefix("model.")
            bare = bare.replace(".default.weight", ".weight")
            for part in "AB":
                module, found, rest = bare.partition(f".lora_{part}.weight")
                if found and not rest:
                    self._parts.setdefault(f"{module}.weight", {})[part] = name
                    break
            else:
                raise WeightsError(f"{checkpoint.path}: {name} is no part of a LoRA")
        for target in sorted(targets - self._parts.keys()):
            raise WeightsError(f"{checkpoint.path}: {missing_key(target, self._parts)} (as a LoRA)")
        for unknown in sorted(self._parts.keys() - targets):
            raise WeightsError(f"{checkpoint.path}: the model has no matrix {unknown} to change")

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        parts = self._parts.get(name)
        if parts is None:
            return
        if parts.keys() != {"A", "B"}:
            raise WeightsError(f"{self._checkpoint.path}: {name} has only its lora_{min(parts)}")
        a, b = (self._checkpoint.shape(parts[part]) for part in "AB")
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or (b[0], a[1]) != shape:
            raise WeightsError(
                f"{self._checkpoint.path}: lora_B {b} x lora_A {a} does not fit {name} {shape}"
            )

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Summed in float32 and rounded once to the weight's own type."""
        if name not in self._parts:
            return weight
        a, b = (self._checkpoint.get(self._parts[name][part]).float() for part in "AB")
        return (weight.float() + (b @ a) * (self._alpha / len(a))).to(weight.dtype)


def convert(
    model: ModelConfig,
    source: Path,
    destination: Path,
    *,
    lora: Path | None = None,
    lora_alpha: float = LIVE_AVATAR_ALPHA,
    vae: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = _SHARD_BYTES,
) -> list[Path]:
    """Writes `dit-00001-of-0000N.safetensors` .. and, of `vae`, `decoder-...`; returns the files.

    vae: the published file of `model.decoder`, kept in float32. Raises WeightsError.
    """
    recipes = recipes_for(model)
    checkpoint = Checkpoint(source)
    changes = None
    if lora is not None:
        changes = Lora(Checkpoint(lora), lora_targets(recipes), lora_alpha)
    _check(checkpoint, recipes, changes)
    coder = None if vae is None else Checkpoint(vae)
    coder_recipes = _as_published(model)
    if coder is not None:
        _check(coder, coder_recipes, None)
    for name in ("dit", "decoder"):
        if list(destination.glob(f"{name}*.safetensors")):
            raise WeightsError(f"{destination}: there are {name}*.safetensors in it already")
    destination.mkdir(parents=True, exist_ok=True)

    def tensor(name: str) -> Tensor:
        weight = checkpoint.get(name)
        return weight if changes is None else changes.merged(name, weight)

    files = _write(recipes, tensor, destination, "dit", dtype, shard_bytes)
    if coder is not None:
        files += _write(
            coder_recipes, coder.get, destination, "decoder", torch.float32, shard_bytes
        )
    return files


def _as_published(model: ModelConfig) -> Recipes:
    """Of the video autoencoder: its keys are the published ones."""
    if model.decoder == "reference_warp":
        return {}
    with torch.device("meta"):
        state = make_autoencoder(model).state_dict()
    return {key: Recipe({key: tuple(value.shape)}, lambda x: x) for key, value in state.items()}


def _write(
    recipes: Recipes,
    tensor: Callable[[str], Tensor],
    destination: Path,
    name: str,
    dtype: torch.dtype,
    shard_bytes: int,
) -> list[Path]:
    shards = list(_shards(recipes, dtype.itemsize, shard_bytes))
    files = []
    total = sum(map(_elements, recipes.values())) * dtype.itemsize
    with tqdm(total=total, desc=f"{destination}/{name}", unit="B", unit_scale=True) as progress:
        for number, keys in enumerate(shards, start=1):
            held = {}
            for key in keys:
                recipe = recipes[key]
                built = recipe.build(*map(tensor, recipe.sources)).to(dtype)
                held[key] = built.clone(memory_format=torch.contiguous_format)
                progress.update(_elements(recipe) * dtype.itemsize)
            file = destination / f"{name}-{number:05}-of-{len(shards):05}.safetensors"
            save_file(held, file)
            files.append(file)
    return files


def _check(checkpoint: Checkpoint, recipes: Recipes, changes: Lora | None) -> None:
    if any(mark in name for name in checkpoint.names for mark in _DIFFUSERS):
        raise WeightsError(
            f"{checkpoint.path}: its names are of diffusers' layout; the authors' own is needed"
        )
    needed = {name: shape for r in recipes.values() for name, shape in r.sources.items()}
    for name, shape in needed.items():
        found = checkpoint.shape(name)
        if found != shape:
            raise WeightsError(f"{checkpoint.file(name)}: {name} is {found}, the model has {shape}")
        if changes is not None:
            changes.check(name, shape)
    for unknown in sorted(checkpoint.names - needed.keys()):
        raise WeightsError(f"{checkpoint.file(unknown)}: unknown key {unknown}")


def _elements(recipe: Recipe) -> int:
    return sum(map(math.prod, recipe.sources.values()))


def _shards(recipes: Recipes, itemsize: int, shard_bytes: int) -> Iterator[list[str]]:
    keys: list[str] = []
    size = 0
    for key, recipe in recipes.items():
        own = _elements(recipe) * itemsize
        if keys and size + own > shard_bytes:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += own
    yield keys
