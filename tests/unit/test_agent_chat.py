"""The chat client against a real HTTP server that speaks the protocol, well and badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from characters_serve.agent.chat import Chat, ChatFailed
from characters_serve.agent.history import Line
from characters_serve.config import ChatConfig
from characters_serve.messages import Persona
from tests.chat_server import Answer, chat_server, event

PERSONA = Persona("Mira", "", {"home": "a lighthouse"}, ["tea"], "Warm and calm.")
LINES = [Line("user", "hello"), Line("character", "Good day."), Line("user", "who are you")]


async def sentences(answer: Answer, timeout_s: float = 2.0) -> list[str]:
    async with chat_server(answer) as base_url:
        chat = Chat(ChatConfig(base_url=base_url, timeout_s=timeout_s), PERSONA, {})
        try:
            return [sentence async for sentence in chat.reply(LINES)]
        finally:
            await chat.close()


async def test_sentences_come_before_the_reply_is_complete() -> None:
    more = asyncio.Event()
    requests: list[tuple[dict[str, object], str | None]] = []

    async def answer(request: Request) -> Response:
        requests.append((await request.json(), request.headers.get("authorization")))

        async def stream() -> AsyncIterator[str]:
            yield ": keep-alive\n\n"
            yield event("I am ")
            yield event("Mira. And")
            await more.wait()
            yield event(" you?")
            yield 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
            yield 'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n'
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async with chat_server(answer) as base_url:
        config = ChatConfig(base_url=base_url, model="m", api_key_env="A_KEY")
        chat = Chat(config, PERSONA, {"A_KEY": "secret\n"})
        heard = []
        async with aclosing(chat.reply(LINES)) as reply:
            async for sentence in reply:
                heard.append(sentence)
                more.set()
        await chat.close()
    assert heard == ["I am Mira.", "And you?"]
    body, authorization = requests[0]
    assert authorization == "Bearer secret"
    assert body["model"] == "m"
    assert body["stream"] is True
    messages = body["messages"]
    assert isinstance(messages, list)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert "Mira" in messages[0]["content"]
    assert "lighthouse" in messages[0]["content"]
    assert "secret" not in chat.description


async def test_an_error_status_is_named_without_its_body() -> None:
    async def answer(_: Request) -> Response:
        return JSONResponse({"error": "key sk-123 is wrong"}, 401)

    with pytest.raises(ChatFailed, match="answered 401") as failure:
        await sentences(answer)
    assert "sk-123" not in str(failure.value)


@pytest.mark.parametrize(
    "first", ["data: {not json\n\n", 'data: {"error": {"message": "overloaded"}}\n\n']
)
async def test_a_broken_stream_is_a_failure(first: str) -> None:
    async def answer(_: Request) -> Response:
        async def stream() -> AsyncIterator[str]:
            yield first

        return StreamingResponse(stream())

    with pytest.raises(ChatFailed):
        await sentences(answer)


@pytest.mark.parametrize("keep_alive", [False, True])
async def test_a_silent_endpoint_is_left_after_the_timeout(keep_alive: bool) -> None:
    async def answer(_: Request) -> Response:
        async def stream() -> AsyncIterator[str]:
            yield event("Well, ")
            while True:
                await asyncio.sleep(0.05)
                if keep_alive:
                    yield ": still here\n\n"

        return StreamingResponse(stream())

    async with asyncio.timeout(5):
        with pytest.raises(ChatFailed, match="silent"):
            await sentences(answer, timeout_s=0.3)


async def test_a_closed_port_is_a_failure() -> None:
    async with chat_server(lambda _: pytest.fail("unreachable")) as base_url:
        pass
    chat = Chat(ChatConfig(base_url=base_url), PERSONA, {})
    with pytest.raises(ChatFailed, match="ConnectError"):
        [sentence async for sentence in chat.reply(LINES)]
    await chat.close()


async def test_a_connection_cut_in_the_middle_is_a_failure() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        body = event("Once upon").encode()
        writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    chat = Chat(ChatConfig(base_url=f"http://127.0.0.1:{port}"), PERSONA, {})
    with pytest.raises(ChatFailed):
        [sentence async for sentence in chat.reply(LINES)]
    await chat.close()
    server.close()
    await server.wait_closed()


async def test_leaving_a_reply_ends_the_request() -> None:
    gone = asyncio.Event()

    async def answer(request: Request) -> Response:
        async def stream() -> AsyncIterator[str]:
            try:
                while True:
                    yield event("Go on. ")
                    await asyncio.sleep(0.01)
            finally:
                gone.set()

        return StreamingResponse(stream())

    async with chat_server(answer) as base_url:
        chat = Chat(ChatConfig(base_url=base_url), PERSONA, {})
        async with aclosing(chat.reply(LINES)) as reply:
            assert await anext(reply) == "Go on."
        await asyncio.wait_for(gone.wait(), 2)
        await chat.close()
