"""What clients may send, and what they get to read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from characters_serve.session.events import (
    MAX_MESSAGE_BYTES,
    BadMessage,
    ClientInterrupt,
    ClientReady,
    ClientText,
    ClientToolResult,
    EventsChannel,
    MessageLimit,
    ProbeHeard,
    ProbePing,
    parse_client_message,
    parse_probe,
    pong,
)


def message(kind: str, data: object = None, **other: object) -> str:
    return json.dumps({"label": "rtvi-ai", "id": "7", "type": kind, "data": data, **other})


def test_known_messages_are_read() -> None:
    assert parse_client_message(message("client-ready", {"version": "2.0"})) == ClientReady("7")
    assert parse_client_message(message("interrupt")) == ClientInterrupt("7")
    result = message("llm-function-call-result", {"tool_call_id": "c", "result": {"a": 1}})
    assert parse_client_message(result) == ClientToolResult("7", "c", '{"a": 1}')
    text = message("send-text", {"content": "hello", "options": {}})
    assert parse_client_message(text) == ClientText("7", "hello")


@pytest.mark.parametrize(
    "raw",
    [
        b"bytes",
        None,
        "",
        "not json",
        "[]",
        "3",
        "[" * 10_000,
        message("unknown"),
        message("send-text"),
        message("llm-function-call-result"),
        message("llm-function-call-result", {"tool_call_id": "c"}),
        message("llm-function-call-result", {"tool_call_id": 3, "result": 1}),
        message("send-text", {"content": 5}),
        message("send-text", {"content": "  "}),
        message("send-text", {"content": "x" * 2001}),
        message("interrupt", id=["7"]),
        message("interrupt", id="7" * 65),
        message("interrupt", label="other"),
        message("send-text", {"content": "x" * MAX_MESSAGE_BYTES}),
        message("send-text", {"content": "\u20ac" * 8000}),
    ],
)
def test_everything_else_is_refused_with_words(raw: object) -> None:
    with pytest.raises(BadMessage, match=r"\w"):
        parse_client_message(raw)


@given(st.one_of(st.text(), st.binary(), st.recursive(st.none(), st.lists).map(json.dumps)))
def test_garbage_never_gets_through(raw: object) -> None:
    for parse in (parse_client_message, parse_probe):
        with pytest.raises(BadMessage):
            parse(raw)


def test_pings_are_answered_with_their_own_numbers() -> None:
    ping = parse_probe('{"t": "ping", "id": 3, "c": 12.5}')
    assert isinstance(ping, ProbePing)
    assert json.loads(pong(ping, 1.0, 2.0)) == {
        "t": "pong",
        "id": 3,
        "c": 12.5,
        "s": 1.0,
        "media_ms": 2.0,
    }


@pytest.mark.parametrize(
    "raw",
    [
        '{"t": "pong", "id": 3, "c": 1}',
        '{"t": "ping", "id": "3", "c": 1}',
        '{"t": "ping", "id": true, "c": 1}',
        '{"t": "ping", "id": 3}',
        '{"t": "ping", "id": 3, "c": NaN}',
        '{"t": "ping", "id": 3, "c": 1e300}',
        '{"t": "ping", "id": 3, "c": "1"}',
        '{"t": "heard"}',
        '{"t": "heard", "ago_ms": -1}',
        '{"t": "heard", "ago_ms": NaN}',
        '{"t": "heard", "ago_ms": 60000}',
    ],
)
def test_bad_probes_are_refused(raw: str) -> None:
    with pytest.raises(BadMessage):
        parse_probe(raw)


def test_what_was_heard_is_read() -> None:
    assert parse_probe('{"t": "heard", "ago_ms": 12.5}') == ProbeHeard(12.5)


def test_fifty_messages_a_second() -> None:
    limit = MessageLimit()
    assert sum(limit.allows(0.001 * k) for k in range(200)) == 50
    assert not limit.allows(0.99)
    assert limit.allows(1.5)


def test_events_wait_for_the_channel_and_do_not_outlive_it() -> None:
    events = EventsChannel()
    sent: list[str] = []
    events.emit("user-started-speaking")
    events.attach(sent.append, lambda: 0)
    events.emit("error", {"message": "no"}, "7")
    first, second = (json.loads(text) for text in sent)
    assert first["type"] == "user-started-speaking" and "data" not in first
    assert second == {"label": "rtvi-ai", "id": "7", "type": "error", "data": {"message": "no"}}
    events.detach()
    events.emit("metrics", {})
    assert len(sent) == 2


def test_a_client_that_does_not_read_loses_events_not_our_memory() -> None:
    events = EventsChannel()
    sent: list[str] = []
    events.attach(sent.append, lambda: 10_000_000)
    events.emit("metrics", {})
    assert not sent and events.dropped == 1
    waiting = EventsChannel()
    for _ in range(1000):
        waiting.emit("metrics", {})
    waiting.attach(sent.append, lambda: 0)
    assert len(sent) == 64
