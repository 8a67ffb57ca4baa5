"""In: how many clips of how many seconds. Out: what is said in each, as WAV files in a folder.

The server's own voice speaks by default; a folder of recordings can stand in for it. Every clip has
its own order of sentences, the same for all configurations.
"""

from __future__ import annotations

import random
import wave
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from characters_serve.agent.voice import SAMPLE_RATE, HibariVoice
from characters_serve.render import read_speech

Pcm = NDArray[np.int16]

_PAUSE_S: Final = (0.15, 0.6)
_SENTENCES: Final = (
    "Good morning, it is a pleasure to meet you at last.",
    "We moved to a small house near the harbour about five years ago.",
    "Both of my brothers play football every Sunday afternoon.",
    "The museum opens at ten, but the coffee shop opens much earlier.",
    "Would you mind if I opened the window for a few minutes?",
    "Purple flowers bloom beside the path from May until October.",
    "I have never seen so many people waiting for a bus before.",
    "Choose whichever jacket you like, they are all equally warm.",
    "My grandmother makes the best mushroom soup in the village.",
    "First we boil the water, then we add the beans and the pepper.",
    "They laughed about the joke for more than half an hour.",
    "You should probably bring an umbrella, because it might rain.",
    "A large brown fox jumped over the wall behind our garden.",
    "Thank you for helping me move that heavy piano upstairs.",
    "The weather was awful, so we stayed home and watched a film.",
    "Who would have thought that bees could be so polite?",
    "Please remember to water the plants while we are away.",
    "On Wednesday evening the whole family meets for dinner.",
    "I was just about to ask you exactly the same question.",
    "Some mountains are beautiful, but this view is simply perfect.",
    "He bought a blue bicycle with the money from his first job.",
    "Maybe we should leave before the traffic becomes any worse.",
    "Five ships left the bay before the fog became too thick.",
    "Oh, how wonderful! Tell me everything about your journey.",
    "My favourite book begins with a map of an island.",
    "Do you know why the moon seems bigger above the trees?",
)


def prepare_speech(
    folder: Path, clips: int, seconds: float, sample_rate: int, recordings: Path | None = None
) -> list[Path]:
    """A mono WAV file at `sample_rate` for each clip; those that are there already stay.

    Raises OSError or ValueError where the recordings cannot be read."""
    files = [folder / f"clip-{clip:03d}.wav" for clip in range(clips)]
    missing = [clip for clip, file in enumerate(files) if not file.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        spoken = _read(recordings, sample_rate) if recordings else _speak(sample_rate)
        for clip in missing:
            write_wav(files[clip], _say(spoken, clip, seconds, sample_rate), sample_rate)
    return files


def write_wav(path: Path, pcm: Pcm, sample_rate: int) -> None:
    unfinished = path.with_suffix(".unfinished")
    with wave.open(str(unfinished), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(pcm.tobytes())
    unfinished.replace(path)


def read_wav(path: Path) -> Pcm:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def _say(spoken: list[Pcm], clip: int, seconds: float, sample_rate: int) -> Pcm:
    """Sentences in an order of the clip's own, with pauses, over and over up to its end."""
    order = random.Random(clip)
    wanted, pieces, length = round(seconds * sample_rate), [], 0
    while length < wanted:
        for sentence in order.sample(spoken, len(spoken)):
            pause = np.zeros(round(order.uniform(*_PAUSE_S) * sample_rate), np.int16)
            pieces += [pause, sentence]
            length += len(pause) + len(sentence)
            if length >= wanted:
                break
    return np.concatenate(pieces)[:wanted]


def _speak(sample_rate: int) -> list[Pcm]:
    voice = HibariVoice()
    sentences = tqdm(_SENTENCES, desc="speech", unit="sentence")
    return [_resample(voice.synthesize(text), sample_rate) for text in sentences]


def _resample(pcm: bytes, sample_rate: int) -> Pcm:
    import soxr

    samples = np.frombuffer(pcm, np.int16)
    resampled: Any = soxr.resample(samples, SAMPLE_RATE, sample_rate, quality="HQ")
    return np.asarray(resampled, np.int16)


def _read(recordings: Path, sample_rate: int) -> list[Pcm]:
    files = sorted(path for path in recordings.iterdir() if path.is_file())
    if not files:
        raise ValueError(f"{recordings}: there are no recordings in it")
    return [read_speech(file, sample_rate) for file in files]
