"""In: files that others published. Out: their tensors by name, one at a time.

Reads safetensors and pickled state dicts; the latter as weights only, so that nothing in a file is
run. Knows nothing of what the tensors are for.
"""

from __future__ import annotations

import difflib
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from characters_serve.model.weights import (
    WeightsError,
    refuse_absent_shards,
    refuse_quantised,
)

# What training wrappers put into names, anywhere in them.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
# A file of several networks holds the one that is served under one of these, the first that is
# there; the averaged weights are what the authors' own inference takes.
_ENTRIES = ("generator_ema", "generator", "generator_lora", "model", "state_dict")


class _Stored(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


class Checkpoint:
    """A published checkpoint: a file, or a folder's `*.safetensors`.

    Names lose what training put around them, and a `model.` in front of all of them. Tensors are
    read when they are asked for, so that a network larger than the memory can be converted.
    """

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            held = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
            raise WeightsError(f"no *.safetensors in {path}; it holds {held}")
        refuse_absent_shards(files)
        self.path = path
        self._stored: dict[str, _Stored] = {}
        for file in files:
            try:
                self._open(file)
            except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
                raise WeightsError(f"{file}: {_words(error)}") from error
        if not self._stored:
            raise WeightsError(f"{path}: there are no tensors in it")

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def file(self, name: str) -> Path:
        return self._stored[name].file

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises WeightsError for a name that is not there, and says which is the nearest; and for
        numbers that are no plain floats."""
        if name not in self._stored:
            raise WeightsError(f"{self.path}: {missing_key(name, self._stored)}")
        stored = self._stored[name]
        refuse_quantised(stored.file, name, stored.dtype)
        return stored.shape

    def get(self, name: str) -> Tensor:
        self.shape(name)
        return self._stored[name].read()

    def _open(self, file: Path) -> None:
        if file.suffix == ".safetensors":
            shard: Any = safe_open(file, framework="pt")
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (not a mapping)
            stored = {
                name: _Stored(
                    file, tuple(part.get_shape()), part.get_dtype(), partial(shard.get_tensor, name)
                )
                for name, part in slices.items()
            }
        else:
            # Files in torch's format of before 1.6 cannot be mapped.
            mapped = zipfile.is_zipfile(file)
            held = _entry(torch.load(file, map_location="cpu", mmap=mapped, weights_only=True))
            stored = {
                name: _Stored(
                    file, tuple(tensor.shape), str(tensor.dtype), partial(held.__getitem__, name)
                )
                for name, tensor in held.items()
            }
        bare = {_without_wrappers(name): value for name, value in stored.items()}
        if len(bare) < len(stored):
            raise WeightsError(f"{file}: names are the same once training's wrappers are off")
        if all(name.startswith("model.") for name in bare):
            bare = {name.removeprefix("model."): value for name, value in bare.items()}
        for name, value in bare.items():
            if name in self._stored:
                raise WeightsError(f"{file}: {name} is in {self.file(name).name} too")
            self._stored[name] = value


def _words(error: Exception) -> str:
    """Of torch's advice on pickled files, which is to run what is in them, only the object."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error)
    found = re.search(r"GLOBAL (\S+)", str(error))
    held = f"it holds a {found[1]}" if found else "it is no file of torch's"
    return f"{held}; only tensors are read, and nothing in a file is run"


def pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """A network of transformers from its folder. Raises WeightsError.

    What the folder lacks, transformers would fill with random numbers and a warning.
    """
    try:
        network, told = kind.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, **options
        )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise WeightsError(f"{folder}: {error}") from error
    # Of networks that are trained, not of ours.
    if missing := sorted(set(told["missing_keys"]) - {"masked_spec_embed"}):
        raise WeightsError(f"{folder}: missing keys {', '.join(missing[:8])}")
    return network


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
