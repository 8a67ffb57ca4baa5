"""Recorded outputs of public models' own code, and the random weights they were recorded with.

tests/data/parity/README.md says how they were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "data" / "parity"


class Recording:
    """One file of tests/data/parity: arrays by name, and the rule of the weights."""

    def __init__(self, name: str) -> None:
        with np.load(FOLDER / f"{name}.npz") as arrays:
            self._arrays: dict[str, NDArray[np.generic]] = dict(arrays)

    def __getitem__(self, name: str) -> Tensor:
        values = torch.from_numpy(self._arrays[name])
        # Pictures from 0 to 1 are kept in sixteen bits.
        return values.float() / 65_535 if values.dtype == torch.uint16 else values

    def fill(self, network: nn.Module) -> None:
        """Gives the network's parameters the values that the recorded one had."""
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        seed, offsets, scales = (self._arrays[name] for name in ("seed", "offset", "scale"))
        network.load_state_dict(weights(shapes, int(seed), offsets, scales))


def weights(
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    offsets: NDArray[np.generic],
    scales: NDArray[np.generic],
) -> dict[str, Tensor]:
    """One stream of PCG64 over the names in order: offset + scale x (2u - 1), u in [0, 1)."""
    bits = np.random.PCG64(seed)
    state = {}
    for name, offset, scale in zip(sorted(shapes), offsets, scales, strict=True):
        raw = bits.random_raw(int(np.prod(shapes[name]))) >> np.uint64(11)
        uniform = raw.astype(np.float64) * 2.0**-53
        values = offset + scale * (2 * uniform - 1)
        state[name] = torch.from_numpy(values.astype(np.float32).reshape(shapes[name]))
    return state


def inputs(shape: tuple[int, ...], seed: int) -> Tensor:
    """float32 in -1..1, from PCG64."""
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape))) >> np.uint64(11)
    uniform = raw.astype(np.float64) * 2.0**-53
    return torch.from_numpy((2 * uniform - 1).astype(np.float32).reshape(shape))
