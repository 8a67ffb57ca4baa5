"""A session host for fault tests: speaks the real messages, holds no character, fails on demand.

How it starts is told by FAKE_HOST_START; how it treats a session by the persona's instructions, an
offer's SDP and the words it is asked to say.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

from characters_serve.config import Config
from characters_serve.messages import (
    Answer,
    CloseSession,
    Done,
    EndSoon,
    HostMetrics,
    Interrupt,
    Message,
    Offer,
    OpenSession,
    PictureReport,
    Refused,
    Say,
    SessionState,
)
from characters_serve.processes import AsyncControlLink

UNUSUAL = PictureReport(expression=0.02, least=0.1, familiar=False)


class FakeHost:
    def __init__(self, group_dir: Path) -> None:
        self.config = Config.model_validate_json((group_dir / "config.json").read_text())
        self.link = AsyncControlLink(group_dir, "host")
        self.session: OpenSession | None = None
        self.live = False
        self.opening = False
        self.answering = False
        self.chunks = 0

    async def run(self) -> None:
        start = os.environ.get("FAKE_HOST_START", "ok")
        once = Path(os.environ.get("FAKE_HOST_ONCE", "/nonexistent"))
        if start == "hang":
            await asyncio.sleep(600)
        if start == "crash" or (start == "crash-once" and not once.exists()):
            if start == "crash-once":
                once.touch()
            os._exit(3)
        if start == "failed":
            await self.link.failed("no model on this machine")
            await asyncio.sleep(1)
            return
        weights = self.config.model.weights
        if weights != "builtin" and not Path(weights).exists():
            await self.link.failed(f"model.weights: there is no {weights}", permanent=True)
            await asyncio.sleep(1)
            return
        await self.link.ready({"engine": "fake"})
        metrics = asyncio.create_task(self.report())
        tasks: set[asyncio.Task[None]] = set()
        while True:
            message = await self.link.channel.recv()
            if await self.link.answer(message):
                await asyncio.sleep(0.05)
                break
            # As in the real host, what takes time is not waited for before the next request.
            tasks.add(asyncio.create_task(self.handle(message)))
        metrics.cancel()

    async def handle(self, message: Message) -> None:
        send = self.link.channel.send
        match message:
            case OpenSession(request_id, session_id, image_rgb, persona):
                model = self.config.model
                assert len(image_rgb) == model.width * model.height * 3
                assert self.session is None
                if persona.instructions == "refuse":
                    await send(Refused(request_id, 503, "the model cannot take it"))
                    return
                if persona.instructions == "crash":
                    os._exit(4)
                if persona.instructions == "hang":
                    return
                if self.opening:
                    os._exit(8)
                if persona.instructions == "slow":
                    self.opening = True
                    await asyncio.sleep(0.5)
                    self.opening = False
                self.session = message
                await send(Done(request_id))
                await send(
                    SessionState(session_id, "ready", "", UNUSUAL if message.uploaded else None)
                )
            case Offer(request_id, session_id, sdp, takeover):
                if self.session is None or self.session.session_id != session_id:
                    await send(Refused(request_id, 404, "no such session"))
                elif "refuse" in sdp:
                    await send(Refused(request_id, 400, "the offer has no audio"))
                elif "crash" in sdp:
                    os._exit(5)
                elif "hang" in sdp:
                    return
                elif "slow" in sdp:
                    if self.answering:
                        os._exit(7)
                    self.answering = True
                    await asyncio.sleep(0.1)
                    self.answering = False
                    await send(Answer(request_id, session_id, "v=0\r\nanswer"))
                elif self.live and not takeover:
                    await send(Refused(request_id, 409, "the session is connected already"))
                else:
                    self.live = True
                    await send(Answer(request_id, session_id, "v=0\r\nanswer"))
                    await send(SessionState(session_id, "live", ""))
            case Say(request_id, session_id, text):
                await send(Done(request_id))
                await asyncio.sleep(0.05)  # for the answer to leave before the fault
                if text == "crash":
                    os._exit(6)
                if text == "freeze":
                    time.sleep(600)
                if text == "end":
                    self.session, self.live = None, False
                    await send(SessionState(session_id, "ended", "maximum duration"))
                if text == "impostor":
                    await send(SessionState("0" * 32, "failed", "not yours"))
            case Interrupt(request_id):
                await send(Done(request_id))
            case EndSoon(request_id, session_id, reason, left_s):
                await send(Done(request_id))
                if self.session is not None and self.session.persona.instructions == "polite":
                    await asyncio.sleep(left_s / 2)
                    self.session, self.live = None, False
                    await send(SessionState(session_id, "ended", reason))
            case CloseSession(request_id, session_id):
                if self.session is None:
                    await send(Refused(request_id, 404, "no such session"))
                elif self.session.persona.instructions == "hang on close":
                    return
                else:
                    if self.session.persona.instructions == "slow close":
                        await asyncio.sleep(0.5)
                    self.session, self.live = None, False
                    await send(SessionState(session_id, "ended", message.reason))
                    await send(Done(request_id))

    async def report(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.chunks += 1
            await self.link.channel.send(
                HostMetrics(
                    {"chunks_total": float(self.chunks)},
                    {"playout_chunks": 2.0},
                    {"step_ms": [62.0], "decode_ms": [31.0]},
                )
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group-dir", type=Path, required=True)
    asyncio.run(FakeHost(parser.parse_args().group_dir).run())


if __name__ == "__main__":
    main()
