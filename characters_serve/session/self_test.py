"""In: the group's engine, before it is ready. Out: how fast chunks of an invented session come.

The session is a real one to the engine: a grey image, steps handed out on credit, and its end. So
what makes a group ready is that it delivers, not that its processes say so. Knows no pool.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from characters_serve.config import Config, ModelConfig
from characters_serve.messages import StartCharacter, StepInput, VideoChunk
from characters_serve.session.chunker import Chunker

SESSION_ID: Final = "self-test"
STEPS: Final = 12
# The first chunks load caches and pages; they say nothing of the steady state.
UNCOUNTED_CHUNKS: Final = 3
CREDITS: Final = 2
# A live session is given up after half of this.
NO_CHUNK_S: Final = 20.0
_GREY: Final = 128


class TrialFailed(RuntimeError):
    """The engine does not deliver an invented session; the message says which, and what of it."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """period_ms: median time between two chunks, with a chunk's own duration to compare."""

    period_ms: float
    allowed_ms: float

    @property
    def fast_enough(self) -> bool:
        return self.period_ms <= self.allowed_ms

    @property
    def degraded(self) -> str:
        """Why the group cannot keep its rate, in words; empty when it can."""
        if self.fast_enough:
            return ""
        return f"a chunk takes {self.period_ms:.0f} ms and plays for {self.allowed_ms:.0f} ms"


class Engine(Protocol):
    async def start_character(self, message: StartCharacter) -> None: ...
    async def end_character(self, session_id: str) -> None: ...
    async def send_step(self, step: StepInput) -> None: ...


async def run_self_test(
    engine: Engine,
    config: Config,
    next_chunk: Callable[[], Awaitable[VideoChunk]],
    clock: Callable[[], float],
) -> SelfTest:
    """Raises TrialFailed when a chunk does not come, TimeoutError when the engine is mute."""
    model = config.model
    image = bytes([_GREY]) * (3 * model.width * model.height)
    chunker = Chunker(model, SESSION_ID, seed=0)
    steps = [chunker.next(passes=config.passes, listening_energy=0.0) for _ in range(STEPS)]
    await engine.start_character(StartCharacter(SESSION_ID, image, 0))
    arrivals_s = [clock() async for _ in play(engine, steps, model, next_chunk)]
    await engine.end_character(SESSION_ID)
    counted_s = arrivals_s[UNCOUNTED_CHUNKS - 1 :]
    periods_s = [after - before for before, after in itertools.pairwise(counted_s)]
    return SelfTest(statistics.median(periods_s) * 1000, model.chunk_period_s * 1000)


async def play(
    engine: Engine,
    steps: Sequence[StepInput],
    model: ModelConfig,
    next_chunk: Callable[[], Awaitable[VideoChunk]],
) -> AsyncIterator[VideoChunk]:
    """The chunks of steps that are handed out on credit; raises TrialFailed where one does not
    come, or another."""
    trial = steps[0].session_id
    for step in steps[:CREDITS]:
        await engine.send_step(step)
    for number in range(len(steps)):
        try:
            chunk = await asyncio.wait_for(next_chunk(), NO_CHUNK_S)
        except TimeoutError:
            raise TrialFailed(
                f"{trial}: no chunk {number} from the engine in {NO_CHUNK_S:g} s"
            ) from None
        if chunk.chunk_index != number or len(chunk.frames_i420) != model.frames_per_chunk:
            raise TrialFailed(
                f"{trial}: chunk {chunk.chunk_index} with {len(chunk.frames_i420)} frames came "
                f"where chunk {number} with {model.frames_per_chunk} was due"
            )
        yield chunk
        for step in steps[number + CREDITS :][:1]:
            await engine.send_step(step)
