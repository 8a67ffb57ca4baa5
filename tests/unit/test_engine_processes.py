"""The engine's processes as their parent sees them: real processes, real sockets.

They take seconds to start: tests that leave them whole share a group of each kind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from characters_serve.channels import Channel, endpoint
from characters_serve.config import Config, EngineConfig, ModelConfig, Optimizations
from characters_serve.engine.pattern import luma_of, read_counter
from characters_serve.messages import (
    CharacterEnded,
    CharacterReady,
    EndCharacter,
    Failed,
    LatentChunk,
    Message,
    Ping,
    StartCharacter,
    StepCounts,
    StepInput,
    VideoChunk,
)
from characters_serve.processes import ChildFailed, ChildProcess
from tests.unit.small_model import SMALL

PATTERN = Config(engine=EngineConfig(kind="pattern"))
DIFFUSION = Config(
    model=ModelConfig(weights="synthetic", noise_levels=(1.0, 0.75, 0.5, 0.25)),
    engine=EngineConfig(device="cpu"),
)
ANSWER_S = 30.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Group:
    """The host's side of one group: what it binds, and what its children said."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self.model = config.model
        (folder / "config.json").write_text(config.model_dump_json())
        self.steps = Channel(endpoint(folder, "steps"), "push", bind=True)
        self.chunks = Channel(endpoint(folder, "chunks"), "pull", bind=True)
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self.counts: list[StepCounts] = []
        self.exits: asyncio.Queue[str] = asyncio.Queue()
        self.children: dict[str, ChildProcess] = {}
        self.details: dict[str, dict[str, str]] = {}

    async def start(self, name: str, module: str, *arguments: str, **pings: Any) -> None:
        child = ChildProcess(
            name,
            f"characters_serve.engine.{module}",
            self.folder,
            arguments=arguments,
            on_message=self._hear,
            on_exit=self.exits.put,
            **pings,
        )
        self.children[name] = child
        self.details[name] = (await child.start(timeout_s=60)).details

    async def start_diffusion(self) -> None:
        rank = self.start("rank0", "rank", "--rank", "0")
        await asyncio.gather(self.start("decoder", "decoder"), rank)

    async def _hear(self, message: Message) -> None:
        if isinstance(message, StepCounts):
            self.counts.append(message)
        else:
            await self.said.put(message)

    async def start_character(self, session_id: str, seed: int = 0) -> None:
        image = np.random.default_rng(7).integers(0, 256, (self.model.height, self.model.width, 3))
        message = StartCharacter(session_id, image.astype(np.uint8).tobytes(), seed)
        for child in self.children.values():
            await child.send(message)
            answer = await asyncio.wait_for(self.said.get(), ANSWER_S)
            assert isinstance(answer, CharacterReady)
            assert (answer.session_id, answer.process) == (session_id, child.name)

    async def end_character(self, session_id: str) -> None:
        for child in self.children.values():
            await child.send(EndCharacter(session_id))
            answer = await asyncio.wait_for(self.said.get(), ANSWER_S)
            assert answer == CharacterEnded(session_id, child.name)

    def step(self, session_id: str, chunk_index: int, passes: int = 4) -> StepInput:
        model = self.model
        window = np.random.default_rng(chunk_index).normal(0, 3000, model.audio_window_samples)
        return StepInput(
            session_id=session_id,
            epoch=1,
            chunk_index=chunk_index,
            audio_window=window.astype("<i2").tobytes(),
            voice_48k=bytes(2 * model.voice_samples_per_chunk),
            controls=bytes(4 * model.frames_per_chunk * model.num_controls),
            utterance_id=5,
            utterance_offset_ms=20.0,
            last=False,
            passes=passes,
        )

    async def send_step(self, session_id: str, chunk_index: int, passes: int = 4) -> None:
        await self.steps.send(self.step(session_id, chunk_index, passes))

    async def film(self, session_id: str, seed: int) -> list[bytes]:
        """All frames of a short session, the cache's window wrapped once."""
        await self.start_character(session_id, seed)
        frames: list[bytes] = []
        for index in range(self.model.window_chunks + 1):
            await self.send_step(session_id, index)
            frames += (await self.next_chunk()).frames_i420
        await self.end_character(session_id)
        return frames

    async def next_chunk(self) -> VideoChunk:
        chunk = await asyncio.wait_for(self.chunks.recv(), ANSWER_S)
        assert isinstance(chunk, VideoChunk)
        return chunk

    async def close(self) -> None:
        for child in self.children.values():
            await child.kill()
        self.steps.close()
        self.chunks.close()


OpenGroup = Callable[[Config], Group]


