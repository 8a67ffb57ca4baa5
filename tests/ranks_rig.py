"""In: what each rank of a group does. Out: its processes, and how they have ended."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any


def start_ranks(target: Callable[..., None], size: int, *arguments: Any) -> list[BaseProcess]:
    """target: (rank, *arguments), importable. One fork server has imported torch for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["characters_serve.engine.rank"])
    ranks: list[BaseProcess] = [
        context.Process(target=target, args=(rank, *arguments)) for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def end_ranks(ranks: Sequence[BaseProcess], within_s: float) -> list[int | None]:
    """Their exit codes; one that fails or hangs, with None, ends those after it."""
    for rank in ranks:
        rank.join(within_s)
        if rank.exitcode != 0:
            break
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return codes
