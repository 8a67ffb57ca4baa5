"""In: AgentStart, UserAudio, Playback, ... Out: the agent's events. Knows one session at a time.

The agent's process, on the group's control channel `agent`. Models load once, before Ready: 1.3 s
and 400 MB with pocketsphinx; then 0.04 of a core while nobody speaks and 0.2 while the user does.
It never computes on its event loop for longer than one hop of the VAD.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import zmq.asyncio

from characters_serve import logs
from characters_serve.config import AgentConfig, ConfigError
from characters_serve.messages import (
    AgentEnd,
    AgentInterrupt,
    AgentSay,
    AgentStart,
    Message,
    Playback,
    ToolResult,
    UserAudio,
    UserText,
)
from characters_serve.processes import AsyncControlLink, arguments, read_config

if TYPE_CHECKING:
    from characters_serve.agent.base import Agent
    from characters_serve.agent.local import LocalModels

log = logging.getLogger(__name__)

# The last word (ShutdownAck, Failed) must reach the parent before the process is gone.
_LINGER_MS = 2000


class Worker:
    """Routes the control channel's messages to the one live session's agent."""

    def __init__(
        self, link: AsyncControlLink, config: AgentConfig, models: LocalModels | None
    ) -> None:
        self._link = link
        self._config = config
        self._models = models
        self._agent: Agent | None = None
        self._session_id = ""
        self._outgoing: asyncio.Queue[Message] = asyncio.Queue()

    async def run(self) -> None:
        sender = asyncio.create_task(self._send_all(), name="agent-send")
        try:
            while True:
                message = await self._link.channel.recv()
                if await self._link.answer(message):
                    return
                await self._take(message)
        finally:
            await self._end()
            sender.cancel()

    async def _take(self, message: Message) -> None:
        if isinstance(message, AgentStart):
            await self._start(message)
            return
        if self._agent is None or getattr(message, "session_id", None) != self._session_id:
            log.debug("%s is not for the live session", type(message).__name__)
            return
        match message:
            case UserAudio(pcm_16k=pcm):
                self._agent.hear(pcm)
            case AgentInterrupt(utterance_id=utterance_id):
                self._agent.interrupt(utterance_id)
            case Playback():
                self._agent.playback(message)
            case AgentSay(text=text):
                self._agent.say(text)
            case UserText(text=text):
                self._agent.read(text)
            case ToolResult():
                self._agent.tool_result(message)
            case AgentEnd():
                await self._end()
            case _:
                log.warning("unexpected %s", type(message).__name__)

    async def _start(self, start: AgentStart) -> None:
        await self._end()
        self._session_id = start.session_id
        logs.about_session(start.session_id, start.trace_id)
        self._agent = self._make(start)
        self._outgoing.put_nowait(await self._agent.open())

    def _make(self, start: AgentStart) -> Agent:
        emit = self._outgoing.put_nowait
        if self._models is None:
            from characters_serve.agent.openai_realtime import RealtimeAgent

            return RealtimeAgent(self._config.realtime, start, emit)
        from characters_serve.agent.local import LocalAgent

        return LocalAgent(self._models, self._config, start, emit)

    async def _end(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            await agent.close()

    async def _send_all(self) -> None:
        while True:
            await self._link.channel.send(await self._outgoing.get())


async def serve(group_dir: Path) -> int:
    """Returns the process's exit code."""
    link = AsyncControlLink(group_dir, "agent")
    try:
        everything = read_config(group_dir)
        logs.configure(everything.server.log_format, process=f"{group_dir.name}/agent")
        config = everything.agent
        models: LocalModels | None = None
        if config.kind == "openai_realtime":
            # Before Ready: in a session's start it cost a busy machine seconds without an answer.
            import characters_serve.agent.openai_realtime  # noqa: F401

            details = dict.fromkeys(("listener", "voice"), config.realtime.model)
        else:
            from characters_serve.agent.local import load_models

            models = load_models(config)
            details = {"listener": models.ears.description, "voice": models.voice.description}
        log.info("%(listener)s listens; %(voice)s speaks", details)
        await link.ready(details)
        await Worker(link, config, models).run()
        return 0
    except ConfigError as error:
        await link.failed(str(error), permanent=True)
        return 1
    except Exception as error:
        log.exception("leaving")
        await link.failed(f"{type(error).__name__}: {error}")
        return 1
    finally:
        link.channel.close(_LINGER_MS)
        zmq.asyncio.Context.instance().term()


def main() -> None:
    group_dir = arguments("The local voice agent of one group.").parse_args().group_dir
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sys.exit(asyncio.run(serve(group_dir)))


if __name__ == "__main__":
    main()
