"""In: the sound of a turn so far. Out: how likely it is that the turn is over. Knows no words.

Smart Turn v3.2 by Daily (BSD-2): a small whisper encoder that was trained to tell a sentence that
is over from one that goes on, by its melody. 40 ms of one core, for the last 8 s. Its weights are
taken from the wheel of pipecat-ai, by hash; nothing else of that package is used or imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

PACKAGE: Final = "pipecat"
WHEEL: Final = "pipecat-ai==1.14.0"
_FILE: Final = "audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"
_SHA256: Final = "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f"

RATE: Final = 16_000
WINDOW_S: Final = 8
_N_FFT, _HOP, _NUM_MELS = 400, 160, 80


class SmartTurn:
    def __init__(self, model: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(
            str(model), options, providers=["CPUExecutionProvider"]
        )
        self.over(b"")  # the first call is slower than all later ones

    def over(self, pcm_16k: bytes) -> float:
        """0 to 1, of a turn's int16 PCM with the first 0.2 s of the silence behind it."""
        samples = np.frombuffer(pcm_16k, "<i2").astype(np.float64) / 32768.0
        window = np.zeros(WINDOW_S * RATE)
        samples = samples[-len(window) :]
        window[len(window) - len(samples) :] = samples
        features = log_mel(window)[None].astype(np.float32)
        (probability,) = self._session.run(None, {"input_features": features})
        return float(probability.item())


def log_mel(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Whisper's features, mels x frames, of samples brought to mean 0 and variance 1.

    Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), 2.2; the
    normalisation is what the model was trained with.
    """
    samples = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
    padded = np.pad(samples, _N_FFT // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _N_FFT)[::_HOP][:-1]
    hann = np.hanning(_N_FFT + 1)[:-1]
    power = np.abs(np.fft.rfft(frames * hann)) ** 2
    mels = np.log10(np.maximum(power @ _MEL_FILTERS, 1e-10)).T
    scaled: NDArray[np.float64] = (np.maximum(mels, mels.max() - 8.0) + 4.0) / 4.0
    return scaled


def mel_filters() -> NDArray[np.float64]:
    """Bins x mels: triangles of equal area on Slaney's scale (Auditory Toolbox, 1998)."""

    def to_hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(mel < 15.0, mel * 200.0 / 3.0, 1000.0 * 6.4 ** ((mel - 15.0) / 27.0))

    top = 15.0 + 27.0 * np.log(RATE / 2 / 1000.0) / np.log(6.4)
    edges = to_hertz(np.linspace(0.0, top, _NUM_MELS + 2))
    bins = np.linspace(0.0, RATE / 2, _N_FFT // 2 + 1)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    rise, fall = (bins - low) / (middle - low), (high - bins) / (high - middle)
    filters: NDArray[np.float64] = np.maximum(0.0, np.minimum(rise, fall)) * 2.0 / (high - low)
    return filters


_MEL_FILTERS: Final = mel_filters()


def find_smart_turn() -> Path | None:
    """The installed wheel's model; None without it, or when it is another one."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    model = Path(spec.submodule_search_locations[0]) / _FILE
    if not model.is_file():
        return None
    if hashlib.sha256(model.read_bytes()).hexdigest() != _SHA256:
        log.warning("%s is an unknown model; not using it", model)
        return None
    return model
