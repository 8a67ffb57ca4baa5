"""In: a step's latent on the rank. Out: the same latent in the decoder's process.

A link hides how the latent travels. This one sends it through a socket; one that leaves it on the
device and sends only the step beside it keeps the same two classes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from characters_serve.channels import BlockingChannel, endpoint
from characters_serve.config import ModelConfig
from characters_serve.messages import LatentChunk, StepInput


class LatentSink(Protocol):
    """Where a rank's latents go: to the decoder's process, or to a decoder on the rank itself."""

    def start(self, image_rgb: bytes) -> None: ...

    def send(self, step: StepInput, latent: Tensor, started_s: float) -> None: ...

    def reset(self) -> None: ...


class LatentSender:
    """The rank's end. The decoder's process hears of characters from the host itself."""

    def __init__(self, group_dir: Path) -> None:
        self._channel = BlockingChannel(endpoint(group_dir, "latents"), "push", bind=False)

    def send(self, step: StepInput, latent: Tensor, started_s: float) -> None:
        """latent: float32 (video_tokens, token_channels). The step's time ends here, because
        reading the latent is what waits for the device."""
        data = latent.cpu().contiguous().numpy().tobytes()
        step_ms = (time.perf_counter() - started_s) * 1000
        self._channel.send(LatentChunk(step, data, step.passes, step_ms, started_s))

    def start(self, image_rgb: bytes) -> None:
        pass

    def reset(self) -> None:
        pass


class LatentReceiver:
    """The decoder's end. `channel` yields LatentChunk messages; `latent` gives one's tensor."""

    def __init__(self, group_dir: Path, model: ModelConfig, device: torch.device) -> None:
        self.channel = BlockingChannel(endpoint(group_dir, "latents"), "pull", bind=True)
        self._shape = (model.video_tokens, model.token_channels)
        self._device = device

    def latent(self, chunk: LatentChunk) -> Tensor:
        flat = torch.frombuffer(bytearray(chunk.latent), dtype=torch.float32)
        return flat.view(self._shape).to(self._device)
