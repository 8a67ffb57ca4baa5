"""The decoder process's model where chunks are latents of a public video autoencoder.

In: the reference image once a session, then each chunk's latent. Out: the chunk's frames. The
stream begins with the reference: encoded and decoded as the first latent, whose one frame is not
shown, it gives the layers their past, and every chunk of the session as many frames. Where the
model starts from text alone, the first chunk's own first latent is the stream's, and its one frame
is shown four times.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from characters_serve.config import ModelConfig
from characters_serve.model.decoders.stream import (
    FRAMES_PER_LATENT,
    StreamState,
    lay_out_channels_last,
)
from characters_serve.model.decoders.taehv import TAEHV, Variant
from characters_serve.model.decoders.wan21 import wan21_vae
from characters_serve.model.decoders.wan22 import wan22_vae
from characters_serve.model.decoders.wan_fused import fuse
from characters_serve.model.decoders.wan_layers import WanVAE


def make_autoencoder(model: ModelConfig) -> WanVAE | TAEHV:
    """The network that `model.decoder` names, at the published widths or at `decoder_dim`."""
    dim = model.decoder_dim
    match model.decoder:
        case "wan21":
            return wan21_vae(dim) if dim else wan21_vae()
        case "wan22":
            # The published encoder has 5 channels for the decoder's 8.
            return wan22_vae(-(-dim * 5 // 8), dim) if dim else wan22_vae()
        case "taehv":
            variant: Variant = "taew2_1" if model.latent_channels == 16 else "taew2_2"
            return TAEHV(variant, dim) if dim else TAEHV(variant)
        case "taehv_super":
            return TAEHV("taew2_2_super", dim) if dim else TAEHV("taew2_2_super")
    raise ValueError(f"model.decoder: {model.decoder} is not a video autoencoder")


class LatentVideoDecoder(nn.Module):
    def __init__(self, vae: WanVAE | TAEHV, model: ModelConfig, *, fused: bool = False) -> None:
        """fused: the Wan decoders' fast path, for one stream; TAEHV has one path only."""
        super().__init__()
        self.vae = vae
        lay_out_channels_last(vae)
        if fused and isinstance(vae, WanVAE):
            fuse(vae)
        self._patch = model.patch
        self._grid = (model.grid_rows, model.grid_columns)
        self._begins_with_reference = model.causal_wan is None or model.causal_wan.start == "image"

    def start(self, image: Tensor, state: StreamState | None = None) -> StreamState:
        """image: uint8 (H, W, 3), or float (1, 3, H, W) in [0, 1]. state: to be used again."""
        state = state or StreamState()
        state.clear()
        if not self._begins_with_reference:
            return state
        if image.dtype == torch.uint8:
            image = image.permute(2, 0, 1)[None] / 255
        darkest = self.vae.darkest
        pixels = darkest + (1 - darkest) * image.permute(0, 2, 3, 1)[:, None]
        self.vae.decode(self.vae.encode(pixels.to(self._dtype), StreamState()), state)
        return state

    def decode(self, latent: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        """latent: (tokens, C) of one session -> frames (F, 3, H, W) in [0, 1]; advances state."""
        first = not state.started
        frames = self.vae.decode(self._from_tokens(latent.to(self._dtype)), state)[0]
        if first:
            frames = torch.cat([frames[:1].expand(FRAMES_PER_LATENT - 1, -1, -1, -1), frames])
        darkest = self.vae.darkest
        shown = ((frames.float() - darkest) / (1 - darkest)).clamp_(0, 1)
        return shown.permute(0, 3, 1, 2), state

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.vae.parameters()).dtype

    def _from_tokens(self, tokens: Tensor) -> Tensor:
        """(T x rows x columns, C x patch x patch) -> (1, T, h, w, C)."""
        patch = self._patch
        parts = tokens.view(1, -1, *self._grid, tokens.shape[-1] // patch**2, patch, patch)
        return parts.permute(0, 1, 2, 5, 3, 6, 4).flatten(4, 5).flatten(2, 3)
