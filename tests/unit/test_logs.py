"""Log lines: text for people, JSON for machines, and what each is about."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from characters_serve import logs
from characters_serve.logs import JsonFormatter


@pytest.fixture(autouse=True)
def _nothing_to_speak_of() -> Iterator[None]:
    yield
    logs.about(dict)


def line(message: str, *values: object, **extra: object) -> dict[str, object]:
    record = logging.LogRecord("characters_serve.x", logging.WARNING, "", 1, message, values, None)
    record.__dict__.update(extra)
    parsed = json.loads(JsonFormatter("g0-a1b2c3/host").format(record))
    assert isinstance(parsed, dict)
    return parsed


def test_a_line_is_one_object() -> None:
    said = line('two\nlines and "quotes" %d', 7)
    assert said["message"] == 'two\nlines and "quotes" 7'
    assert said["level"] == "warning" and said["logger"] == "characters_serve.x"
    assert said["process"] == "g0-a1b2c3/host"
    assert str(said["time"]).endswith("Z") and len(str(said["time"])) == 24


def test_a_line_says_which_session_and_epoch_it_is_about() -> None:
    epoch = 3
    logs.about(lambda: {"session": logs.shown("0123456789abcdef" * 2), "epoch": epoch})
    said = line("something")
    assert said["session"] == "01234567" and said["epoch"] == 3
    epoch = 4
    assert line("something")["epoch"] == 4, "read when the line is written"
    assert line("something", session="other", lease_epoch=9)["session"] == "other"
    logs.about_session("0123456789abcdef" * 2, "4bf92f35" * 4)
    said = line("something")
    assert said["session"] == "01234567" and said["trace_id"] == "4bf92f35" * 4
    logs.about_session()
    assert not {"session", "trace_id"} & set(line("something"))


def test_an_error_has_its_trace() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 1, "failed", (), sys.exc_info())
    assert "ValueError: no" in json.loads(JsonFormatter("").format(record))["error"]
