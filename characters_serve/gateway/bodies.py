"""In: strangers' request bodies. Out: validated values, or the name of the field at fault."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.requests import Request

from characters_serve.gateway.forms import FormError, parse_form
from characters_serve.gateway.limits import read_body
from characters_serve.gateway.problems import Problem, invalid

MAX_COMMAND_BYTES = 8 * 1024
FORM_ROOM_BYTES = 64 * 1024

Body = TypeVar("Body", bound=BaseModel)
Name = Annotated[str, StringConstraints(strip_whitespace=True, max_length=40)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CreateBody(_Body):
    character: str | None = Field(None, max_length=64)
    name: Name | None = None
    persona: str | None = Field(None, max_length=2000)
    seed: int | None = Field(None, ge=0, lt=2**31)
    max_duration_s: float | None = Field(None, gt=0, allow_inf_nan=False)


class OfferBody(_Body):
    sdp: str
    type: Literal["offer"]


class SayBody(_Body):
    text: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500)]


async def read_create(request: Request, max_image_bytes: int) -> tuple[CreateBody, bytes | None]:
    media_type = media_type_of(request)
    if media_type == "application/json":
        return parse(CreateBody, await read_body(request, MAX_COMMAND_BYTES)), None
    if media_type != "multipart/form-data":
        raise unsupported("application/json, multipart/form-data")
    raw = await read_body(request, max_image_bytes + FORM_ROOM_BYTES, field="image")

    try:
        parts = parse_form(request.headers["content-type"], raw)
    except FormError as error:
        raise Problem(400, str(error)) from None
    image: bytes | None = None
    fields: dict[str, str] = {}
    for part in parts:
        if part.is_file != (part.name == "image"):
            raise Problem(422, "`image`, and only it, is a file", field=part.name)
        if part.name in fields or (part.is_file and image is not None):
            raise Problem(422, "the field is given twice", field=part.name)
        if part.is_file:
            image = bytes(part.data)
        elif part.data:
            fields[part.name] = text_of(bytes(part.data))
    if image is not None and len(image) > max_image_bytes:
        raise Problem(413, f"the image is longer than {max_image_bytes} bytes", field="image")
    try:
        return CreateBody.model_validate(fields), image
    except ValidationError as error:
        raise invalid(error) from None


def parse(kind: type[Body], raw: bytes) -> Body:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise invalid(error) from None


def media_type_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def text_of(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Problem(400, "the body is not UTF-8 text") from None


def speakable(text: str) -> str:
    """Without control characters, which no voice can say."""
    return "".join(c if c.isprintable() else " " for c in text)


def ufrags(sdp: str) -> frozenset[str]:
    lines = (line.strip() for line in sdp.splitlines())
    return frozenset(line for line in lines if line.startswith("a=ice-ufrag:"))


def unsupported(accepted: str, header: str = "Accept-Post") -> Problem:
    return Problem(
        415, f"send one of: {accepted}", field="Content-Type", headers={header: accepted}
    )
