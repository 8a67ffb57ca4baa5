"""What the session tests share: a browser made of aiortc, and the parent of a real host process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.contrib.media import MediaBlackhole
from aiortc.mediastreams import AudioStreamTrack, MediaStreamError

from characters_serve.config import Config
from characters_serve.messages import (
    Answer,
    CloseSession,
    Done,
    HostMetrics,
    Message,
    Offer,
    OpenSession,
    Persona,
    Refused,
    SessionState,
)
from characters_serve.processes import ChildProcess
from tests.waiting import until

PERSONA = Persona("Ada", "Hello there.", {}, [], "")


class HandClock:
    """Stands in for a module's `time`: it moves when a test moves it."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s


def ping(number: int) -> str:
    return json.dumps({"t": "ping", "id": number, "c": 0.0})


class Browser:
    """Offers what a page offers, and keeps what it receives."""

    def __init__(self, *, microphone: bool = True) -> None:
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.pictures: list[av.VideoFrame] = []
        self.sounds: list[av.AudioFrame] = []
        self.events: list[dict[str, Any]] = []
        self.pongs: list[dict[str, Any]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.channel = self.pc.createDataChannel("events")
        self.probe = self.pc.createDataChannel("probe", ordered=False, maxRetransmits=0)
        self.channel.on("message", lambda text: self.events.append(json.loads(text)))
        self.probe.on("message", lambda text: self.pongs.append(json.loads(text)))
        if microphone:
            self.pc.addTrack(AudioStreamTrack())
        else:
            self.pc.addTransceiver("audio", direction="recvonly")
        self.pc.addTransceiver("video", direction="recvonly")
        self.pc.on("track", self._receive)

    async def offer(self) -> str:
        await self.pc.setLocalDescription(await self.pc.createOffer())
        return self.pc.localDescription.sdp

    async def accept(self, sdp: str) -> None:
        await self.pc.setRemoteDescription(RTCSessionDescription(sdp, "answer"))

    def keep_beating(self) -> None:
        """The page's heartbeat, once a second until it is closed."""

        async def beat() -> None:
            while True:
                if self.probe.readyState == "open":
                    self.probe.send(ping(1))
                await asyncio.sleep(1.0)

        self._tasks.append(asyncio.create_task(beat()))

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.pc.close()

    def _receive(self, track: Any) -> None:
        kept = self.pictures if track.kind == "video" else self.sounds
        self._tasks.append(asyncio.create_task(self._keep(track, kept)))

    async def _keep(self, track: Any, kept: list[Any]) -> None:
        with contextlib.suppress(MediaStreamError):
            while True:
                kept.append(await track.recv())


class HostParent:
    """The gateway's side of one real session host process."""

    def __init__(self, group_dir: Path, config: Config) -> None:
        (group_dir / "config.json").write_text(config.model_dump_json())
        self.config = config
        self.states: list[SessionState] = []
        self.metrics: list[HostMetrics] = []
        self.others: list[Message] = []
        self.exits: list[str] = []
        self.details: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self.child = ChildProcess(
            "host",
            "characters_serve.session.host",
            group_dir,
            on_message=self._receive,
            on_exit=self._exit,
            ping_timeout_s=config.fleet.ping_timeout_s,
        )

    async def start(self) -> None:
        self.details = (await self.child.start(120)).details

    async def stop(self) -> None:
        await self.child.stop("the test is over", 10)

    async def ask(self, make: Callable[[int], Message]) -> Message:
        number = next(self._numbers)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        await self.child.send(make(number))
        return await asyncio.wait_for(future, 30)

    async def open(
        self, session_id: str, max_duration_s: float = 600.0, idle_timeout_s: float = 600.0
    ) -> Message:
        model = self.config.model
        image = np.full((model.height, model.width, 3), 128, np.uint8).tobytes()
        return await self.ask(
            lambda number: OpenSession(
                number, session_id, image, PERSONA, 1, max_duration_s, idle_timeout_s
            )
        )

    async def connect(self, session_id: str, browser: Browser, *, takeover: bool = False) -> None:
        sdp = await browser.offer()
        answer = await self.ask(lambda number: Offer(number, session_id, sdp, takeover))
        assert isinstance(answer, Answer), answer
        await browser.accept(answer.sdp)

    async def reach_second_session(self) -> Browser:
        """The client of "two", which plays, as "one" did before it was closed."""
        for session_id in ("one", "two"):
            assert isinstance(await self.open(session_id), Done)
            browser = Browser()
            await self.connect(session_id, browser)
            await until(lambda seen=browser: len(seen.pictures) > 8 and len(seen.sounds) > 8)  # type: ignore[misc]
            if session_id == "one":
                assert isinstance(await self.close(session_id), Done)
                await browser.close()
        return browser

    async def close(self, session_id: str) -> Message:
        return await self.ask(lambda number: CloseSession(number, session_id, "closed by a test"))

    def state_names(self, session_id: str) -> list[str]:
        return [state.state for state in self.states if state.session_id == session_id]

    async def _receive(self, message: Message) -> None:
        match message:
            case Done(number) | Refused(number) | Answer(number):
                self._answers.pop(number).set_result(message)
            case SessionState():
                self.states.append(message)
            case HostMetrics():
                self.metrics.append(message)
            case _:
                self.others.append(message)

    async def _exit(self, reason: str) -> None:
        self.exits.append(reason)


__all__ = ["PERSONA", "Browser", "HandClock", "HostParent", "MediaBlackhole", "ping"]
