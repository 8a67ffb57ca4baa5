"""In: text as it streams. Out: sentences fit to be spoken. Knows no model and no audio."""

from __future__ import annotations

import re

# A sentence longer than this is cut at a clause: synthesis of 220 characters costs about 90 ms.
MAX_SENTENCE_CHARS = 220

_END = re.compile(r"[.!?…]+[\"'”’)\]*]*(?=\s)|\n+")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"“])(?:mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|approx|no|[a-z])\.$", re.IGNORECASE
)
_LIST_NUMBER = re.compile(r"^\s*\d{1,3}\.$")
_CLAUSE = re.compile(r"[,;:—–]\s+")
_LINK = re.compile(r"https?://\S+")
_MARKDOWN_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_MARKUP = re.compile(r"[*_`#>~|]+|^\s*[-•]\s+", re.MULTILINE)
# Symbols and pictographs that no voice can say; letters, digits and punctuation stay.
_PICTURES = re.compile(r"[\u2190-\u2bff\ufe00-\ufe0f\U0001f000-\U0001faff]")


class SentenceSplitter:
    """Cuts a stream of text pieces into sentences, each as soon as its end is certain."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, piece: str) -> list[str]:
        self._text += piece
        sentences: list[str] = []
        while (cut := self._next_cut()) is not None:
            sentence, self._text = self._text[:cut].strip(), self._text[cut:].lstrip()
            if sentence:
                sentences.append(sentence)
        return sentences

    def flush(self) -> list[str]:
        sentences = self.feed("\n")
        self._text = ""
        return sentences

    def _next_cut(self) -> int | None:
        for match in _END.finditer(self._text):
            head = self._text[: match.end()]
            if match.group().startswith("\n"):
                return match.end()
            if _ABBREVIATION.search(head) or _LIST_NUMBER.search(head):
                continue
            if match.end() <= MAX_SENTENCE_CHARS:
                return match.end()
            break
        if len(self._text) <= MAX_SENTENCE_CHARS:
            return None
        clauses = [m.end() for m in _CLAUSE.finditer(self._text, 0, MAX_SENTENCE_CHARS)]
        if clauses:
            return clauses[-1]
        space = self._text.rfind(" ", 0, MAX_SENTENCE_CHARS)
        return space if space > 0 else MAX_SENTENCE_CHARS


def split_sentences(text: str) -> list[str]:
    splitter = SentenceSplitter()
    return splitter.feed(text) + splitter.flush()


def speakable(text: str) -> str:
    """Without markup, links and pictures; empty when nothing is left to say."""
    text = _MARKDOWN_LINK.sub(r"\1", text)
    text = _LINK.sub("a link", text)
    text = _PICTURES.sub("", _MARKUP.sub(" ", text))
    text = " ".join(text.split())
    return text if any(c.isalnum() for c in text) else ""
