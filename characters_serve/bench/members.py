"""The ranks of a group that is timed: each loaded as a serving one is, those after rank 0 in
processes that take its orders.

In: a configuration, and what a rank does until rank 0 ends it. Out: a rank; the group's folder,
while the others run. Knows nothing of what is timed.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from characters_serve.config import Config
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.device import choose_device
from characters_serve.engine.generator import load_family, load_prompt
from characters_serve.engine.ranks import Ranks
from characters_serve.engine.step_input import PackedStep
from characters_serve.model.shard import deal

SETTLE_SHARE = 0.25
"""Of a sustained run, for the clocks to settle to the cards' power limit; not counted."""
_ENDS_S = 60.0


class Member:
    """One rank, loaded and joined. All ranks begin the same sessions and make the same steps."""

    def __init__(self, config: Config, folder: Path, rank: int) -> None:
        model = config.model
        self.device, self.dtype = choose_device(config.engine, rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(config.engine.rank_threads)
        self.ranks = Ranks(config.engine, folder, rank, self.device)
        self.generator = load_family(
            model,
            device=self.device,
            dtype=self.dtype,
            shard=deal(model, self.ranks.size)[rank],
            all_reduce=self.ranks.all_reduce,
        )
        prompt = load_prompt(model, self.device)
        # What the weights are before some of them become FP8.
        self.parameters = sum(parameter.numel() for parameter in self.generator.parameters())
        self.denoiser = Denoiser(self.generator, model, config.optimizations, prompt=prompt)
        self.packed = PackedStep(model, self.device)
        self._passes = len(model.noise_levels)
        self.ranks.join()

    def step(self) -> Tensor:
        """The chunk's latent, until the next step."""
        packed = self.packed
        return self.denoiser.step(packed.audio_window, packed.controls, self._passes)

    def leave(self) -> None:
        """Ends its use, in this order: the captured step holds collectives of the group."""
        self.denoiser.release()
        self.ranks.leave()


@contextmanager
def following(config: Config, follow: Callable[[str, Path, int], None]) -> Iterator[Path]:
    """follow: (configuration as JSON, folder, rank), importable. Waits for its end at the end."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="characters-bench-") as name:
        followers = [
            context.Process(
                target=follow, args=(config.model_dump_json(), Path(name), rank), daemon=True
            )
            for rank in range(1, config.engine.tensor_parallel)
        ]
        for follower in followers:
            follower.start()
        yield Path(name)
        for follower in followers:
            follower.join(_ENDS_S)
