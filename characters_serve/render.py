"""In: one image and one recording of speech. Out: an MP4 of the character saying it.

The session's own chunker, model and decoder, without a clock: what it draws is what a live session
with the same seed and the same speech draws. Runs as fast as the machine allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import av
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from characters_serve.config import Config, ModelConfig
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.device import choose_device
from characters_serve.engine.generator import load_family, load_prompt
from characters_serve.engine.reference_image import image_tensor
from characters_serve.engine.step_input import PackedStep
from characters_serve.gateway.images import load_reference
from characters_serve.messages import AgentAudio
from characters_serve.session.chunker import VOICE_RATE, Chunker

_SESSION: Final = "render"
_CRF: Final = "18"
_BT601: Final = av.video.reformatter.Colorspace.SMPTE170M
_LIMITED: Final = av.video.reformatter.ColorRange.MPEG


class RenderError(ValueError):
    """Input that cannot be rendered; the message names the file and what is wrong with it."""


class OfflineRenderer:
    """One configuration's model and decoder, loaded once, for one recording after another."""

    def __init__(self, config: Config) -> None:
        model = config.model
        self.model = model
        self._passes = config.passes
        self._device, dtype = choose_device(config.engine)
        generator = load_family(model, device=self._device, dtype=dtype)
        prompt = load_prompt(model, self._device)
        self._denoiser = Denoiser(generator, model, config.optimizations, prompt=prompt)
        self._decoder = ChunkDecoder(model, self._device, dtype, config.optimizations)
        self._packed = PackedStep(model, self._device)

    def render(
        self, image_rgb: bytes, speech: NDArray[np.int16], seed: int
    ) -> Iterator[tuple[list[bytes], bytes]]:
        """Chunk by chunk, until the speech is over: frames in I420, and the voice at 48 kHz.

        image_rgb: of the model's size. speech: mono, at the model's rate."""
        model, packed = self.model, self._packed
        self._denoiser.start(image_tensor(image_rgb, model, self._device), seed)
        self._decoder.start(image_rgb)
        chunker = Chunker(model, _SESSION, seed)
        rate = model.audio.sample_rate
        chunker.add(AgentAudio(_SESSION, 1, rate, speech.tobytes(), "", last=True))
        for _ in range(num_chunks(speech, model)):
            step = chunker.next(passes=self._passes, listening_energy=0.0)
            packed.fill(step)
            latent = self._denoiser.step(packed.audio_window, packed.controls, packed.passes)
            yield self._decoder.decode(latent), step.voice_48k


def num_chunks(speech: NDArray[np.int16], model: ModelConfig) -> int:
    return -(-len(speech) // model.audio_samples_per_chunk)


def run_render(
    config: Config, image_path: Path, audio_path: Path, out_path: Path, seed: int
) -> None:
    model = config.model
    try:
        image_rgb = load_reference(image_path.read_bytes(), model.width, model.height)
    except (OSError, ValueError) as error:
        raise RenderError(f"image {image_path}: {error}") from error
    speech = read_speech(audio_path, model.audio.sample_rate)
    chunks = OfflineRenderer(config).render(image_rgb, speech, seed)
    # A render that breaks off must not leave a file that looks like a finished one.
    unfinished = out_path.with_name(f".{out_path.stem}.unfinished.mp4")
    total = num_chunks(speech, model)
    try:
        with _Mp4(unfinished, model) as film:
            for frames, voice_48k in tqdm(chunks, desc=out_path.name, unit="chunk", total=total):
                film.add(frames, voice_48k)
        unfinished.replace(out_path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_speech(path: Path, sample_rate: int) -> NDArray[np.int16]:
    """Any file's first audio stream, mono, at the model's rate."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=sample_rate)
    pieces: list[NDArray[np.int16]] = []
    try:
        with av.open(str(path)) as container:
            if not container.streams.audio:
                raise RenderError(f"audio {path}: there is no sound in it")
            for frame in [*container.decode(audio=0), None]:
                pieces += [part.to_ndarray()[0] for part in resampler.resample(frame)]
    except (OSError, av.FFmpegError) as error:
        raise RenderError(f"audio {path}: {error}") from error
    speech = np.concatenate(pieces) if pieces else np.zeros(0, np.int16)
    if not speech.size:
        raise RenderError(f"audio {path}: it is empty")
    return speech


class _Mp4:
    """H.264 and AAC, written chunk by chunk."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self._shape = (model.height * 3 // 2, model.width)
        self._container = av.open(str(path), "w", options={"movflags": "faststart"})
        self._video = self._container.add_stream("libx264", rate=model.fps)
        self._video.width, self._video.height = model.width, model.height
        self._video.pix_fmt = "yuv420p"
        self._video.options = {"crf": _CRF}
        context = self._video.codec_context
        context.colorspace, context.color_range = _BT601, _LIMITED
        self._audio = self._container.add_stream("aac", rate=VOICE_RATE, layout="mono")
        self._samples = 0

    def add(self, frames_i420: list[bytes], voice_48k: bytes) -> None:
        for data in frames_i420:
            picture = np.frombuffer(data, np.uint8).reshape(self._shape)
            frame = av.VideoFrame.from_ndarray(picture, format="yuv420p")
            self._container.mux(self._video.encode(frame))
        samples = np.frombuffer(voice_48k, np.int16)
        sound = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        sound.sample_rate, sound.pts = VOICE_RATE, self._samples
        self._samples += len(samples)
        self._container.mux(self._audio.encode(sound))

    def __enter__(self) -> _Mp4:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._container.mux(self._video.encode(None))
            self._container.mux(self._audio.encode(None))
        self._container.close()
