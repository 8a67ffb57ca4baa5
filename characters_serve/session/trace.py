"""In: when each hop of a chunk began and how long it took. Out: a file that Perfetto opens.

Chrome's trace format, one file for each session, one line for each event, one lane for each hop.
Times are CLOCK_MONOTONIC, which the processes of one machine share. Holds numbers only: no words,
no secret, the first characters of the session's id, and the id of its W3C trace, as the name of
what is traced. A disk that is full ends the trace, not the session.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import IO, Final, Protocol

from characters_serve.logs import shown
from characters_serve.messages import VideoChunk

log = logging.getLogger(__name__)

LANES: Final = ("engine owes", "rank", "decoder", "buffer", "play", "session")
_BUFFER_BYTES: Final = 1 << 16
_PROCESS: Final = 1


class Tracer(Protocol):
    def sent(self, chunk_index: int, now_s: float) -> None: ...
    def arrived(self, chunk: VideoChunk, now_s: float) -> None: ...
    def playing(self, chunk_index: int, now_s: float) -> None: ...
    def event(self, name: str, now_s: float) -> None: ...
    def close(self) -> None: ...


class NoTrace:
    """What a session writes to when nobody asked for a trace."""

    def sent(self, chunk_index: int, now_s: float) -> None: ...
    def arrived(self, chunk: VideoChunk, now_s: float) -> None: ...
    def playing(self, chunk_index: int, now_s: float) -> None: ...
    def event(self, name: str, now_s: float) -> None: ...
    def close(self) -> None: ...


def open_trace(folder: str | None, session_id: str, trace_id: str, *, chunk_s: float) -> Tracer:
    """folder: server.trace_dir; chunk_s: how long a chunk plays."""
    if folder is None:
        return NoTrace()
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{shown(session_id)}.json"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        title = f"session {shown(session_id)}, trace {trace_id}"
        return Trace(Path(folder) / name, title, chunk_s)
    except OSError as error:
        log.warning("no trace is written: %s", error)
        return NoTrace()


class Trace:
    def __init__(self, path: Path, title: str, chunk_s: float) -> None:
        self._chunk_s = chunk_s
        self._sent_s: dict[int, float] = {}
        self._arrived_s: dict[int, float] = {}
        self._playing = -1
        self._file: IO[str] | None = path.open("w", buffering=_BUFFER_BYTES)
        self._separator = "[\n"
        self._name("process_name", 0, title)
        for lane, words in enumerate(LANES):
            self._name("thread_name", lane, words)

    def sent(self, chunk_index: int, now_s: float) -> None:
        """The step is handed to the engine."""
        self._sent_s[chunk_index] = now_s

    def arrived(self, chunk: VideoChunk, now_s: float) -> None:
        about = {"chunk": chunk.chunk_index, "epoch": chunk.epoch, "passes": chunk.passes}
        sent_s = self._sent_s.pop(chunk.chunk_index, now_s)
        self._span("engine owes", sent_s, now_s - sent_s, about)
        if chunk.step_began_s:
            self._span("rank", chunk.step_began_s, chunk.step_ms / 1000, about)
        if chunk.decode_began_s:
            self._span("decoder", chunk.decode_began_s, chunk.decode_ms / 1000, about)
        self._arrived_s[chunk.chunk_index] = now_s

    def playing(self, chunk_index: int, now_s: float) -> None:
        """Called for each picture and packet; a chunk's first counts."""
        if chunk_index == self._playing:
            return
        self._playing = chunk_index
        arrived_s = self._arrived_s.pop(chunk_index, now_s)
        about = {"chunk": chunk_index}
        self._span("buffer", arrived_s, now_s - arrived_s, about)
        self._span("play", now_s, self._chunk_s, about)

    def event(self, name: str, now_s: float) -> None:
        self._write({"ph": "i", "s": "p", "name": name, "ts": now_s * 1e6, "tid": len(LANES) - 1})

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.write("\n]\n")
                file.close()
            except OSError as error:
                log.warning("the trace is incomplete: %s", error)

    def _span(self, lane: str, began_s: float, took_s: float, about: dict[str, int]) -> None:
        lane_id = LANES.index(lane)
        name = f"chunk {about['chunk']}"
        times = {"ts": began_s * 1e6, "dur": took_s * 1e6}
        self._write({"ph": "X", "name": name, "cat": lane, "tid": lane_id, **times, "args": about})

    def _name(self, kind: str, lane: int, words: str) -> None:
        self._write({"ph": "M", "name": kind, "tid": lane, "args": {"name": words}})

    def _write(self, event: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._separator + json.dumps({"pid": _PROCESS, **event}))
            self._separator = ",\n"
        except OSError as error:
            log.warning("the trace ends here: %s", error)
            self.close()
