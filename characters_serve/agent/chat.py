"""In: the conversation. Out: sentences of a reply as they stream in. Knows no audio, no session.

Speaks the OpenAI-compatible `POST {base_url}/chat/completions` with server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import httpx

from characters_serve.agent.history import Line
from characters_serve.agent.sentences import SentenceSplitter
from characters_serve.config import ChatConfig, secret
from characters_serve.messages import Persona

log = logging.getLogger(__name__)

HISTORY_LINES = 24
_MAX_TOKENS = 300


class ChatFailed(RuntimeError):
    """The endpoint did not answer as it should; the message holds no conversation and no key."""


class Chat:
    """One session's chat endpoint. `reply` may be cancelled at any time: the request then ends."""

    def __init__(
        self,
        config: ChatConfig,
        persona: Persona,
        environment: Mapping[str, str],
        language: str = "en",
    ) -> None:
        assert config.base_url is not None
        self.description = f"{config.model} at {httpx.URL(config.base_url).host}"
        self._config = config
        self._url = f"{config.base_url.rstrip('/')}/chat/completions"
        self._system = system_prompt(persona)
        if language != "en":
            self._system += f"\nSpeak the language with the ISO 639 code {language!r}."
        key = secret(config.api_key_env, environment)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(config.timeout_s),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def reply(
        self, lines: list[Line], on_first_token: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[str, None]:
        """Each silence of the endpoint is limited by the timeout, not the whole reply."""
        body = {
            "model": self._config.model,
            "stream": True,
            "max_tokens": _MAX_TOKENS,
            "messages": [{"role": "system", "content": self._system}, *map(_as_message, lines)],
        }
        splitter = SentenceSplitter()
        first = True
        try:
            async with self._client.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    raise ChatFailed(f"the chat endpoint answered {response.status_code}")
                async for piece in self._pieces(response):
                    if first:
                        first = False
                        on_first_token()
                    for sentence in splitter.feed(piece):
                        yield sentence
        except (TimeoutError, httpx.TimeoutException):
            raise ChatFailed(
                f"the chat endpoint was silent for {self._config.timeout_s:g} s"
            ) from None
        except httpx.HTTPError as error:
            raise ChatFailed(f"the chat endpoint failed: {type(error).__name__}") from None
        for sentence in splitter.flush():
            yield sentence

    async def _pieces(self, response: httpx.Response) -> AsyncIterator[str]:
        lines = response.aiter_lines()
        while True:
            # Keep-alive comments must not keep a dead reply alive, hence a limit of our own.
            async with asyncio.timeout(self._config.timeout_s):
                piece = await _next_piece(lines)
            if piece is None:
                return
            yield piece

    async def close(self) -> None:
        await self._client.aclose()


async def _next_piece(lines: AsyncIterator[str]) -> str | None:
    """The next text of the stream; None at its end."""
    async for line in lines:
        field, _, data = line.partition(":")
        if field != "data":
            continue
        data = data.strip()
        if data == "[DONE]":
            return None
        text = _delta(data)
        if text:
            return text
    return None


def _delta(data: str) -> str:
    try:
        event: Any = json.loads(data)
    except ValueError:
        raise ChatFailed("the chat endpoint sent an event that is not JSON") from None
    if not isinstance(event, dict) or "error" in event:
        raise ChatFailed("the chat endpoint reported an error in its stream")
    choices = event.get("choices") or [{}]
    text = (choices[0].get("delta") or {}).get("content")
    return text if isinstance(text, str) else ""


def _as_message(line: Line) -> dict[str, str]:
    return {"role": "user" if line.role == "user" else "assistant", "content": line.text}


def system_prompt(persona: Persona) -> str:
    parts = [
        f"You are {persona.name}, a character who talks with one person by voice.",
        "Answer in one to three short spoken sentences. No lists, no markup, no emoji.",
        "The person's words come from speech recognition and may be misheard: guess kindly.",
    ]
    if persona.instructions:
        parts.append(persona.instructions)
    if persona.facts:
        facts = "; ".join(
            f"{key.replace('_', ' ')}: {value}" for key, value in persona.facts.items()
        )
        parts.append(f"Facts about you: {facts}.")
    if persona.likes:
        parts.append(f"You like {', '.join(persona.likes)}.")
    return "\n".join(parts)
