"""A character as the face of a LiveKit agent: its audio output, and the user's microphone.

    pip install livekit-agents

    avatar = CharacterAvatar(f"{server}/v1/sessions/{id}/audio", secret)   # ws:// or wss://
    session = AgentSession(stt=..., llm=..., tts=...)
    session.input.audio = avatar.microphone
    session.output.audio = avatar
    await asyncio.gather(avatar.run(), session.start(agent=agent))

No LiveKit room carries the media: the user's browser talks to the character's server, started with
`--set agent.kind=external`. Pushed audio is spoken, `clear_buffer` stops it at once, and playback
is reported as the user hears it, with the position at which it was interrupted.
"""

from __future__ import annotations

import asyncio
import time

from livekit import rtc
from livekit.agents.voice.io import AudioInput, AudioOutput, AudioOutputCapabilities

from scripts.examples.character_socket import MICROPHONE_RATE, CharacterSocket, Event

# Five seconds: an agent that does not listen yet needs none of what was said before.
_MAX_WAITING = 250


class CharacterMicrophone(AudioInput):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(label="character")
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)

    def put(self, pcm_16k: bytes) -> None:
        if self._pieces.full():
            self._pieces.get_nowait()
        self._pieces.put_nowait(pcm_16k)

    async def __anext__(self) -> rtc.AudioFrame:
        pcm = await self._pieces.get()
        return rtc.AudioFrame(pcm, MICROPHONE_RATE, 1, len(pcm) // 2)


class CharacterAvatar(AudioOutput):  # type: ignore[misc]
    def __init__(self, url: str, secret: str) -> None:
        super().__init__(label="character", capabilities=AudioOutputCapabilities(pause=False))
        self.microphone = CharacterMicrophone()
        self._socket = CharacterSocket(url, secret, self._on_event, self.microphone.put)
        self._finished = 0

    async def run(self) -> None:
        """Until the session is over; nobody waits for what was not spoken by then."""
        try:
            await self._socket.run()
        finally:
            while self._finished < self.captured_playout_segments:
                self._finish(0.0, interrupted=True)

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        self._socket.speak(bytes(frame.data), frame.sample_rate, frame.num_channels)

    def flush(self) -> None:
        super().flush()
        self._socket.end()

    def clear_buffer(self) -> None:
        self._socket.clear()

    def _on_event(self, event: Event) -> None:
        match event["type"]:
            case "playback_started":
                self.on_playback_started(created_at=time.time())
            case "playback_finished":
                self._finish(event["position_ms"] / 1000, interrupted=event["interrupted"])

    def _finish(self, position_s: float, *, interrupted: bool) -> None:
        self._finished += 1
        self.on_playback_finished(playback_position=position_s, interrupted=interrupted)
