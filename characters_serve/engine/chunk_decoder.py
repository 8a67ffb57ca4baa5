"""In: latents of one character, chunk after chunk. Out: I420 frames.

The whole computation of a decoder, for its process, for rendering offline and for benchmarks. Knows
nothing of processes or messages.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from characters_serve.config import ModelConfig
from characters_serve.engine.i420 import rgb_to_i420
from characters_serve.engine.reference_image import image_tensor
from characters_serve.model.decoders.stream import lay_out_channels_last
from characters_serve.model.weights import StreamDecoder, load_decoder

_WARM_UP_CHUNKS = 4


class ChunkDecoder:
    """Latents of one character into I420 frames, chunk after chunk.

    bf16 on a CPU means bf16 convolutions only: whole in bf16 its many elementwise passes over
    full pictures cost more than the convolutions save (64 ms a chunk, against 44).
    """

    def __init__(self, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._device = device
        self._mixed = device.type == "cpu" and dtype == torch.bfloat16
        stored = torch.float32 if self._mixed else dtype
        network = load_decoder(model, device=device, dtype=stored)
        if self._mixed:
            lay_out_channels_last(network)
        self._decoder: StreamDecoder = network
        self._state: Any = None

    def start(self, image_rgb: bytes) -> None:
        """Encodes the reference and forgets the character before."""
        with torch.inference_mode(), self._precision():
            self._state = self._decoder.start(image_tensor(image_rgb, self._model, self._device))

    def decode(self, latent: Tensor) -> list[bytes]:
        """latent: (video_tokens, token_channels) -> frames_per_chunk I420 frames."""
        if self._state is None:
            raise RuntimeError("decode before start: there is no reference")
        with torch.inference_mode():
            with self._precision():
                frames, self._state = self._decoder.decode(latent, self._state)
            planes = rgb_to_i420(frames).cpu().numpy()
        return [plane.tobytes() for plane in planes]

    def reset(self) -> None:
        self._state = None

    def _precision(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._mixed)

    def warm_up(self) -> float:
        """Decodes an invented character; returns a warm chunk's milliseconds."""
        model = self._model
        self.start(bytes(model.height * model.width * 3))
        latent = torch.zeros(model.video_tokens, model.token_channels, device=self._device)
        for _ in range(_WARM_UP_CHUNKS):
            started_s = time.perf_counter()
            self.decode(latent)
        self.reset()
        return (time.perf_counter() - started_s) * 1000
