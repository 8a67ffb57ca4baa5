"""In: HTTP. Out: sessions, their state, the page. Touches no media and no tensors.

One FastAPI app for each configuration; its lifespan owns the fleet. Bodies are read by hand, so
that limits hold while they stream and every refusal is problem+json with the field's name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.websockets import WebSocket

from characters_serve import metrics as prometheus
from characters_serve.config import Config
from characters_serve.fleet.base import LeaseLost
from characters_serve.fleet.group import HOST_MODULE, GroupGone, RequestRefused
from characters_serve.fleet.queue import POLL_S
from characters_serve.gateway import description
from characters_serve.gateway.auth import bearer
from characters_serve.gateway.bodies import (
    MAX_COMMAND_BYTES,
    OfferBody,
    SayBody,
    media_type_of,
    parse,
    read_create,
    speakable,
    text_of,
    ufrags,
    unsupported,
)
from characters_serve.gateway.characters import image_bytes
from characters_serve.gateway.edge import Edge
from characters_serve.gateway.external import serve_external
from characters_serve.gateway.limits import read_body
from characters_serve.gateway.problems import Problem, answer_problem
from characters_serve.gateway.service import LEAVING, Gateway
from characters_serve.gateway.sessions import Session, SessionOver

log = logging.getLogger(__name__)

WEB = Path(__file__).parent.parent / "web"
MAX_SDP_BYTES = 64 * 1024
OFFER_WAIT_S = 8.0
ACCEPT_POST = "application/sdp, application/json"
PATCH_TYPES = ("application/trickle-ice-sdpfrag", "application/sdp", "application/json")


def create_app(
    config: Config,
    *,
    host_module: str = HOST_MODULE,
    on_ready: Callable[[dict[str, str]], None] = lambda _details: None,
    on_misconfigured: Callable[[str], None] = lambda reason: log.error("%s", reason),
) -> FastAPI:
    """on_misconfigured: no group can ever start, and why; called for each of them."""
    gateway = Gateway(config, host_module, on_ready, on_misconfigured)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        gateway.fleet.start()
        gateway.sessions.start()
        try:
            yield
        finally:
            gateway.fleet.pool.drain()
            await gateway.sessions.stop(LEAVING)
            await gateway.fleet.stop(LEAVING)

    app = FastAPI(
        title=description.TITLE,
        summary=description.SUMMARY,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.gateway = gateway
    app.add_middleware(
        Edge, origins=gateway.origins, requests=gateway.requests, metrics=gateway.metrics
    )
    _add_error_handlers(app)
    _add_session_routes(app, gateway)
    _add_connection_routes(app, gateway)
    _add_command_routes(app, gateway)
    _add_public_routes(app, gateway)
    description.add_schemes(app.openapi())
    return app


def _video(config: Config) -> dict[str, int]:
    """The pictures that every session of this server is made of."""
    model = config.model
    return {"width": model.width, "height": model.height, "fps": model.fps}


def _add_session_routes(app: FastAPI, gateway: Gateway) -> None:
    config = gateway.config

    @app.post("/v1/sessions", **description.CREATE)
    async def create_session(request: Request) -> Response:
        key = gateway.authority.creator(request.headers)
        gateway.check_rate(key, request.client.host if request.client else None)
        body, image = await read_create(request, config.server.max_image_bytes)
        wanted = await gateway.requested(body, image, key, request.state.trace_id)
        session = await gateway.create(wanted, key)
        secret = gateway.client_secret(session)
        answer = {
            **_describe(gateway, session),
            "client_secret": {"value": secret.value, "expires_at": secret.expires_at},
            "ice_servers": gateway.turn.ice_servers(time.time(), gateway.lifetime_s(session)),
            "idle_timeout_s": config.session.idle_timeout_s,
            "video": _video(config),
        }
        location = f"/v1/sessions/{session.session_id}"
        return JSONResponse(answer, 201, {"Location": location, **_state_headers(session)})

    @app.get("/v1/sessions/{session_id}", **description.SESSION)
    async def get_session(session_id: str, request: Request) -> Response:
        session = gateway.session(session_id, bearer(request.headers))
        return JSONResponse(_describe(gateway, session), headers=_state_headers(session))

    @app.delete("/v1/sessions/{session_id}", **description.END)
    @app.delete("/v1/sessions/{session_id}/webrtc", **description.END)
    async def end_session(session_id: str, request: Request) -> Response:
        gateway.end(session_id, bearer(request.headers))
        return Response(status_code=204)

    @app.post("/v1/sessions/{session_id}/end", **description.BEACON)
    async def end_by_beacon(session_id: str, request: Request) -> Response:
        raw = await read_body(request, MAX_COMMAND_BYTES)
        gateway.end(session_id, bearer(request.headers) or text_of(raw).strip() or None)
        return Response(status_code=204)


def _add_connection_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/sessions/{session_id}/webrtc", **description.OFFER)
    async def post_offer(session_id: str, request: Request) -> Response:
        session = gateway.session_to_connect(session_id, bearer(request.headers))
        media_type = media_type_of(request)
        if media_type not in ("application/sdp", "application/json"):
            raise unsupported(ACCEPT_POST)
        raw = await read_body(request, MAX_SDP_BYTES, field="sdp")
        offer = parse(OfferBody, raw).sdp if media_type == "application/json" else text_of(raw)
        if not offer.startswith("v=0"):
            raise Problem(400, "this is not an SDP offer", field="sdp")
        takeover = request.query_params.get("takeover", "") in ("1", "true")
        answer = await gateway.sessions.offer(session, offer, takeover, OFFER_WAIT_S)
        session.ufrags = ufrags(offer)
        location = f"/v1/sessions/{session_id}/webrtc"
        resume = gateway.resume_token(session).value
        headers = {"Location": location, "Cache-Control": "no-store", "Resume-Token": resume}
        if media_type == "application/sdp":
            return Response(answer, 201, headers, "application/sdp")
        body = {"sdp": answer, "type": "answer", "location": location, "resume_token": resume}
        return JSONResponse(body, 201, headers)

    @app.patch("/v1/sessions/{session_id}/webrtc", **description.CANDIDATES)
    async def patch_candidates(session_id: str, request: Request) -> Response:
        session = gateway.session(session_id, bearer(request.headers))
        gateway.sessions.check_open(session)
        if media_type_of(request) not in PATCH_TYPES:
            raise unsupported(", ".join(PATCH_TYPES), header="Accept-Patch")
        fragment = text_of(await read_body(request, MAX_SDP_BYTES, field="sdp"))
        if not ufrags(fragment) <= session.ufrags:
            raise Problem(422, "restart ICE with a new offer and ?takeover=1", field="sdp")
        return Response(status_code=204)

    @app.websocket("/v1/sessions/{session_id}/audio")
    async def external_audio(websocket: WebSocket, session_id: str) -> None:
        await serve_external(gateway, websocket, session_id, OFFER_WAIT_S)


def _add_command_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/sessions/{session_id}/interrupt", **description.INTERRUPT)
    async def interrupt(session_id: str, request: Request) -> Response:
        session = gateway.session_to_command(session_id, bearer(request.headers))
        await gateway.sessions.interrupt(session)
        return Response(status_code=204)

    @app.post("/v1/sessions/{session_id}/say", **description.SAY)
    async def say(session_id: str, request: Request) -> Response:
        session = gateway.session_to_command(session_id, bearer(request.headers))
        body = parse(SayBody, await read_body(request, MAX_COMMAND_BYTES, field="text"))
        await gateway.sessions.say(session, speakable(body.text))
        return Response(status_code=204)


def _add_public_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/characters", **description.CHARACTERS)
    async def list_characters() -> Response:
        return JSONResponse(
            {
                "characters": [
                    {
                        "id": character.character_id,
                        "name": character.persona.name,
                        "style": character.style,
                        "blurb": character.blurb,
                        "image": f"/v1/characters/{character.character_id}/image.png",
                    }
                    for character in gateway.characters.values()
                ],
                "video": _video(gateway.config),
            }
        )

    @app.get("/v1/characters/{character_id}/image.png", **description.PICTURE)
    async def character_image(character_id: str) -> Response:
        character = gateway.characters.get(character_id)
        if character is None:
            raise Problem(404, "no such character")
        headers = {"Cache-Control": "public, max-age=3600"}
        return Response(image_bytes(character.image_path), 200, headers, "image/png")

    @app.get("/healthz/live", **description.ALIVE)
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @app.get("/healthz/ready", **description.READY)
    async def ready() -> Response:
        pool = gateway.fleet.pool
        counts = pool.counts()
        status = "draining" if pool.draining else "ready" if pool.serving else "starting"
        body: dict[str, Any] = {"status": status, "free": counts["ready"], "groups": counts}
        if pool.reasons():
            body["reasons"] = pool.reasons()
        if pool.degraded():
            body["degraded"] = pool.degraded()
        return JSONResponse(body, 200 if pool.serving else 503)

    @app.get("/metrics", **description.METRICS)
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), media_type=prometheus.CONTENT_TYPE)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return _web_file("index.html")

    @app.api_route("/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def web_file(name: str) -> Response:
        return _web_file(name)


def _add_error_handlers(app: FastAPI) -> None:
    async def http_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return Problem(error.status_code, str(error.detail), headers=error.headers).response()

    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        return Problem(error.status, error.reason).response()

    async def over(_request: Request, error: Exception) -> Response:
        return Problem(410, f"the session has ended: {error}").response()

    async def gone(_request: Request, error: Exception) -> Response:
        return Problem(504, f"the session's host did not answer: {error}").response()

    app.add_exception_handler(Problem, answer_problem)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestRefused, refused)
    app.add_exception_handler(SessionOver, over)
    app.add_exception_handler(LeaseLost, over)
    app.add_exception_handler(GroupGone, gone)


def _describe(gateway: Gateway, session: Session) -> dict[str, Any]:
    description = {
        "id": session.session_id,
        "status": session.state,
        "reason": session.reason,
        "character": session.character,
        "name": session.name,
        "max_duration_s": session.max_duration_s,
        "picture": None if session.picture is None else asdict(session.picture),
    }
    position = gateway.sessions.place_in_queue(session)
    return description if position is None else {**description, "queue_position": position}


def _state_headers(session: Session) -> dict[str, str]:
    headers = {"Cache-Control": "no-store"}
    return {**headers, "Retry-After": f"{POLL_S:g}"} if session.state == "queued" else headers


def _web_file(name: str) -> Response:
    path = WEB / name
    if path.parent != WEB or name.startswith(".") or not path.is_file():
        raise Problem(404, "there is nothing here")
    return FileResponse(path)
