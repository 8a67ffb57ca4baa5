"""In: one answering function. Out: a live OpenAI-compatible chat endpoint on a free port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

Answer = Callable[[Request], Awaitable[Response]]


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


@asynccontextmanager
async def chat_server(answer: Answer) -> AsyncIterator[str]:
    """Yields the base URL of a live server whose chat endpoint is `answer`."""
    app = FastAPI()
    app.post("/v1/chat/completions", response_model=None)(answer)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="none")
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.force_exit = True
        server.should_exit = True
        await serving
