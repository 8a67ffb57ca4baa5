"""In: a multipart body that is wholly in memory. Out: its parts. Knows no field's meaning."""

from __future__ import annotations

from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

MAX_PARTS = 9


class FormError(ValueError):
    """A body that is no complete form; the message says why."""


@dataclass(slots=True)
class Part:
    name: str = ""
    is_file: bool = False
    data: bytearray = field(default_factory=bytearray)


def parse_form(content_type: str, body: bytes) -> list[Part]:
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise FormError("Content-Type names no boundary")
    builder = _Builder()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": builder.part_begin,
            "on_header_field": builder.header_field,
            "on_header_value": builder.header_value,
            "on_header_end": builder.header_end,
            "on_part_data": builder.part_data,
            "on_end": builder.end,
        },
    )
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise FormError(f"the form is malformed: {error}") from None
    if not builder.complete:
        raise FormError("the form is cut short")
    if any(not part.name for part in builder.parts):
        raise FormError("a part of the form has no name")
    return builder.parts


class _Builder:
    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.complete = False
        self._header = bytearray()
        self._value = bytearray()

    def part_begin(self) -> None:
        if len(self.parts) == MAX_PARTS:
            raise FormError("the form has too many parts")
        self.parts.append(Part())

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self.parts[-1].name = options.get(b"name", b"").decode("utf-8", "replace")[:64]
            self.parts[-1].is_file = b"filename" in options
        self._header.clear()
        self._value.clear()

    def part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].data += data[start:end]

    def end(self) -> None:
        self.complete = True
