"""Log-mel features of a chunk of speech.

The sample rate, hop and video rate are chosen so that everything is an integer: at 24 kHz and
hop 250 there are 96 mel frames per second, four per video frame at 24 fps and sixteen per
four-frame chunk.
"""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor, nn

from characters_serve.config import ModelConfig

LOG_FLOOR: Final = 1e-6
"""Added to the mel power before the logarithm, so log values are at least ``log(1e-6)``."""

LOG_MEL_MEAN: Final = -7.2
LOG_MEL_STD: Final = 4.5
"""Mean and standard deviation of the logarithm over the training speech, silence included."""


def _hertz_to_mel(hertz: Tensor) -> Tensor:
    return 2595.0 * torch.log10(1.0 + hertz / 700.0)


def mel_filterbank(
    num_mels: int, n_fft: int, sample_rate: int, f_min: float, f_max: float
) -> Tensor:
    """Triangular HTK-scale filters with unit sum, float32 (num_mels, n_fft // 2 + 1).

    Unit sum makes a band the weighted mean power of its bins.  A band narrower than the bin
    spacing takes the bin nearest to its centre.
    """
    ends = _hertz_to_mel(torch.tensor([f_min, f_max], dtype=torch.float64))
    mels = torch.linspace(float(ends[0]), float(ends[1]), num_mels + 2, dtype=torch.float64)
    edges = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
    bins = torch.arange(n_fft // 2 + 1, dtype=torch.float64) * sample_rate / n_fft
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (bins - low) / (centre - low)
    falling = (high - bins) / (high - centre)
    filters = torch.minimum(rising, falling).clamp(min=0.0)
    nearest = (bins - centre).abs().argmin(dim=1)
    empty = filters.sum(dim=1) == 0.0
    filters[empty, nearest[empty]] = 1.0
    return (filters / filters.sum(dim=1, keepdim=True)).to(torch.float32)


class LogMel(nn.Module):
    """Normalised log-mel frames of one chunk with some past and a little future.

    Timing.  Frame ``j`` of a window is centred on sample ``n_fft / 2 + j * hop`` of the window:
    its Hann window of ``win`` samples sits in the middle of ``n_fft`` samples.  Each frame stands
    for the ``hop`` samples around its centre, ``[centre - hop / 2, centre + hop / 2)``.  If the
    window starts ``lead_samples = past * hop + (n_fft - hop) // 2`` samples before the chunk's
    first sample, then frame ``past + k`` stands for the chunk's samples
    ``[k * hop, (k + 1) * hop)``, so the chunk's own ``frames`` frames tile its
    ``frames * hop`` samples exactly.  With the defaults a window has 7,774 samples: it starts
    2,387 samples before the chunk, and needs ``lookahead_samples`` = 1,387 samples (57.8 ms)
    after the chunk's end.
    """

    def __init__(
        self,
        sample_rate: int = 24000,
        hop: int = 250,
        win: int = 600,
        n_fft: int = 1024,
        num_mels: int = 48,
        f_min: float = 60.0,
        f_max: float = 7600.0,
        past_frames: int = 8,
        frames: int = 16,
        future_frames: int = 4,
    ) -> None:
        super().__init__()
        if win > n_fft or (n_fft - hop) % 2 or (n_fft - win) % 2:
            raise ValueError("win must fit n_fft, and n_fft - hop and n_fft - win must be even")
        self.sample_rate = sample_rate
        self.hop = hop
        self.n_fft = n_fft
        self.num_mels = num_mels
        self.past_frames = past_frames
        self.frames = frames
        self.future_frames = future_frames
        margin = (n_fft - win) // 2
        device = torch.get_default_device()
        # The filters are chosen by their values, which the meta device has not.
        with torch.device("cpu"):
            taper = nn.functional.pad(torch.hann_window(win), (margin, margin))
            filters = mel_filterbank(num_mels, n_fft, sample_rate, f_min, f_max).T.contiguous()
        self.register_buffer("taper", taper.to(device), persistent=False)
        self.register_buffer("filters", filters.to(device), persistent=False)

    @property
    def num_frames(self) -> int:
        """Mel frames of a window: past, own and future."""
        return self.past_frames + self.frames + self.future_frames

    @property
    def window_samples(self) -> int:
        """Samples that one call of :meth:`forward` needs."""
        return (self.num_frames - 1) * self.hop + self.n_fft

    @property
    def lead_samples(self) -> int:
        """How many samples before the chunk's first sample the window starts."""
        return self.past_frames * self.hop + (self.n_fft - self.hop) // 2

    @property
    def chunk_samples(self) -> int:
        """Samples of the chunk itself."""
        return self.frames * self.hop

    @property
    def lookahead_samples(self) -> int:
        """How many samples after the chunk's last sample the window reaches."""
        return self.window_samples - self.lead_samples - self.chunk_samples

    def log_mel(self, pcm: Tensor) -> Tensor:
        """Unnormalised log-mel: float32 (..., n_fft + (n - 1) * hop) -> (..., n, num_mels)."""
        taper, filters = cast(Tensor, self.taper), cast(Tensor, self.filters)
        spectrum = torch.fft.rfft(pcm.unfold(-1, self.n_fft, self.hop) * taper)
        power = spectrum.real.square() + spectrum.imag.square()
        return torch.log(power @ filters + LOG_FLOOR)

    @staticmethod
    def normalise(log_mel: Tensor) -> Tensor:
        """Log-mel values shifted and scaled to about zero mean and unit deviation."""
        return (log_mel - LOG_MEL_MEAN) / LOG_MEL_STD

    def forward(self, pcm: Tensor) -> Tensor:
        """float32 (..., window_samples) in [-1, 1] -> float32 (..., num_frames, num_mels)."""
        if pcm.shape[-1] != self.window_samples:
            raise ValueError(f"expected {self.window_samples} samples, got {pcm.shape[-1]}")
        return self.normalise(self.log_mel(pcm))


def log_mel_for(model: ModelConfig) -> LogMel:
    """The front end with a model's rates and context."""
    audio = model.audio
    return LogMel(
        audio.sample_rate,
        audio.hop,
        audio.win,
        audio.n_fft,
        audio.num_mels,
        audio.f_min,
        audio.f_max,
        audio.past_frames,
        model.frames_per_chunk * model.mels_per_frame,
        audio.future_frames,
    )


class DilatedBlock(nn.Module):
    """Two convolutions over time around a skip. (B, C, T) -> same; it starts as the identity."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.conv_in = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.conv_out = nn.Conv1d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.conv_out.weight)
        nn.init.zeros_(self.conv_out.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv_in(nn.functional.silu(self.norm(x)))
        out: Tensor = x + self.conv_out(nn.functional.silu(inner))
        return out


class AudioEncoder(nn.Module):
    """A chunk's mel window as one bias vector and `audio_tokens` tokens.

    (B, mel frames, mels) -> (B, 1 + audio_tokens, dim); the first row is the bias. Every second
    mel frame is kept; the blocks bring past and future to the chunk's own, which alone are mixed.
    """

    def __init__(self, model: ModelConfig, channels: int = 128, hidden: int = 384) -> None:
        super().__init__()
        first = model.audio.past_frames // 2
        own = (model.frames_per_chunk * model.mels_per_frame + 1) // 2
        self.dim = model.dim
        self.own = slice(first, first + own)
        self.conv_in = nn.Conv1d(model.audio.num_mels, channels, 3, padding=1)
        self.conv_out = nn.Conv1d(channels, channels, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(DilatedBlock(channels, dilation) for dilation in (1, 2, 4)))
        self.mix = nn.Linear(channels * own, hidden)
        self.out = nn.Linear(hidden, (1 + model.audio_tokens) * model.dim)

    def forward(self, mel: Tensor) -> Tensor:
        x = nn.functional.silu(self.conv_in(mel.transpose(-1, -2)))
        x = self.blocks(self.conv_out(x))[..., self.own]
        x = nn.functional.silu(self.mix(nn.functional.silu(x).flatten(-2)))
        rows: Tensor = self.out(x).unflatten(-1, (-1, self.dim))
        return rows
