"""In: agent speech at any rate, interruptions. Out: one `StepInput` for each chunk asked for.

Speech waits in a queue at the model's audio rate and is cut into chunks; where there is none the
chunk is silent and the character idles. Knows nothing of the engine, the clock or WebRTC.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import soxr
from numpy.typing import NDArray

from characters_serve.config import ModelConfig
from characters_serve.messages import AgentAudio, StepInput
from characters_serve.model.idle_controls import IdleControls

Pcm = NDArray[np.int16]

VOICE_RATE: Final = 48_000
FADE_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class WindowGeometry:
    """Sample counts of the log-mel window around a chunk, as `model.audio.LogMel` cuts it.

    Computed from the configuration alone, so that the session host need not load a tensor library.
    """

    lead: int
    chunk: int
    lookahead: int

    @property
    def total(self) -> int:
        return self.lead + self.chunk + self.lookahead


def window_geometry(model: ModelConfig) -> WindowGeometry:
    audio, chunk = model.audio, model.audio_samples_per_chunk
    lead = audio.past_frames * audio.hop + (audio.n_fft - audio.hop) // 2
    return WindowGeometry(lead, chunk, lookahead=model.audio_window_samples - lead - chunk)


@dataclass(slots=True)
class _Utterance:
    utterance_id: int
    rate: int
    resampler: Any | None
    samples: Pcm = field(default_factory=lambda: np.zeros(0, np.int16))
    played: int = 0
    complete: bool = False
    starved: bool = False

    def add(self, pcm: Pcm, last: bool) -> None:
        if self.resampler is not None:
            pcm = self.resampler.resample_chunk(pcm, last=last)
        self.samples = np.concatenate((self.samples, pcm))
        self.complete = last


class Chunker:
    """`next` never waits: it is asked when the engine has room, and gives what there is."""

    def __init__(self, model: ModelConfig, session_id: str, seed: int) -> None:
        if VOICE_RATE % model.audio.sample_rate:
            raise ValueError(f"model.audio.sample_rate must divide {VOICE_RATE}")
        self.geometry = window_geometry(model)
        self.epoch = 0
        self.latest_utterance_id = 0
        self._model = model
        self._rate = model.audio.sample_rate
        self._fade = np.linspace(1.0, 0.0, round(FADE_S * self._rate), dtype=np.float32)
        self._session_id = session_id
        self._idle = IdleControls(seed, model.fps)
        self._queue: deque[_Utterance] = deque()
        self._history: Pcm = np.zeros(self.geometry.lead, np.int16)
        self._chunk_index = 0

    @property
    def speaking(self) -> bool:
        return bool(self._queue)

    @property
    def speech_waits(self) -> bool:
        """Whether the next step will carry speech."""
        return bool(self._queue) and self._may_speak(self._queue[0])

    @property
    def queued_ms(self) -> float:
        return sum(len(u.samples) for u in self._queue) * 1000.0 / self._rate

    def add(self, audio: AgentAudio) -> bool:
        """Queues speech; False for what belongs to an utterance that is over or interrupted."""
        utterance = self._queue[-1] if self._queue else None
        if utterance is None or utterance.utterance_id != audio.utterance_id:
            if audio.utterance_id <= self.latest_utterance_id:
                return False
            utterance = _Utterance(
                audio.utterance_id, audio.sample_rate, self._resampler(audio.sample_rate)
            )
            if self._queue:
                self._queue[-1].complete = True
            self._queue.append(utterance)
            self.latest_utterance_id = audio.utterance_id
        elif audio.sample_rate != utterance.rate:
            raise ValueError("the sample rate changed within an utterance")
        elif utterance.complete:
            return False
        utterance.add(np.frombuffer(audio.pcm, np.int16), audio.last)
        return True

    def interrupt(self) -> int:
        """Drops all speech and begins a new epoch; returns the last utterance that this ends."""
        self.epoch += 1
        self._queue.clear()
        self._fade_out(self._history)
        return self.latest_utterance_id

    def next(self, *, passes: int, listening_energy: float) -> StepInput:
        utterance_id, offset_ms, last = 0, 0.0, False
        chunk = np.zeros(self.geometry.chunk, np.int16)
        utterance = self._queue[0] if self._queue and self._may_speak(self._queue[0]) else None
        if utterance is not None:
            utterance_id = utterance.utterance_id
            offset_ms = utterance.played * 1000.0 / self._rate
            last = self._take(utterance, chunk)
        window = np.concatenate((self._history, chunk, self._lookahead()))
        self._history = np.concatenate((self._history, chunk))[-self.geometry.lead :].copy()
        controls = self._idle.next(
            self._model.frames_per_chunk,
            speaking=utterance_id != 0,
            listening_energy=listening_energy,
        )
        step = StepInput(
            session_id=self._session_id,
            epoch=self.epoch,
            chunk_index=self._chunk_index,
            audio_window=window.tobytes(),
            voice_48k=self._voice(window),
            controls=np.ascontiguousarray(controls, np.float32).tobytes(),
            utterance_id=utterance_id,
            utterance_offset_ms=offset_ms,
            last=last,
            passes=passes,
        )
        self._chunk_index += 1
        return step

    def _resampler(self, rate: int) -> Any | None:
        if rate == self._rate:
            return None
        return soxr.ResampleStream(rate, self._rate, 1, dtype="int16", quality="HQ")

    def _may_speak(self, utterance: _Utterance) -> bool:
        """An utterance starts, or starts again, with a chunk and its look-ahead in hand.

        Once it runs it takes what is left, so that the look-ahead already shown is spoken.
        """
        enough = len(utterance.samples) >= self.geometry.chunk + self.geometry.lookahead
        running = utterance.played > 0 and not utterance.starved
        return utterance.complete or enough or (running and len(utterance.samples) > 0)

    def _take(self, utterance: _Utterance, chunk: Pcm) -> bool:
        """Moves the utterance's next samples into the chunk; True when these are its last."""
        taken = min(len(chunk), len(utterance.samples))
        chunk[:taken] = utterance.samples[:taken]
        utterance.samples = utterance.samples[taken:]
        if utterance.starved and taken:
            fade = self._fade[:taken]
            chunk[: len(fade)] = (chunk[: len(fade)] * (1.0 - fade)).astype(np.int16)
        utterance.starved = False
        utterance.played += taken
        if not utterance.samples.size and utterance.complete:
            self._queue.popleft()
            return True
        if taken < len(chunk):
            utterance.starved = True
            self._fade_out(chunk[:taken])
        return False

    def _lookahead(self) -> Pcm:
        ahead = np.zeros(self.geometry.lookahead, np.int16)
        if self._queue and not self._queue[0].starved and self._may_speak(self._queue[0]):
            head = self._queue[0].samples[: len(ahead)]
            ahead[: len(head)] = head
        return ahead

    def _fade_out(self, samples: Pcm) -> None:
        fade = self._fade[len(self._fade) - min(len(self._fade), len(samples)) :]
        if len(fade):
            samples[-len(fade) :] = (samples[-len(fade) :] * fade).astype(np.int16)

    def _voice(self, window: Pcm) -> bytes:
        """The chunk's slice at 48 kHz: cut from the whole window resampled, so slices join."""
        if not window.any():
            return bytes(2 * self._model.voice_samples_per_chunk)
        ratio = VOICE_RATE // self._rate
        first, count = self.geometry.lead * ratio, self._model.voice_samples_per_chunk
        if ratio == 1:
            return window[first : first + count].tobytes()
        # In float: soxr dithers its int16 output, and silence would hiss.
        voice = soxr.resample(window.astype(np.float32), self._rate, VOICE_RATE, quality="HQ")
        voice = voice[first : first + count]
        return bytes(np.clip(np.rint(voice), -32768, 32767).astype(np.int16).tobytes())
