"""In: StepInput. Out: the chunk's latent, into the latent link. One rank of the diffusion model.

Rank 0 reads the host's steps and says to the other ranks what all do next; they hold their shard of
the model and do it with it, so that every rank makes the same latent. Start, end and Shutdown of
the host reach each rank by itself, and wait there until rank 0 has come to them.

Knows nothing of sockets' other ends, of pictures after the reference, or of whole utterances.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from characters_serve import logs
from characters_serve.channels import BlockingChannel, Inbox, endpoint
from characters_serve.config import Config, ModelConfig
from characters_serve.engine.child import run_child
from characters_serve.engine.decoder import InRankDecoder
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.device import choose_device
from characters_serve.engine.generator import load_family, load_prompt
from characters_serve.engine.gpu_memory import tell_gpu_memory
from characters_serve.engine.latent_link import LatentSender, LatentSink
from characters_serve.engine.ranks import Order, Ranks
from characters_serve.engine.reference_image import image_tensor
from characters_serve.engine.steady_sum import SteadySum, share_sums
from characters_serve.engine.step_input import PackedStep
from characters_serve.messages import (
    CharacterEnded,
    CharacterReady,
    EndCharacter,
    Message,
    Ping,
    Shutdown,
    StartCharacter,
    StepCounts,
    StepInput,
)
from characters_serve.model.shard import deal
from characters_serve.processes import ControlLink, arguments

log = logging.getLogger(__name__)

# So often at least the other ranks hear from rank 0, and answer their pings.
_IDLE_S = 1.0
# So often at most the host hears what was counted.
_COUNTS_S = 1.0


def warm_up(denoiser: Denoiser, packed: PackedStep, model: ModelConfig, passes: list[int]) -> float:
    """Runs an invented session until the cache has wrapped; returns a warm step's milliseconds."""
    black = torch.zeros(model.height, model.width, 3, dtype=torch.uint8)
    denoiser.start(black.to(packed.packed.device), seed=0)
    for count in [*passes, *[max(passes)] * model.window_chunks]:
        started_s = time.perf_counter()
        denoiser.step(packed.audio_window, packed.controls, count).cpu()
    denoiser.reset()
    return (time.perf_counter() - started_s) * 1000


class Mailbox:
    """The host's messages to a rank that follows, until rank 0 has come to them.

    Pings are answered at once: they ask whether this rank lives.
    """

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._kept: deque[Message] = deque()

    def sort(self, wait_s: float = 0.0) -> None:
        """Takes in what has come; when nothing has, waits for it so long."""
        while self._link.channel.socket.poll(round(wait_s * 1000)):
            message = self._link.channel.recv()
            if isinstance(message, Ping):
                self._link.answer(message)
            else:
                self._kept.append(message)
                wait_s = 0.0

    def next(self) -> Message:
        while not self._kept:
            self.sort(_IDLE_S)
        return self._kept.popleft()


