"""One captured graph for every chunk of every character: latent in, I420 out.

In: the reference image, then latents, on the device. Out: frames in pinned memory. A stream's past
lies in tensors that decoding advances in place, so that one capture serves all streams, one after
another: a new character overwrites them. What is not a steady chunk runs eagerly before it: the
reference, or the first latent of a stream that starts without one.

Knows nothing of what the decoder computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from characters_serve.config import ModelConfig
from characters_serve.engine.i420 import rgb_to_i420
from characters_serve.model.decoders.latent_video import LatentVideoDecoder
from characters_serve.model.decoders.stream import StreamState

# The first may be a stream's first chunk, which is not a steady one.
_EAGER_CHUNKS = 2


class CapturedStream:
    """Captures when it is made: that takes seconds, a start does not.

    Works on the device's current stream, whichever device is the current one: Triton and graphs go
    by that, not by their tensors.
    """

    def __init__(
        self, decoder: LatentVideoDecoder, model: ModelConfig, device: torch.device
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._state = StreamState()
        self._latent = torch.zeros(model.video_tokens, model.token_channels, device=device)
        self._host = torch.empty(
            (model.frames_per_chunk, model.height * model.width * 3 // 2),
            dtype=torch.uint8,
            pin_memory=True,
        )
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.device(device):
            self._planes = self._capture(model)

    def _capture(self, model: ModelConfig) -> Tensor:
        """Returns where each replay writes its planes.

        The shapes never change, so cuDNN measures its kernels for them, in the eager chunks; those
        compile Triton's too, which a capture may not.
        """
        black = torch.zeros(model.height, model.width, 3, dtype=torch.uint8, device=self._device)
        self._decoder.start(black, self._state)
        measuring = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            for _ in range(_EAGER_CHUNKS):
                self._planes_of(self._latent)
            torch.cuda.synchronize()
            # As a step is captured: a rank that decodes has NCCL's watchdog beside it.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                return self._planes_of(self._latent)
        finally:
            torch.backends.cudnn.benchmark = measuring

    def start(self, image: Tensor) -> None:
        with torch.cuda.device(self._device):
            self._decoder.start(image, self._state)

    def decode(self, latent: Tensor) -> Tensor:
        """uint8 (F, H W 3 / 2), valid until the next call."""
        if self._state.started:
            self.replay(latent)
        else:
            with torch.cuda.device(self._device):
                self._planes.copy_(self._planes_of(latent))
        return self.collect()

    def replay(self, latent: Tensor) -> None:
        """A steady chunk; waits for nothing and takes no memory."""
        with torch.cuda.device(self._device):
            self._latent.copy_(latent, non_blocking=True)
            self._graph.replay()

    def collect(self) -> Tensor:
        """The planes of the last chunk, when they are there."""
        with torch.cuda.device(self._device):
            self._host.copy_(self._planes, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return self._host

    def _planes_of(self, latent: Tensor) -> Tensor:
        frames, _ = self._decoder.decode(latent, self._state)
        return rgb_to_i420(frames)
