"""In: files that others published. Out: their tensors by name, one at a time.

Reads safetensors and pickled state dicts; the latter as weights only, so that nothing in a file is
run. Knows nothing of what the tensors are for.
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from characters_serve.model.weights import WeightsError

# What training wrappers put into names, anywhere in them.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
# A file of several networks holds the one that is served under one of these, the first that is
# there; the averaged weights are what the authors' own inference takes.
_ENTRIES = ("generator_ema", "generator", "generator_lora", "model", "state_dict")


class Checkpoint:
    """A published checkpoint: a file, or a folder's files that match a pattern.

    Names lose what training put around them, and a `model.` in front of all of them. Tensors are
    read when they are asked for, so that a network larger than the memory can be converted.
    """

    def __init__(self, path: Path, pattern: str = "*.safetensors") -> None:
        files = sorted(path.glob(pattern)) if path.is_dir() else [path]
        if not files:
            raise WeightsError(f"no {pattern} in {path}")
        self.path = path
        self._readers: dict[str, Callable[[], Tensor]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                self._open(file)
            except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
                raise WeightsError(f"{file}: {error}") from error
        if not self._readers:
            raise WeightsError(f"{path}: there are no tensors in it")

    @property
    def names(self) -> set[str]:
        return set(self._readers)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises WeightsError for a name that is not there, and says which is the nearest."""
        if name not in self._shapes:
            raise WeightsError(f"{self.path}: {missing_key(name, self._readers)}")
        return self._shapes[name]

    def get(self, name: str) -> Tensor:
        self.shape(name)
        return self._readers[name]()

    def _open(self, file: Path) -> None:
        if file.suffix == ".safetensors":
            shard: Any = safe_open(file, framework="pt")
            stored = {
                name: (tuple(shard.get_slice(name).get_shape()), lambda n=name: shard.get_tensor(n))
                for name in shard.keys()  # noqa: SIM118 (not a mapping)
            }
        else:
            tensors = _entry(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
            stored = {
                name: (tuple(tensor.shape), lambda t=tensor: t) for name, tensor in tensors.items()
            }
        bare = {_without_wrappers(name): value for name, value in stored.items()}
        if len(bare) < len(stored):
            raise WeightsError(f"{file}: names are the same once training's wrappers are off")
        if all(name.startswith("model.") for name in bare):
            bare = {name.removeprefix("model."): value for name, value in bare.items()}
        for name, (shape, read) in bare.items():
            if name in self._readers:
                raise WeightsError(f"{file}: {name} is in another file too")
            self._shapes[name], self._readers[name] = shape, read


def missing_key(name: str, present: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, list(present), n=1, cutoff=0.0)
    return f"missing key {name}" + (f"; the nearest is {nearest[0]}" if nearest else "")


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _entry(loaded: object) -> dict[str, Tensor]:
    while isinstance(loaded, dict):
        if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
            return loaded
        entry = next((name for name in _ENTRIES if name in loaded), None)
        if entry is None:
            held = ", ".join(map(str, list(loaded)[:8]))
            raise RuntimeError(f"it holds {held}; expected tensors, or one of {_ENTRIES}")
        loaded = loaded[entry]
    raise RuntimeError(f"it holds a {type(loaded).__name__}; expected tensors by name")
