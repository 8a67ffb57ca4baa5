"""Synthesizes training speech with mel features and mouth controls.

Voices with known phoneme times (`voices.py`) say random sentences at many rates and pitches, in
rooms and through microphones of many kinds.  Run from the repository root:

    python scripts/train_tiny/speech.py --minutes 230 --out scripts/train_tiny/data/speech.npz

Arrays of the npz (M = 4 V):

* ``mel`` uint8 (M, 48): log-mel at 96 Hz, unnormalised, quantised by :func:`quantise_mel`.  Row m
  stands for samples [250 m, 250 m + 250) of the sound, exactly as in :class:`LogMel`.
* ``viseme`` uint8 (V, 5): mouth controls x 255 at 24 Hz, see :data:`MOUTH_CONTROLS`.
* ``speech`` uint8 (V,): 1 while the character's voice sounds, short pauses included.
* ``clip_start`` int32 (C,): first video frame of each clip; clips are whole chunks of 4 frames.
* ``clip_source`` uint8 (C,): 0 for espeak-ng, 1 for hibari, 2 for Piper.
* ``held_out`` int32 (): first held-out video frame: voices and sentences never trained on.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
from scripts.train_tiny.voices import (
    SAMPLE_RATE,
    Espeak,
    NeuralVoice,
    PiperVoice,
    Samples,
    Utterance,
    resampled,
)

FRAMES_PER_CHUNK: Final = 4
SAMPLES_PER_FRAME: Final = SAMPLE_RATE // VIDEO_RATE


def quantise_mel(log_mel: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Log-mel values to 0..255; the inverse is ``MEL_LOW + q / 255 * (MEL_HIGH - MEL_LOW)``."""
    scaled = (log_mel - MEL_LOW) / (MEL_HIGH - MEL_LOW) * 255.0
    return np.asarray(np.clip(np.rint(scaled), 0, 255), np.uint8)


