"""Synthesizes training speech with mel features and mouth controls.

Two voices with known phoneme times: espeak-ng (many accents and variants, phoneme events) and
hibari, the neural voice the server speaks with (its model predicts a duration per phoneme, which
is read out).  Run from the repository root:

    python scripts/train_tiny/speech.py --minutes 100 --out scripts/train_tiny/data/speech.npz

Arrays of the npz (M = 4 V):

* ``mel`` uint8 (M, 48): log-mel at 96 Hz, unnormalised, quantised by :func:`quantise_mel`.  Row m
  stands for samples [250 m, 250 m + 250) of the sound, exactly as in :class:`LogMel`.
* ``viseme`` uint8 (V, 5): mouth controls x 255 at 24 Hz, see :data:`MOUTH_CONTROLS`.
* ``speech`` uint8 (V,): 1 while the character's voice sounds, short pauses included.
* ``clip_start`` int32 (C,): first video frame of each clip; clips are whole chunks of 4 frames.
* ``clip_source`` uint8 (C,): 0 for espeak-ng, 1 for hibari.
* ``held_out`` int32 (): first held-out video frame: voices and sentences never trained on.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import time
import wave
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import espeakng_loader
import hibari
import onnxruntime
import soxr
import torch

from characters_serve.model.audio import LogMel
from scripts.train_tiny.sentences import Sentences
from scripts.train_tiny.visemes import (
    MEL_HIGH,
    MEL_LOW,
    TRACK_RATE,
    VIDEO_RATE,
    Phoneme,
    mouth_track,
)

SAMPLE_RATE: Final = 24000
FRAMES_PER_CHUNK: Final = 4
SAMPLES_PER_FRAME: Final = SAMPLE_RATE // VIDEO_RATE

Samples = NDArray[np.float32]


def quantise_mel(log_mel: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Log-mel values to 0..255; the inverse is ``MEL_LOW + q / 255 * (MEL_HIGH - MEL_LOW)``."""
    scaled = (log_mel - MEL_LOW) / (MEL_HIGH - MEL_LOW) * 255.0
    return np.asarray(np.clip(np.rint(scaled), 0, 255), np.uint8)


def dequantise_mel(quantised: torch.Tensor) -> torch.Tensor:
    """Unnormalised log-mel values of a quantised mel tensor."""
    return MEL_LOW + quantised.float() * ((MEL_HIGH - MEL_LOW) / 255.0)


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


def _with_extra_output(model: bytes, name: str) -> bytes:
    """An ONNX model that also returns the inner tensor ``name``.

    Serialized protobuf messages concatenate to their merge, so appending a model that has only a
    graph with one more output (ModelProto.graph = 7, GraphProto.output = 12, name = 1) is enough.
    """
    text = name.encode()
    value_info = b"\x0a" + bytes([len(text)]) + text
    graph = b"\x62" + bytes([len(value_info)]) + value_info
    return model + b"\x3a" + bytes([len(graph)]) + graph


class NeuralVoice:
    """The hibari voice with the durations its model predicts."""

    _DURATIONS = "/Clip_output_0"  # model frames per phoneme id, before they are expanded
    _DELAY_SECONDS = -0.028
    """Sounds come this much before their predicted frames: measured on stops and vowels against
    espeak-ng's phoneme times."""

    def __init__(self) -> None:
        self._voice = hibari.Hibari()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        model = _with_extra_output(Path(self._voice.model_path).read_bytes(), self._DURATIONS)
        self._session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
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


TRAIN_ACCENTS: Final = (
    "en-us", "en-us", "en", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029", "de", "es", "it", "nl",
    "pt-br", "pl",
)  # fmt: skip
HELD_OUT_ACCENTS: Final = ("en-gb-scotland", "en-gb-x-rp", "en-us-nyc", "fr")
TRAIN_VARIANTS: Final = (
    "m1", "m2", "m3", "m4", "m6", "m7", "f1", "f2", "f4", "Annie", "Andy", "Alex", "Andrea",
    "Denis", "Lee", "Mike", "Michael", "Reed", "adam", "anika", "belinda", "caleb", "ed", "ian",
    "john",
    "linda", "max", "norbert", "paul", "rob", "steph", "victor", "zac", "Hugo", "Marco",
)  # fmt: skip
HELD_OUT_VARIANTS: Final = ("m5", "f3", "f5", "Gene", "edward", "steph2", "travis", "Alicia")


