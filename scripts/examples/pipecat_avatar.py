"""A character as both ends of a Pipecat pipeline: the user's microphone, and the voice with a face.

    pip install pipecat-ai

    character = Character(f"{server}/v1/sessions/{id}/audio", secret)      # ws:// or wss://
    pipeline = Pipeline([character.microphone, stt, ..., llm, tts, character.voice, ...])
    await asyncio.gather(character.run(), PipelineRunner().run(PipelineTask(pipeline)))

The user's browser talks to the character's server, started with `--set agent.kind=external`; no
other transport is needed. What the TTS makes is spoken as fast as it comes and heard at its own
pace; an interruption stops it at once; the pipeline learns when the user really hears the bot.
"""

from __future__ import annotations

import asyncio

from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    StartFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
)
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor

from scripts.examples.character_socket import MICROPHONE_RATE, CharacterSocket, Event


class CharacterMicrophone(FrameProcessor):  # type: ignore[misc]
    """First in the pipeline; what the user says before it has started is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.started = False

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        self.started |= isinstance(frame, StartFrame)
        await self.push_frame(frame, direction)


class CharacterVoice(FrameProcessor):  # type: ignore[misc]
    """Behind the TTS: takes its sound out of the pipeline, lets everything else pass."""

    def __init__(self, socket: CharacterSocket) -> None:
        super().__init__()
        self._socket = socket

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self._socket.speak(frame.audio, frame.sample_rate, frame.num_channels)
            return
        if isinstance(frame, TTSStoppedFrame):
            self._socket.end()
        elif isinstance(frame, InterruptionFrame):
            self._socket.clear()
        await self.push_frame(frame, direction)


class Character:
    def __init__(self, url: str, secret: str) -> None:
        self._socket = CharacterSocket(url, secret, self._on_event, self._on_microphone)
        self._frames: asyncio.Queue[tuple[FrameProcessor, Frame, FrameDirection]] = asyncio.Queue()
        self.microphone = CharacterMicrophone()
        self.voice = CharacterVoice(self._socket)

    async def run(self) -> None:
        """Until the character's session is over."""
        pump = asyncio.create_task(self._pump())
        try:
            await self._socket.run()
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _pump(self) -> None:
        """Into the pipeline, in the order of arrival."""
        while True:
            processor, frame, direction = await self._frames.get()
            await processor.push_frame(frame, direction)

    def _on_microphone(self, pcm_16k: bytes) -> None:
        if self.microphone.started:
            frame = InputAudioRawFrame(audio=pcm_16k, sample_rate=MICROPHONE_RATE, num_channels=1)
            self._frames.put_nowait((self.microphone, frame, FrameDirection.DOWNSTREAM))

    def _on_event(self, event: Event) -> None:
        frame: type[Frame]
        match event["type"]:
            case "playback_started":
                frame = BotStartedSpeakingFrame
            case "playback_finished":
                frame = BotStoppedSpeakingFrame
            case _:
                return
        for direction in (FrameDirection.UPSTREAM, FrameDirection.DOWNSTREAM):
            self._frames.put_nowait((self.voice, frame(), direction))
