"""Times an open model's whole stream: from a session's start to I420 frames in host memory.

    characters bench step --config configs/live-avatar-14b.yaml --out live_avatar.json

In: a configuration; with `engine.tensor_parallel` its ranks are processes, and take rank 0's orders
as a serving group's do. Out: the first picture's delay, a chunk's latency, frames a second in
steady state. With `dedicated_decoder` chunk i-1 is decoded while chunk i is denoised, on a GPU of
its own if there is one more than ranks; otherwise after its step. Speech, where the model hears,
is noise of its loudness. The last line of the output, and the file, are one JSON object.

Imports no sockets and no media, so that it runs on a bare GPU machine.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from characters_serve.bench.members import SETTLE_SHARE, Member, following
from characters_serve.bench.origin import device_name, origin, report
from characters_serve.config import Config
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.engine.device import choose_device, decoder_gpu
from characters_serve.engine.ranks import Order
from characters_serve.engine.reference_image import image_tensor

_LOUDNESS = 0.1


class StreamMember(Member):
    """One rank, and the invented picture that its sessions begin with."""

    def __init__(self, config: Config, folder: Path, rank: int) -> None:
        super().__init__(config, folder, rank)
        model = config.model
        random = np.random.default_rng(0)
        size = model.height * model.width * 3
        self.image_rgb = random.integers(0, 256, size, np.uint8).tobytes()
        self._image = image_tensor(self.image_rgb, model, self.device)

    def begin(self) -> None:
        self.denoiser.start(self._image, seed=0)

    def step(self) -> Tensor:
        """A latent to keep, once the device has made it."""
        latent = super().step().clone()
        if latent.is_cuda:
            torch.cuda.current_stream().synchronize()
        return latent

    def lead(self, order: Order) -> Tensor | None:
        """Rank 0: what all ranks do now; a step's latent."""
        self.ranks.give(order, self.packed.host)
        if order is Order.MESSAGE:
            self.begin()
            return None
        self.packed.upload()
        return self.step()

    def follow(self) -> None:
        """Any other rank: sessions and steps, until rank 0 has nothing more to do."""
        while (order := self.ranks.take(self.packed.host)) is not Order.IDLE:
            if order is Order.MESSAGE:
                self.begin()
            else:
                self.packed.upload()
                self.step()


def _follow(config_json: str, folder: Path, rank: int) -> None:
    member = StreamMember(Config.model_validate_json(config_json), folder, rank)
    member.follow()
    member.leave()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Times of one chunk, of time.perf_counter: its step from began_s to denoised_s; decoding it
    takes decode_s, and its frames are there at shown_s."""

    began_s: float
    denoised_s: float
    decode_s: float
    shown_s: float
    frames: int


class Decoder:
    """Decodes in a thread and a stream of its own, or, not overlapped, where it is called."""

    def __init__(self, config: Config) -> None:
        self.overlapped = config.optimizations.dedicated_decoder
        gpu = decoder_gpu(config.engine) if self.overlapped else 0
        self.device, dtype = choose_device(config.engine, gpu)
        self._decoder = ChunkDecoder(config.model, self.device, dtype, config.optimizations)
        self._thread = ThreadPoolExecutor(1) if self.overlapped else None
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def start(self, image_rgb: bytes) -> None:
        """On the stream that decodes: what it leaves is the first chunk's past."""
        with self._on_stream():
            self._decoder.start(image_rgb)

    def submit(self, latent: Tensor, began_s: float, denoised_s: float) -> Callable[[], Chunk]:
        """-> what waits for the frames."""
        if self._thread is None:
            chunk = self._decode(latent, began_s, denoised_s)
            return lambda: chunk
        future: Future[Chunk] = self._thread.submit(self._decode, latent, began_s, denoised_s)
        return future.result

    def _decode(self, latent: Tensor, began_s: float, denoised_s: float) -> Chunk:
        started_s = time.perf_counter()
        with self._on_stream():
            frames = self._decoder.decode(latent.to(self.device))
        shown_s = time.perf_counter()
        return Chunk(began_s, denoised_s, shown_s - started_s, shown_s, len(frames))

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def session(member: StreamMember, decoder: Decoder) -> Generator[Chunk]:
    """Chunks of a new session for ever; each is decoded while the next one is denoised."""
    decoder.start(member.image_rgb)
    member.lead(Order.MESSAGE)
    waiting: Callable[[], Chunk] | None = None
    try:
        while True:
            began_s = time.perf_counter()
            latent = member.lead(Order.STEP)
            assert latent is not None
            before, waiting = waiting, decoder.submit(latent, began_s, time.perf_counter())
            if before is not None:
                yield before()
    finally:
        # The next session's frames must not meet this one's.
        if waiting is not None:
            waiting()