class ClipMaker:
    """Makes clips: a turn of one to three sentences between silences, in a noisy room."""

    def __init__(self, seed: int, held_out: bool) -> None:
        self._rng = random.Random(seed)
        self._noise = np.random.default_rng(seed + 1)
        self._sentences = Sentences(seed + 2)
        self._held_out = held_out
        self._espeak = Espeak()
        self._neural = NeuralVoice()

    def _speaker(self) -> tuple[bool, Callable[[str], Utterance]]:
        """Whether it is the neural voice, and a function that speaks with one voice's settings."""
        rng = self._rng
        if rng.random() < 0.42:
            speed = rng.uniform(0.85, 1.2)
            shift = rng.choice((1.0, 1.0, rng.uniform(0.84, 1.18)))

            def neural(text: str) -> Utterance:
                spoken = self._neural.speak(text, speed, rng.randrange(1 << 30))
                return spoken if shift == 1.0 else _resampled(spoken, shift)

            return True, neural
        accents = HELD_OUT_ACCENTS if self._held_out else TRAIN_ACCENTS
        variants = HELD_OUT_VARIANTS if self._held_out else TRAIN_VARIANTS
        voice = f"{rng.choice(accents)}+{rng.choice(variants)}"
        rate, pitch, spread = rng.randint(125, 195), rng.randint(25, 80), rng.randint(30, 80)
        return False, lambda text: self._espeak.speak(text, voice, rate, pitch, spread)

    def make(self) -> tuple[Samples, NDArray[np.float32], NDArray[np.uint8], bool]:
        """(pcm, mouth controls (V, 5), speech flag (V,), whether the voice is neural)."""
        rng = self._rng
        neural, speak = self._speaker()
        pieces: list[Samples] = []
        phonemes: list[Phoneme] = []
        spans: list[tuple[float, float]] = []
        cursor = 0

        def silence(seconds: float) -> None:
            nonlocal cursor
            count = round(seconds * SAMPLE_RATE)
            pieces.append(np.zeros(count, np.float32))
            cursor += count

        silence(rng.uniform(0.15, 1.0))
        num_sentences = rng.choice((1, 1, 2, 2, 3))
        for index in range(num_sentences):
            said = speak(self._sentences.next())
            begin = cursor / SAMPLE_RATE
            phonemes += [
                Phoneme(p.symbol, p.start + begin, p.end + begin, p.stressed)
                for p in said.phonemes
                if p.symbol
            ]
            pieces.append(said.pcm)
            cursor += len(said.pcm)
            spans.append((begin, cursor / SAMPLE_RATE))
            if index + 1 < num_sentences:
                silence(rng.uniform(0.1, 0.8))
        silence(
            rng.choice(
                (0.5, 1.0, rng.uniform(1.0, 2.5), rng.uniform(2.0, 4.5), rng.uniform(2.5, 5.0))
            )
        )

        chunk = FRAMES_PER_CHUNK * SAMPLES_PER_FRAME
        silence((-cursor % chunk) / SAMPLE_RATE)
        num_frames = cursor // SAMPLES_PER_FRAME
        pcm = np.concatenate(pieces)
        loudness = relative_loudness(pcm)
        mouth = mouth_track(_sounding(phonemes, loudness), num_frames, loudness)
        flag = np.zeros(num_frames, np.uint8)
        for begin, end in spans:
            flag[round(begin * VIDEO_RATE) : round(end * VIDEO_RATE)] = 1
        return self._room(pcm), mouth, flag, neural

    def _room(self, pcm: Samples) -> Samples:
        """Random gain, colouring and background noise."""
        rng = self._rng
        level = 10.0 ** (rng.uniform(-14.0, 4.0) / 20.0)
        if rng.random() < 0.25:  # a dull or thin microphone
            coefficient = rng.uniform(-0.4, 0.4)
            pcm = pcm - coefficient * np.concatenate([[0.0], pcm[:-1]]).astype(np.float32)
        if rng.random() < 0.15:  # digital silence, as the server feeds it
            return np.asarray(pcm * level, np.float32)
        noise = self._noise.standard_normal(len(pcm))
        noise = 0.5 * noise + 0.5 * np.convolve(noise, np.ones(12) / np.sqrt(12.0), mode="same")
        noise *= 10.0 ** (rng.uniform(-80.0, -50.0) / 20.0)
        return np.asarray(np.clip(pcm * level + noise, -1.0, 1.0), np.float32)


def _resampled(spoken: Utterance, factor: float) -> Utterance:
    """The utterance played ``factor`` times as fast, pitch and formants included."""
    pcm = soxr.resample(spoken.pcm, SAMPLE_RATE * factor, SAMPLE_RATE).astype(np.float32)
    scale = len(pcm) / max(1, len(spoken.pcm))
    scaled = [
        Phoneme(p.symbol, p.start * scale, p.end * scale, p.stressed) for p in spoken.phonemes
    ]
    return Utterance(pcm, scaled)