ENGLISH_ACCENTS: Final = (
    "en-us", "en-us", "en", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-029",
)  # fmt: skip
FOREIGN_ACCENTS: Final = (
    "de", "es", "it", "nl", "pt-br", "pl", "sv", "da", "nb", "is", "fi", "et", "hu", "tr", "ro",
    "cs", "sk", "sl", "hr", "sq", "ca", "pt", "af", "lb", "lt", "lv", "id", "ms", "sw", "eo", "la",
    "cy", "ga", "mt", "haw", "vi", "az", "eu", "ru", "el",
)  # fmt: skip
HELD_OUT_ACCENTS: Final = ("en-gb-scotland", "en-gb-x-rp", "en-us-nyc", "fr")
TRAIN_VARIANTS: Final = (
    "m1", "m2", "m3", "m4", "m6", "m7", "m8", "f1", "f2", "f4", "Annie", "Andy", "Alex", "Andrea",
    "Denis", "Diogo", "Henrique", "Hugo", "Jacky", "Lee", "Marco", "Mario", "Mike", "Michael",
    "Nguyen", "Reed", "RicishayMax", "Storm", "Tweaky", "adam", "anika", "announcer", "antonio",
    "aunty", "belinda", "benjamin", "boris", "caleb", "croak", "david", "ed", "grandma", "grandpa",
    "gustave", "ian", "iven", "iven2", "john", "kaukovalta", "klatt", "klatt3", "klatt5", "linda",
    "marcelo", "max", "michel", "miguel", "mike2", "norbert", "pablo", "paul", "pedro", "quincy",
    "rob", "robert", "sandro", "shelby", "steph", "victor", "zac",
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
        self._piper = PiperVoice(self._espeak)

    def _speaker(self) -> tuple[int, Callable[[str], Utterance]]:
        """The source (see ``clip_source``), and what speaks with one voice's settings.

        Held out are espeak-ng's other accents and variants, and all sentences; Piper only trains.
        """
        rng = self._rng
        source = rng.choices((0, 1, 2), (0.55, 0.45, 0.0) if self._held_out else (0.45, 0.3, 0.25))
        if source == [0]:
            if self._held_out:
                voice = f"{rng.choice(HELD_OUT_ACCENTS)}+{rng.choice(HELD_OUT_VARIANTS)}"
            else:
                accents: tuple[str, ...] = rng.choice((ENGLISH_ACCENTS, FOREIGN_ACCENTS))
                voice = f"{rng.choice(accents)}+{rng.choice(TRAIN_VARIANTS)}"
            rate, pitch, spread = rng.randint(105, 230), rng.randint(15, 90), rng.randint(15, 95)
            larger = 1.0 if self._held_out else rng.choice((1.0, rng.uniform(0.85, 1.18)))
            return 0, lambda text: resampled(
                self._espeak.speak(text, voice, rate, pitch, spread), larger
            )
        pace = rng.uniform(0.8, 1.25)
        shift = rng.choice((1.0, rng.uniform(0.80, 1.25)))  # a larger or a smaller head
        if source == [1]:

            def speak(text: str) -> Utterance:
                return self._neural.speak(text, pace, rng.randrange(1 << 30))
        else:
            noise, rhythm = rng.uniform(0.4, 0.9), rng.uniform(0.4, 1.0)

            def speak(text: str) -> Utterance:
                return self._piper.speak(text, 1.0 / pace, noise, rhythm)

        return source[0], lambda text: resampled(speak(text), shift)

    def make(self) -> tuple[Samples, NDArray[np.float32], NDArray[np.uint8], int]:
        """(pcm, mouth controls (V, 5), speech flag (V,), the voice's source)."""
        rng = self._rng
        source, speak = self._speaker()
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
        return self._recorded(pcm), mouth, flag, source

    def _recorded(self, pcm: Samples) -> Samples:
        """What a microphone in some room makes of it: level, echo, band, noise, clipping."""
        rng = self._rng
        level = 10.0 ** (rng.uniform(-16.0, 5.0) / 20.0)
        if rng.random() < 0.3:  # nearer, farther: the level wanders by some decibels
            place = np.linspace(0.0, 1.0, 8)
            wander = np.array([rng.gauss(0.0, 2.5) for _ in place])
            curve = np.interp(np.linspace(0.0, 1.0, len(pcm)), place, wander)
            pcm = (pcm * 10.0 ** (curve / 20.0)).astype(np.float32)
        if rng.random() < 0.35:
            pcm = _echoed(pcm, rng.uniform(0.08, 0.45), rng.uniform(0.1, 0.7), self._noise)
        if rng.random() < 0.25:  # a dull or thin microphone
            coefficient = rng.uniform(-0.4, 0.4)
            pcm = pcm - coefficient * np.concatenate([[0.0], pcm[:-1]]).astype(np.float32)
        if rng.random() < 0.25:  # a telephone, a headset, a codec
            pcm = _band_limited(pcm, rng.choice((8_000, 11_025, 16_000)), rng.random() < 0.5)
        if rng.random() < 0.12:  # digital silence, as the server feeds it
            return np.asarray(pcm * level, np.float32)
        noise = self._noise.standard_normal(len(pcm))
        smooth = rng.choice((12, 48))
        rumble = np.convolve(noise, np.ones(smooth) / np.sqrt(smooth), mode="same")
        noise = 0.5 * noise + 0.5 * rumble
        hum = np.sin(np.arange(len(pcm)) * (2 * np.pi * rng.choice((50, 60)) * 2 / SAMPLE_RATE))
        noise = noise + rng.choice((0.0, 0.0, 1.0)) * hum
        noise *= 10.0 ** (rng.uniform(-80.0, -42.0) / 20.0)
        most = rng.choice((1.0, 1.0, 1.0, 0.4))  # overdriven now and then
        return np.asarray(np.clip(pcm * level + noise, -most, most), np.float32)


def _echoed(pcm: Samples, fade_s: float, wet: float, noise: np.random.Generator) -> Samples:
    """In a room whose echo fades by 60 dB in ``fade_s``; the direct sound stays where it is."""
    length = round(fade_s * SAMPLE_RATE)
    tail = noise.standard_normal(length) * 10.0 ** (-3.0 * np.arange(length) / length)
    tail *= wet / np.sqrt(np.square(tail).sum())
    tail[: SAMPLE_RATE // 250] = 0.0
    tail[0] = 1.0
    size = len(pcm) + length
    heard = np.fft.irfft(np.fft.rfft(pcm, size) * np.fft.rfft(tail, size), size)
    return np.asarray(heard[: len(pcm)], np.float32)


def _band_limited(pcm: Samples, rate: int, no_bass: bool) -> Samples:
    """Sampled at ``rate`` on its way, and without what lies below 300 Hz."""
    narrow = soxr.resample(soxr.resample(pcm, SAMPLE_RATE, rate), rate, SAMPLE_RATE)
    narrow = np.pad(narrow, (0, max(0, len(pcm) - len(narrow))))[: len(pcm)]
    if no_bass:
        spectrum = np.fft.rfft(narrow)
        frequencies = np.fft.rfftfreq(len(narrow), 1 / SAMPLE_RATE)
        narrow = np.fft.irfft(spectrum * np.clip((frequencies - 150) / 150, 0, 1), len(narrow))
    return np.asarray(narrow, np.float32)


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
    shares = np.bincount(arrays["clip_source"], minlength=3) / len(arrays["clip_source"])
    print("clips of espeak-ng, hibari, Piper: " + ", ".join(f"{share:.2f}" for share in shares))
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
    parser.add_argument("--minutes", type=float, default=230.0, help="in all, held-out included")
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
            pcm, mouth, flag, source = maker.make()
            mels.append(quantise_mel(clip_log_mel(mel, pcm)))
            visemes.append(np.rint(mouth * 255.0).astype(np.uint8))
            flags.append(flag)
            starts.append(frames)
            sources.append(source)
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