class Rank:
    """One rank that is loaded and has joined its group, and the session that it computes."""

    def __init__(
        self,
        model: ModelConfig,
        link: ControlLink,
        ranks: Ranks,
        denoiser: Denoiser,
        packed: PackedStep,
        sums: SteadySum | None = None,
    ) -> None:
        self._model = model
        self._link = link
        self._ranks = ranks
        self._denoiser = denoiser
        self._packed = packed
        self._device = packed.packed.device
        self._sums = sums
        self._dropped = 0
        self._steps = 0
        self._told = (0, 0, 0, 0)
        self._told_s = 0.0

    def lead(self, inbox: Inbox, sink: LatentSink) -> None:
        """Rank 0: what the host wants, which all ranks then do in the order chosen here."""
        ranks, packed = self._ranks, self._packed
        session_id: str | None = None
        for message in inbox.messages(_IDLE_S):
            match message:
                case StepInput() if message.session_id == session_id:
                    started_s = time.perf_counter()
                    packed.fill(message)
                    ranks.give(Order.STEP, packed.host)
                    latent = self._step()
                    if self._sums is not None:
                        # Waits for the step, as sending its latent would.
                        self._sums.check()
                    sink.send(message, latent, started_s)
                    self._tell_counts()
                case StepInput():
                    self._dropped += 1
                case StartCharacter():
                    started_s = time.perf_counter()
                    ranks.give(Order.MESSAGE, packed.host)
                    self._start(message)
                    sink.start(message.image_rgb)
                    session_id = message.session_id
                    self._say_ready(session_id, started_s)
                case EndCharacter():
                    ranks.give(Order.MESSAGE, packed.host)
                    sink.reset()
                    session_id = None
                    self._end(message)
                case Shutdown():
                    ranks.give(Order.MESSAGE, packed.host)
                    self._link.answer(message)
                    return
                case _:
                    ranks.give(Order.IDLE, packed.host)
                    self._link.answer(message)

    def follow(self) -> None:
        """Any other rank: what rank 0 does, when rank 0 does it."""
        mailbox = Mailbox(self._link)
        while True:
            order = self._ranks.take(self._packed.host)
            mailbox.sort()
            if order is Order.STEP:
                self._packed.upload()
                self._step()
                self._tell_counts()
            elif order is Order.MESSAGE:
                message = mailbox.next()
                match message:
                    case StartCharacter():
                        started_s = time.perf_counter()
                        self._start(message)
                        self._say_ready(message.session_id, started_s)
                    case EndCharacter():
                        self._end(message)
                    case _ if self._link.answer(message):
                        return

    def _step(self) -> Tensor:
        packed = self._packed
        self._steps += 1
        return self._denoiser.step(packed.audio_window, packed.controls, packed.passes)

    def _tell_counts(self, after_s: float = _COUNTS_S) -> None:
        """What the session's steps have added since the host last heard, so long ago at least."""
        now_s = time.monotonic()
        if self._steps == self._told[0] or now_s - self._told_s < after_s:
            return
        denoiser = self._denoiser
        counted = (self._steps, denoiser.eager_steps, denoiser.saturated, self._plain_sums())
        grown = [now - told for now, told in zip(counted, self._told, strict=True)]
        self._link.channel.send(StepCounts(self._link.name, *grown))
        self._told, self._told_s = counted, now_s

    def _plain_sums(self) -> int:
        """Since the process began; a session's first forward pass is in them."""
        return 0 if self._sums is None else self._sums.plain_calls

    def _start(self, message: StartCharacter) -> None:
        logs.about_session(message.session_id, message.trace_id)
        self._steps, self._told = 0, (0, 0, 0, self._plain_sums())
        self._denoiser.start(
            image_tensor(message.image_rgb, self._model, self._device), message.seed
        )

    def _say_ready(self, session_id: str, started_s: float) -> None:
        elapsed_ms = (time.perf_counter() - started_s) * 1000
        self._link.channel.send(CharacterReady(session_id, self._link.name, elapsed_ms))
        tell_gpu_memory(self._link, self._device)

    def _end(self, message: EndCharacter) -> None:
        self._tell_counts(0.0)
        self._denoiser.reset()
        tell_gpu_memory(self._link, self._device)
        self._link.channel.send(CharacterEnded(message.session_id, self._link.name))
        log.info("character ended; %d steps of other sessions dropped", self._dropped)
        logs.about_session()


def serve(config: Config, group_dir: Path, link: ControlLink, *, rank: int) -> None:
    model, engine = config.model, config.engine
    torch.set_num_threads(engine.rank_threads)
    device, dtype = choose_device(engine, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = Ranks(engine, group_dir, rank, device)
    shard = deal(model, ranks.size)[rank]
    generator = load_family(
        model, device=device, dtype=dtype, shard=shard, all_reduce=ranks.all_reduce
    )
    prompt = load_prompt(model, device)
    denoiser = Denoiser(generator, model, config.optimizations, prompt=prompt)
    packed = PackedStep(model, device)
    sink = _sink(config, group_dir, device, dtype) if rank == 0 else None
    ranks.join()
    sums = share_sums(generator, config.optimizations, ranks)
    passes = [engine.degraded_passes, engine.idle_passes, config.passes]
    warm_ms = warm_up(denoiser, packed, model, passes)
    if sums is not None:
        sums.check()
    computing = Rank(model, link, ranks, denoiser, packed, sums)
    link.ready(
        {
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": str(torch.get_num_threads()),
            "params": str(sum(parameter.numel() for parameter in generator.parameters())),
            "warm_step_ms": f"{warm_ms:.1f}",
        }
    )
    if sink is not None:
        steps = BlockingChannel(endpoint(group_dir, "steps"), "pull", bind=False)
        computing.lead(Inbox(link.channel, steps), sink)
    else:
        computing.follow()
    denoiser.release()
    ranks.leave()


def _sink(config: Config, group_dir: Path, device: torch.device, dtype: torch.dtype) -> LatentSink:
    if config.optimizations.dedicated_decoder:
        return LatentSender(group_dir)
    return InRankDecoder(config, group_dir, device, dtype)


def main() -> int:
    parser = arguments("One diffusion rank of a group.")
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    name = f"rank{options.rank}"
    return run_child(name, options.group_dir, partial(serve, rank=options.rank))


if __name__ == "__main__":
    raise SystemExit(main())
