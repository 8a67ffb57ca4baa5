"""In: log records of one process. Out: lines of text or of JSON on stderr.

What a record is about (`session`, the first characters of its id, `trace_id` and `epoch`) comes
from the record itself or, in a process that serves one session at a time, from `about`. No secret,
SDP or speech is ever logged, so none is filtered here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

LogFormat = Literal["text", "json"]
SHOWN_ID = 8
_FIELDS = ("session", "trace_id", "epoch", "lease_epoch", "group", "reason")

_about: Callable[[], dict[str, Any]] = dict


def about(what: Callable[[], dict[str, Any]]) -> None:
    """Fields for every later record of this process, read when it is written."""
    global _about
    _about = what


def about_session(session_id: str = "", trace_id: str = "") -> None:
    """For a process that knows its session, or that it has none, and no epoch."""
    fields = of_session(session_id, trace_id)
    about(lambda: fields)


def of_session(session_id: str, trace_id: str) -> dict[str, Any]:
    """The fields of a line about a session; of those that are empty there is none."""
    fields = {"session": shown(session_id), "trace_id": trace_id}
    return {name: value for name, value in fields.items() if value}


def shown(session_id: str) -> str:
    """Enough of an id to follow a session, too little to guess it."""
    return session_id[:SHOWN_ID]


def configure(log_format: LogFormat, *, level: int | str = logging.INFO, process: str = "") -> None:
    """Leaves a process alone that logs already."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        name = f"{process} " if process else ""
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {name}%(name)s: %(message)s")
        )
    logging.basicConfig(level=level, handlers=[handler])


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, process, logger, message, and what it is about."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_about(),
        }
        line.update({name: record.__dict__[name] for name in _FIELDS if name in record.__dict__})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
