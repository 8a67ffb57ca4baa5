"""In: every request, before any route. Out: rates, origins, CORS, headers, traces, counts."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from characters_serve.gateway.auth import Origins
from characters_serve.gateway.limits import RateLimiter, address_key
from characters_serve.gateway.problems import Problem, busy
from characters_serve.gateway.trace_context import HEADER, trace_id_of, traceresponse
from characters_serve.metrics import Metrics

log = logging.getLogger(__name__)

_BUG = Problem(500, "an error of the server; its log has the details")
_CSP = (
    "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
    "worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": _CSP,
    "Permissions-Policy": "microphone=(self), camera=()",
}
# A page of any origin may import the client; the API then decides whom it serves.
_CLIENT = "/client.js"
_METHODS = frozenset(("GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS", "PUT"))
_EXPOSED = "Location, Resume-Token, Retry-After, traceresponse"
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, traceparent, tracestate",
    "Access-Control-Max-Age": "600",
    "Accept-Post": "application/sdp, application/json",
}


class Edge:
    """Pure ASGI, so that bodies stream through it untouched."""

    def __init__(
        self, app: ASGIApp, origins: Origins, requests: RateLimiter, metrics: Metrics
    ) -> None:
        self._app = app
        self._origins = origins
        self._requests = requests
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        status, answered = 500, False
        allowed_origin: str | None = None
        trace_id = trace_id_of(Headers(scope=scope).getlist(HEADER))
        scope.setdefault("state", {})["trace_id"] = trace_id

        async def send_with_headers(message: Message) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = message["status"], True
                _add_headers(MutableHeaders(scope=message), trace_id, allowed_origin)
            await send(message)

        try:
            if scope["path"].startswith("/v1/"):
                allowed_origin = self._origins.check(Headers(scope=scope))
                self._check_rate(scope)
            elif scope["path"] == _CLIENT:
                allowed_origin = "*"
            if scope["path"].startswith("/v1/") and scope["method"] == "OPTIONS":
                await Response(None, 204, _PREFLIGHT)(scope, receive, send_with_headers)
            else:
                await self._app(scope, receive, send_with_headers)
        except Problem as problem:
            await problem.response()(scope, receive, send_with_headers)
        except Exception:
            path = getattr(scope.get("route"), "path", "a request")
            log.exception("%s failed", path, extra={"trace_id": trace_id})
            if answered:
                raise
            await _BUG.response()(scope, receive, send_with_headers)
        finally:
            # The template, never the path: an id must not become a label.
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.http_requests.labels(method, route, str(status)).inc()
            self._metrics.http_seconds.labels(route).observe(time.monotonic() - started_s)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts as a request; refused as gateway/external.py refuses."""
        try:
            self._check_rate(scope)
        except Problem as problem:
            await send({"type": "websocket.accept"})
            code = 4000 + problem.status
            await send({"type": "websocket.close", "code": code, "reason": problem.detail})
        else:
            await self._app(scope, receive, send)

    def _check_rate(self, scope: Scope) -> None:
        address = address_key(scope["client"][0] if scope.get("client") else None)
        wait_s = self._requests.retry_after_s(address, time.monotonic())
        if wait_s is not None:
            raise busy(429, "too many requests from this address", wait_s)


def _add_headers(headers: MutableHeaders, trace_id: str, allowed_origin: str | None) -> None:
    for name, value in _ALWAYS.items():
        headers.setdefault(name, value)
    headers.setdefault("Cache-Control", "no-cache")
    headers.add_vary_header("Origin")
    headers["traceresponse"] = traceresponse(trace_id)
    if allowed_origin is not None:
        headers["Access-Control-Allow-Origin"] = allowed_origin
        headers["Access-Control-Expose-Headers"] = _EXPOSED
