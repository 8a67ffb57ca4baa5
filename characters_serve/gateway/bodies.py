"""In: strangers' request bodies. Out: validated values, or the name of the field at fault."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

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

    async def stream() -> AsyncIterator[bytes]:
        yield raw

    try:
        form = await MultiPartParser(
            request.headers,
            stream(),  # type: ignore[arg-type]
            max_files=1,
            max_fields=8,
            max_part_size=MAX_COMMAND_BYTES,
        ).parse()
    except MultiPartException as error:
        raise Problem(400, error.message) from None
    try:
        image: bytes | None = None
        fields: dict[str, Any] = {}
        for name, value in form.multi_items():
            if name == "image" and isinstance(value, UploadFile):
                image = await value.read()
            elif name == "image" or isinstance(value, UploadFile):
                raise Problem(422, "`image`, and only it, is a file", field=name)
            elif value != "":
                fields[name] = value
    finally:
        await form.close()
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