def relative_loudness(pcm: Samples) -> NDArray[np.float64]:
    """Level at :data:`TRACK_RATE` relative to the clip's usual speech level, about 0 to 1.5."""
    hop = SAMPLE_RATE // TRACK_RATE
    power = np.square(pcm[: len(pcm) // hop * hop].reshape(-1, hop).astype(np.float64)).mean(axis=1)
    window = np.hanning(15)
    level = np.sqrt(np.convolve(power, window / window.sum(), mode="same"))
    usual = np.percentile(level[level > 0.02 * level.max()], 80)
    return np.asarray((level / max(float(usual), 1e-6)) ** 0.5)


def _sounding(phonemes: list[Phoneme], loudness: NDArray[np.float64]) -> list[Phoneme]:
    """The phonemes without the silent tails that synthesizers append to the last sound."""
    result: list[Phoneme] = []
    audible = loudness > 0.10
    for index, phoneme in enumerate(phonemes):
        following = phonemes[index + 1].start if index + 1 < len(phonemes) else np.inf
        end = phoneme.end
        if following - phoneme.end > 0.05 or end - phoneme.start > 0.25:
            first, last = round(phoneme.start * TRACK_RATE), round(end * TRACK_RATE)
            heard = np.flatnonzero(audible[first:last])
            if len(heard):
                end = min(end, (first + int(heard[-1]) + 1) / TRACK_RATE)
        result.append(Phoneme(phoneme.symbol, phoneme.start, end, phoneme.stressed))
    return result


def clip_log_mel(mel: LogMel, pcm: Samples) -> NDArray[np.float32]:
    """Unnormalised log-mel of a clip, float32 (len(pcm) / hop, num_mels)."""
    lead = (mel.n_fft - mel.hop) // 2
    padded = torch.nn.functional.pad(torch.from_numpy(pcm), (lead, mel.n_fft - mel.hop - lead))
    values: NDArray[np.float32] = mel.log_mel(padded).numpy()
    return values


def save_wav(path: Path, pcm: Samples) -> None:
    """Writes 16-bit mono at 24 kHz."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(np.rint(pcm * 32767.0).astype("<i2").tobytes())


def _report(arrays: dict[str, NDArray[Any]], seconds: float) -> None:
    mel = MEL_LOW + arrays["mel"].astype(np.float32) / 255.0 * (MEL_HIGH - MEL_LOW)
    opening = arrays["viseme"][:, 0] / 255.0
    frames = len(opening)
    active = arrays["speech"] > 0
    loudness = mel.reshape(frames, -1).mean(axis=1)
    still = (arrays["viseme"].max(axis=1) == 0).mean()
    print(
        f"{frames / VIDEO_RATE / 60:.1f} minutes, {len(arrays['clip_start'])} clips, {seconds:.0f}s"
    )
    print(f"speech flag {active.mean():.3f}, mouth exactly closed {still:.3f}")
    print(f"neural clips {(arrays['clip_source'] == 1).mean():.3f}")
    print(
        f"log-mel mean {mel.mean():.3f} std {mel.std():.3f} min {mel.min():.2f} max {mel.max():.2f}"
    )
    print(
        f"opening: mean {opening[active].mean():.3f}, p95 {np.percentile(opening[active], 95):.3f}"
    )
    for lag in range(-3, 4):
        both = np.corrcoef(opening[8:-8], np.roll(loudness, lag)[8:-8])[0, 1]
        print(f"  correlation of opening with loudness {lag:+d} frames later: {both:.3f}")
    spoken = np.corrcoef(opening[active], loudness[active])[0, 1]
    print(f"  within speech only: {spoken:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=100.0, help="in all, held-out included")
    parser.add_argument("--held-out-minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wav-dir", type=Path, help="saves a few held-out clips here")
    parser.add_argument("--wavs", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    mel = LogMel()
    mels: list[NDArray[np.uint8]] = []
    visemes: list[NDArray[np.uint8]] = []
    flags: list[NDArray[np.uint8]] = []
    starts: list[int] = []
    sources: list[int] = []
    frames = 0
    held_out = 0
    saved = 0
    train_minutes = arguments.minutes - arguments.held_out_minutes
    for is_held_out, until in ((False, train_minutes), (True, arguments.minutes)):
        maker = ClipMaker(arguments.seed + 1000 * is_held_out, is_held_out)
        held_out = frames
        while frames < until * 60 * VIDEO_RATE:
            pcm, mouth, flag, neural = maker.make()
            mels.append(quantise_mel(clip_log_mel(mel, pcm)))
            visemes.append(np.rint(mouth * 255.0).astype(np.uint8))
            flags.append(flag)
            starts.append(frames)
            sources.append(int(neural))
            frames += len(flag)
            if is_held_out and arguments.wav_dir and saved < arguments.wavs and len(flag) > 120:
                arguments.wav_dir.mkdir(parents=True, exist_ok=True)
                save_wav(arguments.wav_dir / f"held_out_{saved}.wav", pcm)
                np.save(arguments.wav_dir / f"held_out_{saved}.npy", mouth)
                saved += 1
    arrays: dict[str, NDArray[Any]] = {
        "mel": np.concatenate(mels),
        "viseme": np.concatenate(visemes),
        "speech": np.concatenate(flags),
        "clip_start": np.array(starts, np.int32),
        "clip_source": np.array(sources, np.uint8),
        "held_out": np.array(held_out, np.int32),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **arrays)  # type: ignore[arg-type]
    _report(arrays, time.monotonic() - started)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
