"""A voice agent of somebody else: the README's example and its protocol, through a real server."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import websockets
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection
from websockets.typing import Subprotocol

from tests.e2e.rig import Measure, Server, running_server
from tests.unit.session_rig import Browser
from tests.waiting import until

README = Path(__file__).parents[2] / "README.md"
# Above the sum of the test picture's beep (8,000) and nothing, below the tone less the beep.
TONE_PEAK, AUDIBLE = 24_000, 12_000
RATE = 48_000


@pytest.fixture(scope="module")
def external_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(
        tmp_path_factory.mktemp("x"),
        "engine.kind=pattern",
        "agent.kind=external",
        "model.width=192",
        "model.height=128",
    ) as server:
        yield server


@pytest.fixture
def server(external_server: Server) -> Server:
    return external_server.when_free()


class Talk:
    """A session, its client and its voice agent."""

    def __init__(self, server: Server, http: httpx.AsyncClient, session: dict[str, Any]) -> None:
        self.http = http
        self.secret = str(session["client_secret"]["value"])
        self.headers = {"Authorization": f"Bearer {self.secret}"}
        self.path = f"/v1/sessions/{session['id']}"
        self.url = f"{server.url.replace('http', 'ws', 1)}{self.path}/audio"
        self.client = Browser()
        self.frames: list[dict[str, Any]] = []
        self.microphone = bytearray()

    async def connect(self) -> None:
        offer = {"sdp": await self.client.offer(), "type": "offer"}
        answer = await self.http.post(f"{self.path}/webrtc", json=offer, headers=self.headers)
        assert answer.status_code == 201, answer.text
        await self.client.accept(answer.json()["sdp"])
        await until(lambda: len(self.client.sounds) > 25)

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[ClientConnection]:
        async with websockets.connect(self.url, additional_headers=self.headers) as socket:
            reader = asyncio.create_task(self._read(socket))
            await until(lambda: "ready" in self.kinds())
            yield socket
            await socket.close()
            await reader

    async def _read(self, socket: ClientConnection) -> None:
        with suppress(websockets.ConnectionClosed):
            async for frame in socket:
                if isinstance(frame, str):
                    self.frames.append(json.loads(frame))
                else:
                    self.microphone += frame

    def kinds(self) -> list[str]:
        return [frame["type"] for frame in self.frames]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["type"] == kind]

    def heard(self) -> NDArray[np.float64]:
        """What the client has received, as 48 kHz mono, each packet at its own time."""
        first = min(frame.pts or 0 for frame in self.client.sounds)
        pieces = [
            ((frame.pts or 0) - first, frame.to_ndarray().reshape(-1, 2)[:, 0])
            for frame in self.client.sounds
        ]
        heard = np.zeros(max(at + len(piece) for at, piece in pieces))
        for at, piece in pieces:
            heard[at : at + len(piece)] = piece
        return heard


@asynccontextmanager
async def talk(server: Server) -> AsyncIterator[Talk]:
    fresh = httpx.Limits(max_keepalive_connections=0)  # the server closes those that idle
    async with httpx.AsyncClient(base_url=server.url, timeout=20, limits=fresh) as http:
        created = await http.post("/v1/sessions", json={"character": "mira"})
        assert created.status_code == 201, created.text
        made = Talk(server, http, created.json())
        try:
            await made.connect()
            yield made
        finally:
            await made.client.close()
            await http.delete(made.path, headers=made.headers)


def tone(rate: int, seconds: float, *, form: str = "pcm_s16le", channels: int = 1) -> bytes:
    wave = TONE_PEAK / 32767 * np.sin(2 * np.pi * 1000 / rate * np.arange(round(seconds * rate)))
    wave = np.repeat(wave, channels)
    return (wave.astype("<f4") if form == "pcm_f32le" else (wave * 32767).astype("<i2")).tobytes()


def measured(heard: NDArray[np.float64]) -> tuple[float, float]:
    """The frequency of what is loud, and its seconds less the pauses that a busy machine makes."""
    loud = np.flatnonzero(np.abs(heard) > AUDIBLE)
    run = heard[loud[0] : loud[-1] + 1]
    spectrum = np.abs(np.fft.rfft(run * np.hanning(len(run)), 1 << 20))
    milliseconds = len(np.unique(loud // (RATE // 1000)))
    return float(np.argmax(spectrum)) * RATE / (1 << 20), milliseconds / 1000


async def test_the_readmes_example_is_heard_as_it_was_sent(
    server: Server, measure: Measure
) -> None:
    section = README.read_text().partition("## Bring your own voice agent")[2]
    example = re.search(r"```python\n(.*?)```", section, re.S)
    assert example is not None
    names: dict[str, Any] = {}
    exec(example[1], names)
    async with talk(server) as t:
        for rate, form, channels in (
            (8_000, "pcm_s16le", 1),
            (16_000, "pcm_s16le", 1),
            (22_050, "pcm_f32le", 1),
            (24_000, "pcm_s16le", 2),
            (44_100, "pcm_s16le", 1),
            (48_000, "pcm_f32le", 2),
        ):
            t.client.sounds.clear()
            sound = {"sample_rate": rate, "encoding": form, "channels": channels}
            pcm = tone(rate, 1.5, form=form, channels=channels)
            finished = await names["speak"](t.url, t.secret, pcm, **sound)
            await asyncio.sleep(0.5)
            hertz, seconds = measured(t.heard())
            measure(f"of {sound}", f"{hertz:.2f} Hz, {seconds:.4f} s")
            assert hertz == pytest.approx(1000, rel=0.001), sound
            # A busy machine loses packets; a wrong rate moves the tone.
            assert 0.5 < seconds < 1.52, sound
            assert finished["position_ms"] == pytest.approx(1500, abs=20), sound
            assert not finished["interrupted"]


async def hurried(t: Talk) -> float:
    """How many chunks of speech had fewer passes, as of a second ago."""
    text = (await t.http.get("/metrics")).text
    return sum(map(float, re.findall(r"^characters_hurried_chunks_total.* (\S+)$", text, re.M)))


async def test_a_conversation_by_the_protocol(server: Server) -> None:
    async with talk(server) as t, t.agent() as socket:
        before = await hurried(t)
        assert t.frames == [{"type": "ready", "sample_rate": 16_000}]
        say = await t.http.post(f"{t.path}/say", json={"text": "Hi."}, headers=t.headers)
        assert say.status_code == 204
        await until(lambda: t.of("say") == [{"type": "say", "text": "Hi."}])
        await socket.send('{"type": "start", "sample_rate": 24000}')
        await until(lambda: len(t.microphone) > 16_000)
        await socket.send('{"type": "caption", "text": "A tone."}')
        await socket.send(tone(24_000, 1.0))
        await socket.send('{"type": "mark", "name": "middle"}')
        await socket.send(tone(24_000, 9.0))
        await until(lambda: bool(t.of("mark")))
        assert t.kinds()[-2:] == ["playback_started", "mark"]
        assert "bot-transcription" in t.client.kinds()

        interrupted = await t.http.post(f"{t.path}/interrupt", headers=t.headers)
        assert interrupted.status_code == 204
        await until(lambda: "interrupted" in t.kinds())
        (first,) = t.of("playback_finished")
        assert first["interrupted"] and 900 < first["position_ms"] < 10_000
        await socket.send(tone(24_000, 1.0))  # of the interrupted utterance: dropped
        await socket.send('{"type": "end"}')
        await socket.send('{"type": "start", "sample_rate": 48000}')
        await socket.send(tone(48_000, 1.0))
        await socket.send('{"type": "end"}')
        await until(lambda: len(t.of("playback_finished")) == 2)
        second = t.of("playback_finished")[1]
        assert second["utterance"] == 2 and not second["interrupted"]
        assert second["position_ms"] == pytest.approx(1000, abs=20)

        await socket.send(tone(48_000, 5.0))
        await until(lambda: len(t.of("playback_started")) == 3)
        await socket.send('{"type": "clear"}')
        await until(lambda: len(t.of("playback_finished")) == 3)
        await socket.send(tone(48_000, 3.0))
        await until(lambda: len(t.of("playback_started")) == 4)
        await socket.send('{"type": "user_started_speaking"}')
        await until(lambda: len(t.of("playback_finished")) == 4)
        assert t.client.kinds().count("bot-interrupted") == 3
        assert "user-started-speaking" in t.client.kinds()
        assert await hurried(t) > before, "first words take all passes"


async def test_more_than_a_minute_at_once_is_held_back(server: Server, measure: Measure) -> None:
    second = tone(48_000, 1.0, form="pcm_f32le", channels=2)
    start = {"type": "start", "sample_rate": 48_000, "encoding": "pcm_f32le", "channels": 2}
    async with talk(server) as t, t.agent() as socket:
        await socket.send(json.dumps({**start, "microphone": False}))

        async def send() -> None:
            # 92 MB: a minute of it in the server, and at most 36 MB in the kernel's buffers.
            for _ in range(240):
                await socket.send(second)

        sending = asyncio.create_task(send())
        await asyncio.sleep(5)
        assert not sending.done(), "four minutes do not fit"
        began_s = time.monotonic()
        interrupted = await t.http.post(f"{t.path}/interrupt", headers=t.headers)
        assert interrupted.status_code == 204
        await until(sending.done, 20)  # what is dropped makes room at once
        measure("dropped_after_s", round(time.monotonic() - began_s, 2))
        await socket.send('{"type": "end"}')
        await socket.send(second)
        await socket.send('{"type": "end"}')
        await until(lambda: len(t.of("playback_finished")) == 2)
        assert [f["interrupted"] for f in t.of("playback_finished")] == [True, False]
        assert t.of("playback_finished")[1]["position_ms"] == pytest.approx(1000, abs=20)


async def test_slow_sound_is_heard_whole_with_pauses(server: Server) -> None:
    async with talk(server) as t, t.agent() as socket:
        await socket.send('{"type": "start", "sample_rate": 16000}')
        for _ in range(3):
            await socket.send(tone(16_000, 0.5))
            await asyncio.sleep(1.0)
        await socket.send('{"type": "end"}')
        await until(lambda: bool(t.of("playback_finished")))
        assert t.kinds().count("playback_started") == 1
        # A beep of the test picture in the last chunk is taken for a part of the voice.
        assert 1480 < t.of("playback_finished")[0]["position_ms"] < 1670


async def closed(url: str, first: str = "", **options: Any) -> tuple[int | None, dict[str, Any]]:
    async with websockets.connect(url, **options) as socket:
        if first:
            await socket.send(first)
        told: dict[str, Any] = {}
        with suppress(websockets.ConnectionClosed):
            async for frame in socket:
                if isinstance(frame, str):
                    told = json.loads(frame)
    return socket.close_code, told


async def test_who_may_open_a_socket_and_how_it_ends(server: Server) -> None:
    async with talk(server) as t:
        nowhere = t.url.replace(t.path.rpartition("/")[2], "0" * 32)
        code, told = await closed(nowhere, additional_headers=t.headers)
        assert code == 4404 and told["type"] == "error"
        for options in (
            {"first": '{"type": "auth", "token": "wrong"}'},
            {"first": "nonsense"},
            {"additional_headers": {"Authorization": "Bearer wrong"}},
        ):
            assert (await closed(t.url, **options))[0] == 4401
        with pytest.raises(websockets.InvalidStatus, match="403"):
            await closed(t.url, origin="https://elsewhere.example")

        protocols = [Subprotocol("characters-audio"), Subprotocol(f"bearer.{t.secret}")]
        async with websockets.connect(t.url, subprotocols=protocols) as socket:
            assert socket.subprotocol == "characters-audio"
            assert json.loads(await socket.recv())["type"] == "ready"
            code, told = await closed(t.url, additional_headers=t.headers)
            assert code == 4409 and "already" in told["message"]
            await socket.send('{"type": "start", "sample_rate": 16000}')
            await socket.send(tone(16_000, 1.0))
        async with websockets.connect(t.url) as socket:
            await socket.send(json.dumps({"type": "auth", "token": t.secret}))
            finished: dict[str, Any] = {}
            while finished.get("type") != "playback_finished":  # the lost socket's utterance
                frame = await socket.recv()
                finished = json.loads(frame) if isinstance(frame, str) else {}
            assert finished["utterance"] == 1 and not finished["interrupted"]
            async with websockets.connect(f"{t.url}?takeover=1", additional_headers=t.headers):
                with pytest.raises(websockets.ConnectionClosed) as replaced:
                    await socket.recv()
                assert replaced.value.rcvd is not None and replaced.value.rcvd.code == 4409
        async with t.agent() as socket:
            await socket.send(bytes(1024 * 1024 + 1))
            await socket.wait_closed()
            assert socket.close_code == 1009
        count = len(t.client.pictures)
        await until(lambda: len(t.client.pictures) > count + 24)  # the session goes on
        say = await t.http.post(f"{t.path}/say", json={"text": "Hi."}, headers=t.headers)
        assert say.status_code == 409 and "no voice agent" in say.text
        async with websockets.connect(t.url, additional_headers=t.headers) as socket:
            await t.http.delete(t.path, headers=t.headers)
            with pytest.raises(websockets.ConnectionClosed) as over:
                await socket.recv()
                await socket.recv()
            assert over.value.rcvd is not None and over.value.rcvd.code == 1000
            assert over.value.rcvd.reason == "ended by the user"
        assert (await closed(t.url, additional_headers=t.headers))[0] == 4410


async def test_a_livekit_agents_voice(server: Server) -> None:
    pytest.importorskip("livekit.agents", reason="the livekit extra is not installed")
    from livekit import rtc

    from scripts.examples.livekit_avatar import CharacterAvatar

    async with talk(server) as t:
        avatar = CharacterAvatar(t.url, t.secret)
        started: list[object] = []
        finished: list[tuple[float, bool]] = []
        avatar.on("playback_started", started.append)
        avatar.on(
            "playback_finished", lambda e: finished.append((e.playback_position, e.interrupted))
        )
        running = asyncio.create_task(avatar.run())

        async def push(seconds: float, rate: int = 24_000) -> None:
            for _ in range(round(seconds * 10)):
                await avatar.capture_frame(rtc.AudioFrame(tone(rate, 0.1), rate, 1, rate // 10))

        heard = await asyncio.wait_for(anext(avatar.microphone), 15)
        assert (heard.sample_rate, heard.samples_per_channel) == (16_000, 320)
        await push(1.0)
        avatar.flush()
        event = await asyncio.wait_for(avatar.wait_for_playout(), 15)
        assert event.playback_position == pytest.approx(1.0, abs=0.02) and not event.interrupted
        await push(20.0, 16_000)
        await until(lambda: len(started) == 2)
        await push(100.0, 16_000)  # more than the server takes
        avatar.flush()
        await push(1.0)  # a second one, of which nothing has left yet
        avatar.flush()
        avatar.clear_buffer()
        await asyncio.wait_for(avatar.wait_for_playout(), 15)
        assert [interrupted for _, interrupted in finished] == [False, True, True]
        assert 0 < finished[1][0] < 20 and finished[2][0] == 0
        await push(0.5)
        avatar.flush()
        event = await asyncio.wait_for(avatar.wait_for_playout(), 15)
        assert event.playback_position == pytest.approx(0.5, abs=0.02)
        await push(5.0)
        await t.http.delete(t.path, headers=t.headers)
        await asyncio.wait_for(running, 15)
        await asyncio.wait_for(avatar.wait_for_playout(), 15)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_pipecat_pipelines_voice(server: Server) -> None:
    pytest.importorskip("pipecat.pipeline", reason="the pipecat extra is not installed")
    from pipecat.frames.frames import (
        BotStartedSpeakingFrame,
        BotStoppedSpeakingFrame,
        Frame,
        InputAudioRawFrame,
        InterruptionFrame,
        TTSAudioRawFrame,
        TTSStoppedFrame,
    )
    from pipecat.pipeline.pipeline import Pipeline
    from pipecat.pipeline.runner import PipelineRunner
    from pipecat.pipeline.task import PipelineTask
    from pipecat.processors.frame_processor import FrameDirection, FrameProcessor

    from scripts.examples.pipecat_avatar import Character

    class Bot(FrameProcessor):  # type: ignore[misc]
        """In the place of recognition, thought and synthesis."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[type[Frame]] = []

        async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
            await super().process_frame(frame, direction)
            self.seen.append(type(frame))
            await self.push_frame(frame, direction)

        async def speak(self, seconds: float) -> None:
            await self.push_frame(TTSAudioRawFrame(tone(24_000, seconds), 24_000, 1))

    async with talk(server) as t:
        character, bot = Character(t.url, t.secret), Bot()
        task = PipelineTask(Pipeline([character.microphone, bot, character.voice]))
        work = [
            asyncio.create_task(character.run()),
            asyncio.create_task(PipelineRunner(handle_sigint=False).run(task)),
        ]
        try:
            await until(lambda: InputAudioRawFrame in bot.seen)
            await bot.speak(1.0)
            await bot.push_frame(TTSStoppedFrame())
            await until(lambda: BotStoppedSpeakingFrame in bot.seen)
            assert bot.seen.count(BotStartedSpeakingFrame) == 1
            await bot.speak(30.0)
            await until(lambda: bot.seen.count(BotStartedSpeakingFrame) == 2)
            await bot.push_frame(InterruptionFrame())
            await until(lambda: bot.seen.count(BotStoppedSpeakingFrame) == 2)
            assert t.client.kinds().count("bot-interrupted") == 1
        finally:
            await task.cancel()
            await t.http.delete(t.path, headers=t.headers)
            await asyncio.wait_for(asyncio.gather(*work), 15)
