"""In: StepInput. Out: one packed float32 tensor of fixed size, and views of its parts.

One tensor, so that a step's conditioning reaches every rank in one broadcast and a captured step
always reads the same addresses. Knows nothing of the model that reads it.

    packed: | order | passes | audio window, samples in [-1, 1] | controls, frames x num_controls |

`order` belongs to `engine/ranks.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from characters_serve.config import ModelConfig

if TYPE_CHECKING:
    from characters_serve.messages import StepInput

_PCM_SCALE = 1 / 32_768
_PASSES = 1
_HEADER = 2


class PackedStep:
    """The packed tensor on the device. Filled again for each step; the views never move.

    host: the same on the host, where a step arrives and rank 0's orders cross to the others.
    """

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        self._max_passes = len(model.noise_levels)
        samples = model.audio_window_samples
        controls = model.frames_per_chunk * model.num_controls
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(_HEADER + samples + controls, pin_memory=on_gpu)
        self.packed = self.host.to(device, copy=True) if on_gpu else self.host
        audio, rest = slice(_HEADER, _HEADER + samples), slice(_HEADER + samples, None)
        self.audio_window = self.packed[audio]
        self.controls = self.packed[rest].view(model.frames_per_chunk, -1)
        self._host_audio = self.host[audio]
        self._host_controls = self.host[rest]

    @property
    def passes(self) -> int:
        return int(self.host[_PASSES])

    def fill(self, step: StepInput) -> None:
        """Rank 0: writes the step, here and on the device."""
        if not 1 <= step.passes <= self._max_passes:
            raise ValueError(f"passes: {step.passes} is not in 1..{self._max_passes}")
        window = _values("audio_window", step.audio_window, torch.int16, self._host_audio)
        controls = _values("controls", step.controls, torch.float32, self._host_controls)
        self.host[_PASSES] = step.passes
        torch.mul(window, _PCM_SCALE, out=self._host_audio)
        self._host_controls.copy_(controls)
        self.upload()

    def upload(self) -> None:
        """From `host` to the device. `host` is written again only when rank 0 has read the step's
        latent, which took all ranks: by then the copy from here is over on each of them."""
        if self.packed is not self.host:
            self.packed.copy_(self.host, non_blocking=True)


def _values(field: str, data: bytes, dtype: torch.dtype, like: Tensor) -> Tensor:
    expected = like.numel() * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"{field}: {len(data)} bytes, the model takes {expected}")
    return torch.frombuffer(bytearray(data), dtype=dtype)