def first_frame_ms(member: StreamMember, decoder: Decoder) -> tuple[float, float]:
    """Of a session on a warm group: until its picture and text are read, until its first frames."""
    began_s = time.perf_counter()
    decoder.start(member.image_rgb)
    member.lead(Order.MESSAGE)
    if member.device.type == "cuda":
        torch.cuda.synchronize(member.device)
    ready_s = time.perf_counter()
    latent = member.lead(Order.STEP)
    assert latent is not None
    chunk = decoder.submit(latent, ready_s, time.perf_counter())()
    return (ready_s - began_s) * 1000, (chunk.shown_s - began_s) * 1000


def sustained(member: StreamMember, decoder: Decoder, warm_up: int, seconds: float) -> list[Chunk]:
    """The chunks of `seconds`, after as many as fill the window and a share to settle."""
    found: list[Chunk] = []
    with contextlib.closing(session(member, decoder)) as chunks:
        for _ in range(warm_up):
            next(chunks)
        started_s = time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_s) < seconds or len(found) < 2:
            chunk = next(chunks)
            if elapsed_s >= seconds * SETTLE_SHARE:
                found.append(chunk)
    return found


def measure(config: Config, seconds: float) -> dict[str, Any]:
    """Raises PeerLost, or NCCL ends the process, when a rank of the group dies."""
    model, size = config.model, config.engine.tensor_parallel
    with following(config, _follow) as folder:
        loading_s = time.perf_counter()
        member = StreamMember(config, folder, 0)
        decoder = Decoder(config)
        loaded_s = time.perf_counter() - loading_s
        random = torch.Generator().manual_seed(0)
        member.packed.host.copy_(
            _LOUDNESS * torch.randn(member.packed.host.shape, generator=random)
        )
        window = model.causal_wan.window_latents if model.causal_wan else 0
        warm_up = max(model.window_chunks, -(-window // model.latents_per_chunk)) + 2
        chunks = sustained(member, decoder, warm_up, seconds)
        denoiser = member.denoiser
        steady = {"eager_steps": denoiser.eager_steps, "saturated": denoiser.saturated}
        ready_ms, first_ms = first_frame_ms(member, decoder)
        decoder.close()
        member.ranks.give(Order.IDLE, member.packed.host)
        member.leave()
    result = {
        "model": model.name,
        "weights": model.weights,
        "width": model.width,
        "height": model.height,
        "frames_per_chunk": model.frames_per_chunk,
        "chunk_period_ms": round(model.chunk_period_s * 1000, 2),
        "passes": len(model.noise_levels) + (model.cache_policy == "clean_pass"),
        "tensor_parallel": size,
        "rank0_params": member.parameters,
        "optimizations": config.optimizations.model_dump(),
        "decoder": model.decoder,
        "decoder_device": str(decoder.device),
        "decoder_overlapped": decoder.overlapped,
        "load_s": round(loaded_s, 1),
        "session_ready_ms": round(ready_ms, 1),
        "first_frame_ms": round(first_ms, 1),
    }
    result |= _figures(chunks, model.fps) | steady
    if member.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(member.device)
        result["rank0_memory_gb"] = round(peak / 1e9, 1)
    dtype = str(member.dtype).removeprefix("torch.")
    return result | {"device": device_name(member.device), "dtype": dtype} | origin()


def _figures(chunks: list[Chunk], fps: int) -> dict[str, Any]:
    """fps: frames shown from the first of the chunks to the last, by the time between them."""
    step_ms = [1000 * (chunk.denoised_s - chunk.began_s) for chunk in chunks]
    decode_ms = [1000 * chunk.decode_s for chunk in chunks]
    latency_ms = [1000 * (chunk.shown_s - chunk.began_s) for chunk in chunks]
    spent_s = chunks[-1].shown_s - chunks[0].shown_s
    shown = sum(chunk.frames for chunk in chunks[1:]) / spent_s
    figures: dict[str, Any] = {"chunks": len(chunks), "fps": round(shown, 2), "fps_needed": fps}
    figures["fps_of_steps_alone"] = round(1000 * chunks[-1].frames / float(np.median(step_ms)), 2)
    for name, values in (("step", step_ms), ("decode", decode_ms), ("chunk_latency", latency_ms)):
        figures[f"{name}_ms_median"] = round(float(np.median(values)), 2)
        figures[f"{name}_ms_p99"] = round(float(np.percentile(values, 99)), 2)
    return figures


def run(config: Config, options: argparse.Namespace) -> int:
    report(measure(config, options.seconds), options.out)
    return 0
