"""In: what was said and what playout reports. Out: the conversation as the user heard it.

An interrupted utterance keeps only the words that were really played.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SpokenSentence:
    text: str
    start_ms: float
    end_ms: float

    def heard_until(self, played_ms: float) -> str:
        """Whole words only, placed in the sentence by their share of its letters."""
        if played_ms >= self.end_ms:
            return self.text
        share = (played_ms - self.start_ms) / (self.end_ms - self.start_ms)
        words = self.text.split()
        letters = sum(len(word) for word in words)
        heard: list[str] = []
        passed = 0
        for word in words:
            passed += len(word)
            if passed > share * letters:
                break
            heard.append(word)
        return " ".join(heard)


@dataclass(eq=False)
class Utterance:
    """One reply of the character: what was synthesized, and how much of it was heard."""

    utterance_id: int
    sentences: list[SpokenSentence] = field(default_factory=list)
    sent_ms: float = 0.0
    started_s: float | None = None
    played_ms: float | None = None  # set once playout is over
    dropped: bool = False

    @property
    def over(self) -> bool:
        return self.dropped or self.played_ms is not None

    @property
    def text(self) -> str:
        return " ".join(sentence.text for sentence in self.sentences)

    def heard(self) -> str:
        if self.played_ms is None:
            return self.text
        pieces = (
            s.heard_until(self.played_ms) for s in self.sentences if s.start_ms < self.played_ms
        )
        return " ".join(piece for piece in pieces if piece)

    def drop(self, now_s: float) -> None:
        """Cut off: until the player reports the position, the clock since its start says it."""
        self.dropped = True
        if self.played_ms is None:
            since_start = 0.0 if self.started_s is None else (now_s - self.started_s) * 1000
            self.played_ms = min(self.sent_ms, since_start)


@dataclass(frozen=True)
class Line:
    role: Literal["user", "character"]
    text: str


class History:
    """The conversation so far; bounded, since a session may last for hours."""

    def __init__(self, max_entries: int = 200) -> None:
        self._entries: list[str | Utterance] = []
        self._max_entries = max_entries

    def add_user(self, text: str) -> None:
        self._add(text)

    def take_back_user(self, text: str) -> None:
        """The turn that these words began goes on, and will be added whole."""
        newest_first = range(len(self._entries) - 1, -1, -1)
        found = next((i for i in newest_first if self._entries[i] == text), None)
        if found is not None:
            del self._entries[found]

    def add_utterance(self, utterance: Utterance) -> None:
        self._add(utterance)

    def _add(self, entry: str | Utterance) -> None:
        self._entries.append(entry)
        del self._entries[: -self._max_entries]

    def utterance(self, utterance_id: int) -> Utterance | None:
        return next(
            (
                entry
                for entry in reversed(self._entries)
                if isinstance(entry, Utterance) and entry.utterance_id == utterance_id
            ),
            None,
        )

    def lines(self, limit: int) -> list[Line]:
        """The newest lines, at most `limit`; neighbours of one role are joined into one."""
        lines: list[Line] = []
        for entry in self._entries:
            role: Literal["user", "character"] = "user" if isinstance(entry, str) else "character"
            text = entry if isinstance(entry, str) else entry.heard()
            if not text:
                continue
            if lines and lines[-1].role == role:
                lines[-1] = Line(role, f"{lines[-1].text} {text}")
            else:
                lines.append(Line(role, text))
        return lines[-limit:]
