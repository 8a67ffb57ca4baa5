"""The other ranks of a group that is timed: processes that take rank 0's orders.

In: a configuration and what a rank does until rank 0 ends it. Out: the group's folder, while they
run.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from characters_serve.config import Config

SETTLE_SHARE = 0.25
"""Of a sustained run, for the clocks to settle to the cards' power limit; not counted."""
_ENDS_S = 60.0


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
