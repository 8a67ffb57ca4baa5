"""Out: what each route takes and answers, for the OpenAPI document. Decides nothing.

Bodies are read by hand (limits hold while they stream), so the framework cannot know them; their
schemas come from the very models that check them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        "reason": {
            **_TEXT,
            "description": "of the present status, in words; empty where all is well",
        },
        "character": {**_NAMED, "description": "the preset's id; null of an uploaded picture"},
        "name": _TEXT,
        "max_duration_s": _SECONDS,
        "picture": _PICTURE,
        "queue_position": {
            "type": "integer",
            "minimum": 1,
            "description": "while queued; 1 is the next. A place is kept by asking again after "
            "Retry-After seconds",
        },
    },
}
_VIDEO = {
    "type": "object",
    "required": ["width", "height", "fps"],
    "properties": {key: {"type": "integer"} for key in ("width", "height", "fps")},
}
_CREATED = {
    **_SESSION,
    "required": [*_SESSION["required"], "client_secret", "ice_servers", "idle_timeout_s", "video"],
    "properties": {
        **_SESSION["properties"],  # type: ignore[dict-item]
        "client_secret": {
            "type": "object",
            "description": "the bearer token of this session's other requests, for one connection; "
            "then the answer's Resume-Token takes its place",
            "required": ["value", "expires_at"],
            "properties": {
                "value": _TEXT,
                "expires_at": {"type": "integer", "description": "Unix seconds"},
            },
        },
        "ice_servers": {
            "type": "array",
            "items": {"type": "object"},
            "description": "as RTCPeerConnection takes them",
        },
        "idle_timeout_s": _SECONDS,
        "video": _VIDEO,
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
_CHARACTER = ("id", "name", "style", "blurb", "image")
_LIST = {
    "type": "object",
    "required": ["characters", "video"],
    "properties": {
        "characters": {
            "type": "array",
            "items": {
                "type": "object",
                "required": list(_CHARACTER),
                "properties": dict.fromkeys(_CHARACTER, _TEXT),
            },
        },
        "video": _VIDEO,
    },
}
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


def _answers(
    status: int, summary: str, content: Described | None = None, **headers: str
) -> Described:
    """A route's success, and problems for all else. headers: what each says, `_` for `-`."""
    problem = {"description": "what was wrong", "content": _content(_PROBLEM, MEDIA_TYPE)}
    success: Described = {"description": "done"}
    if content:
        success["content"] = content
    if headers:
        success["headers"] = {
            name.replace("_", "-"): {"description": words, "schema": _TEXT}
            for name, words in headers.items()
        }
    responses = {status: success, "4XX": problem, "5XX": problem}
    return {"status_code": status, "summary": summary, "responses": responses}


def _secured(
    body: Described | None = None, *, required: bool = True, parameters: Sequence[Described] = ()
) -> Described:
    extra: Described = {"security": _SECURITY if required else [*_SECURITY, {}]}
    if body:
        extra["requestBody"] = body
    if parameters:
        extra["parameters"] = list(parameters)
    return {"openapi_extra": extra}


_FORM = _schema(CreateBody)
_FORM = {
    **_FORM,
    "required": ["image"],
    "properties": {
        **_FORM["properties"],
        "image": {"type": "string", "format": "binary", "description": "PNG, JPEG or WebP"},
    },
}
_RAW = {"schema": _TEXT}
_TAKEOVER: Described = {
    "name": "takeover",
    "in": "query",
    "description": "1: in place of a client that is still connected",
    "schema": {"type": "string"},
}

CREATE = {
    **_answers(
        201,
        "A new session, of a preset character (JSON) or of a picture (form); 429 and 503 say in "
        "Retry-After when to ask again",
        _content(_CREATED),
        Location="of the session",
        Retry_After="seconds; of a session that is queued",
    ),
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
SESSION = {
    **_answers(
        200,
        "What the session does now",
        _content(_SESSION),
        Retry_After="seconds; of a session that is queued",
    ),
    **_secured(),
}
OFFER = {
    **_answers(
        201,
        "Connects: an SDP offer in, its answer out, in the type that the offer came in",
        {**_content(_ANSWER), **_content(_TEXT, "application/sdp")},
        Location="of the connection, for PATCH and DELETE",
        Resume_Token="the bearer token of this session from now on",
    ),
    **_secured(
        _body(**{"application/sdp": _RAW, "application/json": {"schema": _schema(OfferBody)}}),
        parameters=[_TAKEOVER],
    ),
}
CANDIDATES = {
    **_answers(
        204, "ICE candidates: taken and left unused, since addresses are learnt from checks"
    ),
    **_secured(_body(**{"application/trickle-ice-sdpfrag": _RAW, "application/sdp": _RAW})),
}
END = {**_answers(204, "Ends the session, however often it is asked"), **_secured()}
BEACON = {
    **_answers(
        204, "The same for navigator.sendBeacon, which sets no headers: the token is the body"
    ),
    **_secured(_body(**{"text/plain": _RAW}), required=False),
}
INTERRUPT = {**_answers(204, "The character stops speaking"), **_secured()}
SAY = {
    **_answers(204, "The character speaks these very words"),
    **_secured(_body(**{"application/json": {"schema": _schema(SayBody)}})),
}
CHARACTERS = _answers(200, "The preset characters, and the size of all pictures", _content(_LIST))
PICTURE = _answers(
    200, "A preset's picture", _content({"type": "string", "format": "binary"}, "image/png")
)
ALIVE = _answers(200, "The process answers", _content(_STATUS))
READY = _answers(200, "A group serves; else 503, and why", _content(_STATUS))
READY["responses"]["5XX"] = {"description": "not ready", "content": _content(_STATUS)}
METRICS = _answers(200, "For Prometheus", _content(_TEXT, "text/plain"))
