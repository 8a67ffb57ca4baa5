"""Measures what each video bitrate is worth: PSNR of the embedded characters, speaking.

    python -m scripts.measurements.picture_rates --out scripts/measurements/picture_rates.json

A minute or two on two cores, and as busy as you like: nothing is timed. Every preset says a
sentence, drawn as `characters render` draws, and goes through the encoders that sessions use. The
first second, in which an encoder finds its rate, is not counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
from aiortc.codecs.h264 import h264_depayload
from aiortc.codecs.vpx import vp8_depayload
from numpy.typing import NDArray

from characters_serve.agent.voice import HibariVoice
from characters_serve.bench.origin import save
from characters_serve.bench.session import circumstances
from characters_serve.config import load_config
from characters_serve.evaluation.statistics import psnr
from characters_serve.gateway.characters import load_characters
from characters_serve.gateway.images import load_reference
from characters_serve.render import OfflineRenderer
from characters_serve.session.encoders import VideoEncoder

SENTENCE: Final = (
    "I have lived above this shop for years, and I still find something new in it every morning. "
    "Ask me anything you like!"
)
KBPS: Final = (75, 200, 322, 400, 600, 858)
CODECS: Final = {"vp8": vp8_depayload, "h264": h264_depayload}

Pictures = list[NDArray[np.uint8]]


def speaking(seed: int = 0) -> Iterator[Pictures]:
    """Each preset's pictures in I420."""
    config = load_config()
    model = config.model
    renderer = OfflineRenderer(config)
    voice = HibariVoice()
    assert voice.sample_rate == model.audio.sample_rate
    speech = np.frombuffer(voice.synthesize(SENTENCE), np.int16)
    shape = (model.height * 3 // 2, model.width)
    for character in load_characters().values():
        image = load_reference(character.image_path.read_bytes(), model.width, model.height)
        yield [
            np.frombuffer(frame, np.uint8).reshape(shape)
            for frames, _ in renderer.render(image, speech, seed)
            for frame in frames
        ]


def one_rate(pictures: Pictures, codec: str, kbps: int, fps: int) -> tuple[float, float]:
    """Mean PSNR in dB over all three planes, and the kbit/s that the pictures took."""
    encoder, decoder = VideoEncoder(codec, fps), av.CodecContext.create(codec, "r")
    assert isinstance(decoder, av.VideoCodecContext)
    size, quality = 0, []
    for number, picture in enumerate(pictures):
        frame = av.VideoFrame.from_ndarray(picture, format="yuv420p")
        payloads = encoder.encode(frame, kbps, keyframe=False)
        packet = av.Packet(b"".join(CODECS[codec](payload) for payload in payloads))
        (shown,) = decoder.decode(packet)
        if number >= fps:
            size += sum(map(len, payloads))
            quality.append(psnr(picture, shown.to_ndarray()))
    return statistics.mean(quality), size * 8 / 1000 * fps / len(quality)


def measure(fps: int) -> dict[str, Any]:
    films = list(speaking())
    results: dict[str, Any] = {"characters": len(films), "pictures_each": len(films[0])}
    for codec in CODECS:
        for kbps in KBPS:
            each = [one_rate(film, codec, kbps, fps) for film in films]
            qualities, taken = zip(*each, strict=True)
            results[f"{codec} {kbps} kbit/s"] = {
                "psnr_db": round(statistics.mean(qualities), 1),
                "psnr_db_worst_character": round(min(qualities), 1),
                "kbps_taken": round(statistics.mean(taken)),
            }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures what each video bitrate is worth.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    save({**circumstances(), **measure(load_config().model.fps)}, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
