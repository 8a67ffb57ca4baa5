"""In: LatentChunk, and the reference image. Out: VideoChunk with I420 frames.

Knows nothing of how latents are made, nor of how they become pictures.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch import Tensor

from characters_serve import logs
from characters_serve.channels import BlockingChannel, Inbox, endpoint
from characters_serve.config import Config
from characters_serve.engine.child import run_child
from characters_serve.engine.chunk_decoder import ChunkDecoder
from characters_serve.engine.device import choose_device, decoder_gpu
from characters_serve.engine.gpu_memory import tell_gpu_memory
from characters_serve.engine.latent_link import LatentReceiver
from characters_serve.messages import (
    CharacterEnded,
    CharacterReady,
    EndCharacter,
    LatentChunk,
    StartCharacter,
    StepInput,
    VideoChunk,
)
from characters_serve.processes import ControlLink, arguments

log = logging.getLogger(__name__)


class InRankDecoder:
    """Stands where the latent link does: decodes on the rank, after the step (the plain path)."""

    def __init__(
        self, config: Config, group_dir: Path, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._decoder = ChunkDecoder(config.model, device, dtype, config.optimizations)
        self._decoder.warm_up()
        self._chunks = BlockingChannel(endpoint(group_dir, "chunks"), "push", bind=False)

    def start(self, image_rgb: bytes) -> None:
        self._decoder.start(image_rgb)

    def send(self, step: StepInput, latent: Tensor, started_s: float) -> None:
        if latent.is_cuda:
            torch.cuda.synchronize(latent.device)
        step_ms = (time.perf_counter() - started_s) * 1000
        chunk = LatentChunk(step, b"", step.passes, step_ms, started_s)
        self._chunks.send(decoded(self._decoder, chunk, latent))

    def reset(self) -> None:
        self._decoder.reset()


def decoded(decoder: ChunkDecoder, chunk: LatentChunk, latent: Tensor) -> VideoChunk:
    """latent: the chunk's, on the decoder's device, however it came there."""
    began_s, step = time.perf_counter(), chunk.step
    frames_i420 = decoder.decode(latent)
    return VideoChunk(
        session_id=step.session_id,
        epoch=step.epoch,
        chunk_index=step.chunk_index,
        frames_i420=frames_i420,
        voice_48k=step.voice_48k,
        utterance_id=step.utterance_id,
        utterance_offset_ms=step.utterance_offset_ms,
        last=step.last,
        passes=chunk.passes,
        step_ms=chunk.step_ms,
        decode_ms=(time.perf_counter() - began_s) * 1000,
        step_began_s=chunk.step_began_s,
        decode_began_s=began_s,
    )


def serve(config: Config, group_dir: Path, link: ControlLink) -> None:
    torch.set_num_threads(config.engine.decoder_threads)
    device, dtype = choose_device(config.engine, decoder_gpu(config.engine))
    decoder = ChunkDecoder(config.model, device, dtype, config.optimizations)
    warm_ms = decoder.warm_up()
    latents = LatentReceiver(group_dir, config.model, device)
    chunks = BlockingChannel(endpoint(group_dir, "chunks"), "push", bind=False)
    session_id: str | None = None
    dropped = 0
    link.ready(
        {
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": str(torch.get_num_threads()),
            "warm_chunk_ms": f"{warm_ms:.1f}",
        }
    )
    inbox = Inbox(link.channel, latents.channel)
    for message in inbox.messages(timeout_s=1.0):
        match message:
            case LatentChunk() if message.step.session_id == session_id:
                chunks.send(decoded(decoder, message, latents.latent(message)))
            case LatentChunk():
                dropped += 1
            case StartCharacter():
                started_s = time.perf_counter()
                decoder.start(message.image_rgb)
                session_id = message.session_id
                logs.about_session(session_id, message.trace_id)
                elapsed_ms = (time.perf_counter() - started_s) * 1000
                link.channel.send(CharacterReady(session_id, link.name, elapsed_ms))
                tell_gpu_memory(link, device)
            case EndCharacter():
                decoder.reset()
                session_id = None
                tell_gpu_memory(link, device)
                link.channel.send(CharacterEnded(message.session_id, link.name))
                log.info("character ended; %d latents of other sessions dropped", dropped)
                logs.about_session()
            case _ if link.answer(message):
                break


def main() -> int:
    options = arguments("The decoder process of one group.").parse_args()
    return run_child("decoder", options.group_dir, serve)


if __name__ == "__main__":
    raise SystemExit(main())