@pytest_asyncio.fixture(loop_scope="module")
async def open_group(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OpenGroup]:
    groups: list[Group] = []

    def open_one(config: Config) -> Group:
        groups.append(Group(tmp_path_factory.mktemp("g"), config))
        return groups[-1]

    yield open_one
    for group in groups:
        await group.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pattern(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Group]:
    group = Group(tmp_path_factory.mktemp("g"), PATTERN)
    await group.start("pattern", "pattern")
    yield group
    await group.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def diffusion(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Group]:
    group = Group(tmp_path_factory.mktemp("g"), DIFFUSION)
    await group.start_diffusion()
    yield group
    await group.close()


def counter(group: Group, frame: bytes) -> int | None:
    return read_counter(luma_of(frame, group.model.width, group.model.height))


async def test_pattern_answers_steps_with_their_frames(pattern: Group) -> None:
    await pattern.start_character("one")
    for index in range(3):
        await pattern.send_step("one", index)
    for index in range(3):
        chunk = await pattern.next_chunk()
        assert (chunk.session_id, chunk.epoch, chunk.chunk_index) == ("one", 1, index)
        assert (chunk.utterance_id, chunk.utterance_offset_ms) == (5, 20.0)
        assert [counter(pattern, frame) for frame in chunk.frames_i420] == [
            4 * index + frame for frame in range(4)
        ]
    await pattern.end_character("one")


async def test_steps_of_another_session_are_dropped(pattern: Group) -> None:
    await pattern.send_step("early", 0)
    await pattern.start_character("one")
    await pattern.send_step("other", 1)
    await pattern.send_step("one", 2)
    assert (await pattern.next_chunk()).chunk_index == 2
    await pattern.end_character("one")
    await pattern.send_step("one", 3)
    await pattern.start_character("two")
    await pattern.send_step("two", 4)
    chunk = await pattern.next_chunk()
    assert (chunk.session_id, chunk.chunk_index) == ("two", 4)
    await pattern.end_character("two")


async def test_two_groups_side_by_side_do_not_meet(open_group: OpenGroup) -> None:
    groups = [open_group(PATTERN), open_group(PATTERN)]
    await asyncio.gather(*(group.start("pattern", "pattern") for group in groups))
    for number, group in enumerate(groups):
        await group.start_character(f"session-{number}")
        await group.send_step(f"session-{number}", 10 * number)
        await group.send_step(f"session-{1 - number}", 99)
        await group.send_step(f"session-{number}", 10 * number + 1)
    for number, group in enumerate(groups):
        chunks = [await group.next_chunk() for _ in range(2)]
        assert [chunk.chunk_index for chunk in chunks] == [10 * number, 10 * number + 1]
        assert {chunk.session_id for chunk in chunks} == {f"session-{number}"}


async def test_shutdown_is_acknowledged_and_leaves_nothing_running(open_group: OpenGroup) -> None:
    group = open_group(PATTERN)
    await group.start("pattern", "pattern")
    child = group.children["pattern"]
    pid = child.pid
    assert pid is not None
    started_s = asyncio.get_running_loop().time()
    await child.stop("test", timeout_s=60)
    # Far below the timeout: the acknowledgement must not be lost when the child closes its socket.
    assert asyncio.get_running_loop().time() - started_s < 30
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert group.exits.empty()


async def test_a_terminals_interrupt_is_left_to_the_parent(pattern: Group) -> None:
    pid = pattern.children["pattern"].pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    await pattern.start_character("one")
    await pattern.send_step("one", 0)
    assert (await pattern.next_chunk()).chunk_index == 0
    assert pattern.exits.empty()
    await pattern.end_character("one")


async def test_a_child_keeps_answering_pings(open_group: OpenGroup) -> None:
    group = open_group(PATTERN)
    await group.start("pattern", "pattern", ping_interval_s=0.05, ping_timeout_s=0.5)
    child = group.children["pattern"]
    await child.send(Ping(12_345))
    await asyncio.sleep(1.5)
    assert group.exits.empty()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    assert "pattern" in await asyncio.wait_for(group.exits.get(), ANSWER_S)


async def test_a_parent_that_was_itself_stopped_accuses_no_child(open_group: OpenGroup) -> None:
    group = open_group(PATTERN)
    await group.start("pattern", "pattern", ping_interval_s=0.2, ping_timeout_s=2.0)
    await asyncio.sleep(0.5)
    time.sleep(3)  # as SIGSTOP, or a machine that is paused
    await asyncio.sleep(1)
    assert group.exits.empty()


async def test_an_unusable_configuration_is_failed_with_its_reason(open_group: OpenGroup) -> None:
    group = open_group(PATTERN)
    (group.folder / "config.json").write_text('{"model": {"width": 385}}')
    with pytest.raises(ChildFailed, match="width must be a multiple"):
        await group.start("pattern", "pattern")


