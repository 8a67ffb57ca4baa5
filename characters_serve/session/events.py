"""In: what happens in a session, and the client's data channel messages. Out: RTVI envelopes.

Two channels, both opened by the client: `events` (reliable; label, id, type, data) and `probe`
(ping and pong: heartbeat, round trip, media time; and when an answer was heard). What a client
sends is checked before it is believed. Knows nothing of what a message leads to.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

log = logging.getLogger(__name__)

RTVI_LABEL: Final = "rtvi-ai"
RTVI_VERSION: Final = "1.0.0"
MAX_MESSAGE_BYTES: Final = 16 * 1024
MAX_MESSAGES_PER_S: Final = 50
MAX_TEXT_CHARACTERS: Final = 2000
MAX_WAITING_EVENTS: Final = 64
MAX_HEARD_AGO_MS: Final = 5000.0
MAX_BUFFERED_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class ClientReady:
    message_id: str


@dataclass(frozen=True, slots=True)
class ClientInterrupt:
    message_id: str


@dataclass(frozen=True, slots=True)
class ClientText:
    message_id: str
    content: str


@dataclass(frozen=True, slots=True)
class ClientToolResult:
    """result: JSON."""

    message_id: str
    call_id: str
    result: str


ClientMessage = ClientReady | ClientInterrupt | ClientText | ClientToolResult


@dataclass(frozen=True, slots=True)
class ProbePing:
    number: int
    client_ms: float


@dataclass(frozen=True, slots=True)
class ProbeHeard:
    """The client's loudspeaker began to play an answer, so long ago."""

    ago_ms: float


class BadMessage(ValueError):
    """What a client sent is no message of ours; the text tells it why."""


def parse_client_message(raw: object) -> ClientMessage:
    tree = _object(raw)
    if tree.get("label", RTVI_LABEL) != RTVI_LABEL:
        raise BadMessage(f"label must be {RTVI_LABEL!r}")
    message_id = tree.get("id", "")
    if not isinstance(message_id, str | int) or len(str(message_id)) > 64:
        raise BadMessage("id must be a short string")
    message_id = str(message_id)
    kind = tree.get("type")
    match kind:
        case "client-ready":
            return ClientReady(message_id)
        case "interrupt":
            return ClientInterrupt(message_id)
        case "send-text":
            data = tree.get("data")
            content = data.get("content") if isinstance(data, dict) else None
            if not isinstance(content, str) or not content.strip():
                raise BadMessage("data.content must be a text")
            if len(content) > MAX_TEXT_CHARACTERS:
                raise BadMessage(f"data.content has more than {MAX_TEXT_CHARACTERS} characters")
            return ClientText(message_id, content)
        case "llm-function-call-result":
            data = tree.get("data")
            call_id = data.get("tool_call_id") if isinstance(data, dict) else None
            if not isinstance(data, dict) or not isinstance(call_id, str) or "result" not in data:
                raise BadMessage("data must hold tool_call_id and result")
            return ClientToolResult(message_id, call_id[:128], json.dumps(data["result"]))
    raise BadMessage("unknown type")


def parse_probe(raw: object) -> ProbePing | ProbeHeard:
    tree = _object(raw)
    if tree.get("t") == "heard":
        ago_ms = tree.get("ago_ms")
        if not isinstance(ago_ms, int | float) or not 0 <= ago_ms <= MAX_HEARD_AGO_MS:
            raise BadMessage("ago_ms must be a number of milliseconds")
        return ProbeHeard(float(ago_ms))
    number, client_ms = tree.get("id"), tree.get("c")
    if tree.get("t") != "ping" or type(number) is not int or abs(number) > 2**53:
        raise BadMessage('a probe is {"t": "ping", "id": integer, "c": milliseconds}')
    if not isinstance(client_ms, int | float) or not abs(client_ms) < 1e15:
        raise BadMessage("c must be a number of milliseconds")
    return ProbePing(number, float(client_ms))


def pong(ping: ProbePing, server_ms: float, media_ms: float) -> str:
    return json.dumps(
        {"t": "pong", "id": ping.number, "c": ping.client_ms, "s": server_ms, "media_ms": media_ms}
    )


def _object(raw: object) -> dict[str, Any]:
    if not isinstance(raw, str):
        raise BadMessage("messages are text")
    if len(raw) > MAX_MESSAGE_BYTES or len(raw.encode("utf-8", "replace")) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message has more than {MAX_MESSAGE_BYTES} bytes")
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadMessage("a message must be JSON") from None
    if not isinstance(tree, dict):
        raise BadMessage("a message must be a JSON object")
    return tree


class MessageLimit:
    """At most 50 messages in any second; time is an argument."""

    def __init__(self, per_s: int = MAX_MESSAGES_PER_S) -> None:
        self._recent: deque[float] = deque(maxlen=per_s)

    def allows(self, now_s: float) -> bool:
        if len(self._recent) == self._recent.maxlen and now_s - self._recent[0] < 1.0:
            return False
        self._recent.append(now_s)
        return True


class EventsChannel:
    """Sends events to whichever data channel the client has opened; early ones wait for it."""

    def __init__(self) -> None:
        self.dropped = 0
        self._send: Callable[[str], None] | None = None
        self._buffered: Callable[[], int] = lambda: 0
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING_EVENTS)

    def attach(self, send: Callable[[str], None], buffered: Callable[[], int]) -> None:
        self._send = send
        self._buffered = buffered
        while self._waiting:
            self._put(self._waiting.popleft())

    @property
    def attached(self) -> bool:
        return self._send is not None

    def detach(self) -> None:
        """Events of a session without a client are not kept for its next one."""
        self._send = None
        self._buffered = lambda: 0
        self._waiting.clear()

    def emit(self, kind: str, data: dict[str, Any] | None = None, message_id: str = "") -> None:
        envelope: dict[str, Any] = {
            "label": RTVI_LABEL,
            "id": message_id or uuid.uuid4().hex[:12],
            "type": kind,
        }
        if data is not None:
            envelope["data"] = data
        self._put(json.dumps(envelope))

    def _put(self, text: str) -> None:
        if self._send is None:
            self._waiting.append(text)
        elif self._buffered() > MAX_BUFFERED_BYTES:
            self.dropped += 1  # a client that does not read
        else:
            self._send(text)
