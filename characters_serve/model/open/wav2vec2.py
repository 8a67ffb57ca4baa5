"""In: a window of speech around a chunk. Out: features of the chunk's frames, for LiveAvatar.

The window has whole video frames: some before the chunk, the chunk's, a few after it. The speech
model runs over the window alone, so what lies outside of it is not heard. Its convolutions see
25 ms and its positional convolution 1.3 s to each side, but every layer attends to all there is: no
window gives exactly what the whole recording gives. With random weights, 2 s of past leave 1 % of
the features' spread; a look-ahead of 200 ms leaves 17 %, one of 1.3 s nothing more. Loudness is
normalised over the window, as the original does over what it is given.

Letters: B batch, T steps of 20 ms, L hidden states, A channels.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from characters_serve.config import ModelConfig
from characters_serve.model.open.checkpoint import pretrained
from characters_serve.model.weights import WeightsError

_STEPS_PER_FRAME = 2
_NORM_EPS = 1e-7


class SpeechFeatures(nn.Module):
    """network: a Wav2Vec2Model of transformers; all its hidden states are features."""

    def __init__(self, network: nn.Module, model: ModelConfig) -> None:
        super().__init__()
        self.network = network
        first_step = _STEPS_PER_FRAME * model.audio.past_frames
        # On the device from the start: a copy in each step would make it wait.
        device = next(network.parameters()).device
        self._positions = (first_step + frame_steps(model.frames_per_chunk)).to(device)

    @torch.no_grad()
    def forward(self, window: Tensor) -> Tensor:
        """window: float32 (B, samples) at 16 kHz -> (B, L, A, frames of the chunk)."""
        variance, mean = torch.var_mean(window, dim=-1, correction=0, keepdim=True)
        loud = (window - mean) * torch.rsqrt(variance + _NORM_EPS)
        weight = next(self.network.parameters())
        found: Any = self.network(loud.to(weight.dtype), output_hidden_states=True)
        steps_BLTA = torch.stack(found.hidden_states, dim=1)
        return interpolated(steps_BLTA, self._positions)


def frame_steps(num_frames: int) -> Tensor:
    """Where each video frame of a chunk reads, in steps of 20 ms from the chunk's start; float64.

    As trained: 50 steps a second are resampled to 30 along a line, and of those frame n at 25
    takes the one numbered 1.2 n, rounded to even. (Over a whole recording, the original stretches
    that line so that its ends meet: up to 13 ms apart from this.)
    """
    return torch.round(1.2 * torch.arange(num_frames, dtype=torch.float64)) * (50 / 30)


def interpolated(steps_BLTA: Tensor, positions: Tensor) -> Tensor:
    """Linear between steps, (B, L, A, frames); past the last step it stays the last."""
    last = steps_BLTA.shape[2] - 1
    positions = positions.clamp(max=last)
    before = positions.long()
    share = (positions - before).to(steps_BLTA.dtype)[:, None]
    after = (before + 1).clamp(max=last)
    mixed = torch.lerp(steps_BLTA[:, :, before], steps_BLTA[:, :, after], share)
    return mixed.transpose(-1, -2)


def load_speech_features(
    model: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> SpeechFeatures:
    """From `speech_folder`; with synthetic weights seeded random numbers of its sizes."""
    if importlib.util.find_spec("transformers") is None:
        raise WeightsError(
            "model.family live_avatar needs transformers: pip install 'characters-serve[open]'"
        )
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    own = model.live_avatar
    assert own is not None
    if model.weights == "synthetic":
        torch.manual_seed(seed)
        network: Any = Wav2Vec2Model(Wav2Vec2Config(**_sizes(own.audio_layers, own.audio_dim)))
    else:
        folder = speech_folder(model)
        network = pretrained(Wav2Vec2Model, folder)
        sizes = network.config
        if (sizes.num_hidden_layers + 1, sizes.hidden_size) != (own.audio_layers, own.audio_dim):
            raise WeightsError(
                f"{folder}: {sizes.num_hidden_layers + 1} hidden states of {sizes.hidden_size}, "
                f"the model takes {own.audio_layers} of {own.audio_dim}"
            )
    network = network.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return SpeechFeatures(network, model)


def speech_folder(model: ModelConfig) -> Path:
    """`live_avatar.wav2vec2`, or `wav2vec2` in the folder of weights. Raises WeightsError."""
    assert model.live_avatar is not None
    folder = Path(model.live_avatar.wav2vec2 or Path(model.weights) / "wav2vec2")
    if not (folder / "config.json").is_file():
        raise WeightsError(
            f"model.live_avatar.wav2vec2: no config.json in {folder}; expected the folder "
            "wav2vec2-large-xlsr-53-english of the base model"
        )
    return folder


def _sizes(layers: int, dim: int) -> dict[str, Any]:
    """Those of wav2vec2-large-xlsr-53, narrower ones in proportion."""
    return {
        "hidden_size": dim,
        "num_hidden_layers": layers - 1,
        "num_attention_heads": max(1, dim // 64),
        "intermediate_size": 4 * dim,
        "conv_dim": [min(512, dim)] * 7,
        "conv_bias": True,
        "feat_extract_norm": "layer",
        "do_stable_layer_norm": True,
        "num_conv_pos_embedding_groups": math.gcd(16, dim),
    }
