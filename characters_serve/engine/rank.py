"""In: StepInput. Out: the chunk's latent, into the latent link. One rank of the diffusion model.

Knows nothing of sockets' other ends, of pictures after the reference, or of whole utterances.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from characters_serve import logs
from characters_serve.channels import BlockingChannel, Inbox, endpoint
from characters_serve.config import Config, ModelConfig
from characters_serve.engine.child import arguments, run_child
from characters_serve.engine.decoder import InRankDecoder
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.device import choose_device
from characters_serve.engine.generator import load_family, load_prompt
from characters_serve.engine.latent_link import LatentSender, LatentSink
from characters_serve.engine.reference_image import image_tensor
from characters_serve.engine.step_input import PackedStep
from characters_serve.messages import (
    CharacterEnded,
    CharacterReady,
    EndCharacter,
    StartCharacter,
    StepInput,
)
from characters_serve.processes import ControlLink

log = logging.getLogger(__name__)


def warm_up(denoiser: Denoiser, packed: PackedStep, model: ModelConfig, passes: list[int]) -> float:
    """Runs an invented session until the cache has wrapped; returns a warm step's milliseconds."""
    black = torch.zeros(model.height, model.width, 3, dtype=torch.uint8)
    denoiser.start(black.to(packed.packed.device), seed=0)
    for count in [*passes, *[max(passes)] * model.window_chunks]:
        started_s = time.perf_counter()
        denoiser.step(packed.audio_window, packed.controls, count).cpu()
    denoiser.reset()
    return (time.perf_counter() - started_s) * 1000


def serve(config: Config, group_dir: Path, link: ControlLink) -> None:
    model = config.model
    torch.set_num_threads(config.engine.rank_threads)
    device, dtype = choose_device(config.engine)
    generator = load_family(model, device=device, dtype=dtype)
    prompt = load_prompt(model, device)
    denoiser = Denoiser(generator, model, config.optimizations, prompt=prompt)
    packed = PackedStep(model, device)
    all_passes = len(model.noise_levels)
    warm_ms = warm_up(denoiser, packed, model, [config.engine.degraded_passes, all_passes])

    steps = BlockingChannel(endpoint(group_dir, "steps"), "pull", bind=False)
    decoder: LatentSink = (
        LatentSender(group_dir)
        if config.optimizations.dedicated_decoder
        else InRankDecoder(model, group_dir, device, dtype)
    )
    session_id: str | None = None
    dropped = 0
    link.ready(
        {
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": str(torch.get_num_threads()),
            "params": str(sum(parameter.numel() for parameter in generator.parameters())),
            "warm_step_ms": f"{warm_ms:.1f}",
        }
    )
    inbox = Inbox(link.channel, steps)
    for message in inbox.messages(timeout_s=1.0):
        match message:
            case StepInput() if message.session_id == session_id:
                started_s = time.perf_counter()
                packed.fill(message)
                latent = denoiser.step(packed.audio_window, packed.controls, packed.passes)
                decoder.send(message, latent, started_s)
            case StepInput():
                dropped += 1
            case StartCharacter():
                started_s = time.perf_counter()
                denoiser.start(image_tensor(message.image_rgb, model, device), message.seed)
                decoder.start(message.image_rgb)
                session_id = message.session_id
                logs.about_session(session_id)
                elapsed_ms = (time.perf_counter() - started_s) * 1000
                link.channel.send(CharacterReady(session_id, link.name, elapsed_ms))
            case EndCharacter():
                denoiser.reset()
                decoder.reset()
                session_id = None
                link.channel.send(CharacterEnded(message.session_id, link.name))
                log.info("character ended; %d steps of other sessions dropped", dropped)
                logs.about_session(None)
            case _ if link.answer(message):
                break


def main() -> int:
    parser = arguments("One diffusion rank of a group.")
    parser.add_argument("--rank", type=int, choices=[0], required=True)
    options = parser.parse_args()
    return run_child(f"rank{options.rank}", options.group_dir, serve)


if __name__ == "__main__":
    raise SystemExit(main())
