"""Out: what each route takes and answers, for the OpenAPI document. Decides nothing.

Bodies are read by hand (limits hold while they stream), so the framework cannot know them; their
schemas come from the very models that check them.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel

from characters_serve.gateway.bodies import CreateBody, OfferBody, SayBody
from characters_serve.gateway.problems import MEDIA_TYPE
from characters_serve.gateway.sessions import State

Described = dict[str, Any]

TITLE = "characters-serve"
SUMMARY = "Live talking characters: one image, one private session, WebRTC out."
_TEXT = {"type": "string"}
_SECONDS = {"type": "number", "exclusiveMinimum": 0}
_NAMED = {"type": ["string", "null"]}

_PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": _TEXT,
        "title": _TEXT,
        "status": {"type": "integer"},
        "detail": _TEXT,
        "field": {"type": "string", "description": "what the request should change"},
    },
}
_PICTURE = {
    "type": ["object", "null"],
    "description": "of an uploaded picture, once the character is ready, where it was tried",
    "required": ["expression", "least", "familiar"],
    "properties": {
        "expression": {
            "type": "number",
            "description": "how strongly and how narrowly it changes from rest to an open mouth "
            "and closed eyes",
        },
        "least": {"type": "number", "description": "reached by pictures like the training's"},
        "familiar": {
            "type": "boolean",
            "description": "false: unlike what the model has learnt, mouth and eyes may be off",
        },
    },
}
_SESSION = {
    "type": "object",
    "required": ["id", "status", "reason", "character", "name", "max_duration_s", "picture"],
    "properties": {
        "id": _TEXT,
        "status": {"enum": list(get_args(State))},
        "reason": _TEXT,
        "character": _NAMED,
        "name": _TEXT,
        "max_duration_s": _SECONDS,
        "picture": _PICTURE,
    },
}
_CREATED = {
    **_SESSION,
    "required": [*_SESSION["required"], "client_secret", "ice_servers", "idle_timeout_s", "video"],
    "properties": {
        **_SESSION["properties"],  # type: ignore[dict-item]
        "client_secret": {
            "type": "object",
            "required": ["value", "expires_at"],
            "properties": {"value": _TEXT, "expires_at": {"type": "integer"}},
        },
        "ice_servers": {"type": "array", "items": {"type": "object"}},
        "idle_timeout_s": _SECONDS,
        "video": {"type": "object"},
    },
}
_ANSWER = {
    "type": "object",
    "required": ["sdp", "type", "location", "resume_token"],
    "properties": {
        "sdp": _TEXT,
        "type": {"const": "answer"},
        "location": _TEXT,
        "resume_token": _TEXT,
    },
}
_LIST = {"type": "object", "required": ["characters", "video"]}
_STATUS = {"type": "object", "required": ["status"], "properties": {"status": _TEXT}}
_SECURITY: list[dict[str, list[str]]] = [{"token": []}]


def add_schemes(document: Described) -> None:
    schemes = {"token": {"type": "http", "scheme": "bearer"}}
    document.setdefault("components", {})["securitySchemes"] = schemes


def _content(schema: Described, media_type: str = "application/json") -> Described:
    return {media_type: {"schema": schema}}


def _body(**content: Described) -> Described:
    return {"required": True, "content": content}


def _schema(model: type[BaseModel]) -> Described:
    return model.model_json_schema()


def _answers(status: int, content: Described | None = None, **more: Any) -> Described:
    """A route's success, and problems for all else."""
    problem = {"description": "what was wrong", "content": _content(_PROBLEM, MEDIA_TYPE)}
    success = {"description": "done", **({"content": content} if content else {}), **more}
    return {"status_code": status, "responses": {status: success, "4XX": problem, "5XX": problem}}


def _secured(body: Described | None = None, *, required: bool = True) -> Described:
    extra: Described = {"security": _SECURITY if required else [*_SECURITY, {}]}
    return {"openapi_extra": extra | ({"requestBody": body} if body else {})}


_FORM = _schema(CreateBody)
_FORM = {
    **_FORM,
    "required": ["image"],
    "properties": {**_FORM["properties"], "image": {"type": "string", "format": "binary"}},
}
_RAW = {"schema": _TEXT}

CREATE = {
    **_answers(201, _content(_CREATED)),
    **_secured(
        _body(
            **{
                "application/json": {"schema": _schema(CreateBody)},
                "multipart/form-data": {"schema": _FORM},
            }
        ),
        required=False,
    ),
}
SESSION = {**_answers(200, _content(_SESSION)), **_secured()}
OFFER = {
    **_answers(201, {**_content(_ANSWER), **_content(_TEXT, "application/sdp")}),
    **_secured(
        _body(**{"application/sdp": _RAW, "application/json": {"schema": _schema(OfferBody)}})
    ),
}
CANDIDATES = {
    **_answers(204),
    **_secured(_body(**{"application/trickle-ice-sdpfrag": _RAW, "application/sdp": _RAW})),
}
COMMAND = {**_answers(204), **_secured()}
SAY = {
    **_answers(204),
    **_secured(_body(**{"application/json": {"schema": _schema(SayBody)}})),
}
CHARACTERS = _answers(200, _content(_LIST))
PICTURE = _answers(200, _content({"type": "string", "format": "binary"}, "image/png"))
ALIVE = _answers(200, _content(_STATUS))
READY = _answers(200, _content(_STATUS))
READY["responses"]["5XX"] = {"description": "not ready", "content": _content(_STATUS)}
METRICS = _answers(200, _content(_TEXT, "text/plain"))
