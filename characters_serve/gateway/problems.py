"""In: what went wrong. Out: `application/problem+json` that names the field. Knows no session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """An answer other than success; raised anywhere below a route."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.field = field
        self.headers = dict(headers or {})

    def response(self) -> Response:
        body: dict[str, Any] = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        if self.field is not None:
            body["field"] = self.field
        return Response(json.dumps(body), self.status, self.headers, MEDIA_TYPE)


def busy(status: int, detail: str, retry_after_s: float) -> Problem:
    return Problem(status, detail, headers={"Retry-After": str(max(1, round(retry_after_s)))})


def invalid(error: ValidationError) -> Problem:
    """The first thing wrong with a request body; the value itself is not repeated."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Problem(400, "the body is not valid JSON")
    field = ".".join(str(part) for part in first["loc"]) or None
    return Problem(422, first["msg"], field=field)


async def answer_problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()