async def test_a_step_crosses_rank_and_decoder(diffusion: Group) -> None:
    rank, decoder = (diffusion.details[name] for name in ("rank0", "decoder"))
    assert rank["device"] == decoder["device"] == "cpu"
    assert rank["threads"] == decoder["threads"] == "1"
    assert float(rank["warm_step_ms"]) > 0
    assert int(rank["params"]) > 1_000_000

    await diffusion.start_character("one")
    await diffusion.send_step("one", 7, passes=2)
    chunk = await diffusion.next_chunk()
    model = diffusion.model
    assert (chunk.session_id, chunk.epoch, chunk.chunk_index) == ("one", 1, 7)
    assert (chunk.utterance_id, chunk.utterance_offset_ms, chunk.passes) == (5, 20.0, 2)
    assert [len(frame) for frame in chunk.frames_i420] == [model.width * model.height * 3 // 2] * 4
    assert len(chunk.voice_48k) == 2 * model.voice_samples_per_chunk
    assert chunk.step_ms > 0
    assert chunk.decode_ms > 0
    await diffusion.end_character("one")


async def test_a_public_video_decoder_in_the_group(open_group: OpenGroup) -> None:
    settings = {"decoder": "wan22", "decoder_dim": 4, "latent_stride": 16, "latent_channels": 48}
    small = SMALL.model_copy(update={**settings, "patch": 2})
    group = open_group(DIFFUSION.model_copy(update={"model": small}))
    await group.start_diffusion()
    first = await group.film("one", seed=3)
    again = await group.film("two", seed=3)
    assert first == again
    assert {len(frame) for frame in first} == {small.width * small.height * 3 // 2}
    assert len(first) == (small.window_chunks + 1) * small.frames_per_chunk


async def test_a_session_leaves_nothing_to_the_next(diffusion: Group) -> None:
    diffusion.counts.clear()
    first = await diffusion.film("one", seed=3)
    other = await diffusion.film("two", seed=4)
    again = await diffusion.film("three", seed=3)
    assert first == again
    assert first != other
    # The last word of a session comes before its end; no steps of warming up are in it.
    steps = 3 * (diffusion.model.window_chunks + 1)
    assert sum(told.steps for told in diffusion.counts) == steps
    assert {told.eager_steps for told in diffusion.counts} == {0}, "no graph, so none declined"


async def test_decoding_on_the_rank_draws_the_same_frames(
    diffusion: Group, open_group: OpenGroup
) -> None:
    together = open_group(
        DIFFUSION.model_copy(update={"optimizations": Optimizations(dedicated_decoder=False)})
    )
    await together.start("rank0", "rank", "--rank", "0")
    assert await diffusion.film("one", seed=3) == await together.film("one", seed=3)


async def test_rank_and_decoder_drop_what_is_not_of_their_session(diffusion: Group) -> None:
    await diffusion.send_step("early", 0)
    await diffusion.start_character("one")
    await diffusion.send_step("other", 1)
    latents = Channel(endpoint(diffusion.folder, "latents"), "push", bind=False)
    latent = bytes(4 * diffusion.model.video_tokens * diffusion.model.token_channels)
    await latents.send(LatentChunk(diffusion.step("zombie", 2), latent, 4, 1.0))
    await diffusion.send_step("one", 3)
    chunk = await diffusion.next_chunk()
    latents.close()
    assert (chunk.session_id, chunk.chunk_index) == ("one", 3)
    await diffusion.end_character("one")


async def test_a_decoder_that_dies_is_reported_and_its_rank_still_stops(
    open_group: OpenGroup,
) -> None:
    group = open_group(DIFFUSION)
    await group.start_diffusion()
    await group.start_character("one")
    pid = group.children["decoder"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(group.exits.get(), ANSWER_S) == "decoder exited with code -9"
    for index in range(3):
        await group.send_step("one", index)
    started_s = asyncio.get_running_loop().time()
    await group.children["rank0"].stop("its decoder died", timeout_s=60)
    # The latents that nobody will read must not hold up the rank's exit.
    assert asyncio.get_running_loop().time() - started_s < 30
    assert group.exits.empty()


async def test_a_malformed_step_fails_the_rank_and_names_the_field(open_group: OpenGroup) -> None:
    group = open_group(DIFFUSION)
    await group.start("rank0", "rank", "--rank", "0")
    await group.start_character("one")
    await group.send_step("one", 0, passes=9)
    failed = await asyncio.wait_for(group.said.get(), ANSWER_S)
    assert isinstance(failed, Failed)
    assert "passes: 9" in failed.reason
    assert await asyncio.wait_for(group.exits.get(), ANSWER_S) == "rank0 exited with code 1"
