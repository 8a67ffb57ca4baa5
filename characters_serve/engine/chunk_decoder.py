"""In: the reference image's rows, then latents. Out: each chunk's I420 frames, on the host.

The decoder process's whole computation, also for rendering offline and for benchmarks: knows
nothing of messages or processes.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from characters_serve.config import ModelConfig, Optimizations
from characters_serve.engine.decode_graph import CapturedStream
from characters_serve.engine.i420 import rgb_to_i420
from characters_serve.engine.reference_image import image_tensor
from characters_serve.model.decoders.latent_video import LatentVideoDecoder
from characters_serve.model.decoders.stream import lay_out_channels_last
from characters_serve.model.weights import StreamDecoder, load_decoder

_WARM_UP_CHUNKS = 4
_PLAIN = Optimizations()


class _Stream(Protocol):
    """One character's decoding. `decode` returns uint8 (F, H W 3 / 2) on the host, valid until the
    next call."""

    def start(self, image: Tensor) -> None: ...

    def decode(self, latent: Tensor) -> Tensor: ...


class EagerStream:
    """bf16 on a CPU means bf16 convolutions only: whole in bf16 its many elementwise passes over
    full pictures cost more than the convolutions save (64 ms a chunk, against 44)."""

    def __init__(self, decoder: StreamDecoder, mixed: bool) -> None:
        self._decoder = decoder
        self._mixed = mixed
        self._state: Any = None

    def start(self, image: Tensor) -> None:
        with self._precision():
            self._state = self._decoder.start(image)

    def decode(self, latent: Tensor) -> Tensor:
        with self._precision():
            frames, self._state = self._decoder.decode(latent, self._state)
        return rgb_to_i420(frames).cpu()

    def _precision(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._mixed)


class ChunkDecoder:
    """Latents of one character into I420 frames, chunk after chunk."""

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        optimizations: Optimizations = _PLAIN,
    ) -> None:
        self._model = model
        self._device = device
        fast = optimizations.fast_decoder
        mixed = device.type == "cpu" and dtype == torch.bfloat16
        stored = torch.float32 if mixed else dtype
        network = load_decoder(model, device=device, dtype=stored, fused=fast)
        if mixed:
            lay_out_channels_last(network)
        self._stream: _Stream
        if fast and device.type == "cuda" and isinstance(network, LatentVideoDecoder):
            self._stream = CapturedStream(network, model, device)
        else:
            self._stream = EagerStream(network, mixed)
        self._started = False

    def start(self, image_rgb: bytes) -> None:
        """Encodes the reference and forgets the character before."""
        with torch.inference_mode():
            self._stream.start(image_tensor(image_rgb, self._model, self._device))
        self._started = True

    def decode(self, latent: Tensor) -> list[bytes]:
        """latent: (video_tokens, token_channels) -> frames_per_chunk I420 frames."""
        if not self._started:
            raise RuntimeError("decode before start: there is no reference")
        with torch.inference_mode():
            planes = self._stream.decode(latent).numpy()
        return [plane.tobytes() for plane in planes]

    def reset(self) -> None:
        self._started = False

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
