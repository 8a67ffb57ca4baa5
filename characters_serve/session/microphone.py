"""In: decoded microphone frames with their 48 kHz timestamps. Out: 16 kHz PCM in 20 ms pieces.

The pieces follow each other without a gap: lost packets and a silent network become silence, so
that the agent's clock never stops; a flood is dropped. What a frame of 20 ms brings is in a piece
at once, and does not wait for the next frame. Knows nothing of speech.
"""

from __future__ import annotations

from typing import Final

import av
import numpy as np
from numpy.typing import NDArray

from characters_serve.session.clock import AUDIO_RATE

AGENT_RATE: Final = 16_000
PIECE_SAMPLES: Final = 320
PIECE_S: Final = PIECE_SAMPLES / AGENT_RATE
MAX_GAP_S: Final = 1.0
_FLOOD_BURST_S: Final = 1.0
_FLOOD_RATE: Final = 1.2


class Microphone:
    def __init__(self, now_s: float) -> None:
        self.dropped_frames = 0
        self._resampler = av.AudioResampler(format="s16", layout="mono", rate=AGENT_RATE)
        self._pending: NDArray[np.int16] | None = None
        self._expected_pts: int | None = None
        self._filled = 0
        self._budget_s = _FLOOD_BURST_S
        self._budget_at_s = now_s

    def frame(self, frame: av.AudioFrame, now_s: float) -> list[bytes]:
        """The pieces that this frame completes."""
        self._budget_s = min(
            _FLOOD_BURST_S, self._budget_s + (now_s - self._budget_at_s) * _FLOOD_RATE
        )
        self._budget_at_s = now_s
        seconds = frame.samples / frame.sample_rate
        if seconds > self._budget_s:
            self.dropped_frames += 1
            return []
        self._budget_s -= seconds
        parts = []
        if frame.pts is not None and frame.sample_rate == AUDIO_RATE:
            if self._expected_pts is not None:
                lost = (frame.pts - self._expected_pts) * AGENT_RATE // AUDIO_RATE
                lost = min(max(lost, 0), int(MAX_GAP_S * AGENT_RATE))
                parts.append(np.zeros(max(0, lost - self._filled), np.int16))
            self._expected_pts = frame.pts + frame.samples
        self._filled = 0
        frame.pts = None
        parts.extend(
            np.asarray(piece.to_ndarray(), np.int16).reshape(-1)
            for piece in self._resampler.resample(frame)
        )
        return self._pieces(np.concatenate(parts))

    def silence(self) -> list[bytes]:
        """Nothing came for one piece's time: one piece of silence instead."""
        self._filled += PIECE_SAMPLES
        return self._pieces(np.zeros(PIECE_SAMPLES, np.int16))

    def _pieces(self, samples: NDArray[np.int16]) -> list[bytes]:
        if self._pending is None:
            # The resampler keeps 1 ms, for which each piece would wait until the next frame.
            self._pending = np.zeros(-len(samples) % PIECE_SAMPLES, np.int16)
        samples = np.concatenate((self._pending, samples))
        whole = len(samples) // PIECE_SAMPLES * PIECE_SAMPLES
        self._pending = samples[whole:]
        return [
            samples[first : first + PIECE_SAMPLES].tobytes()
            for first in range(0, whole, PIECE_SAMPLES)
        ]


def loudness(piece: bytes) -> float:
    """0 for silence to 1 for loud speech."""
    samples = np.frombuffer(piece, np.int16).astype(np.float32)
    return float(min(1.0, np.sqrt(np.mean(samples * samples)) / 4000)) if len(samples) else 0.0
