"""Sentences cut out of streams, and text made fit to be spoken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from characters_serve.agent.sentences import (
    MAX_SENTENCE_CHARS,
    SentenceSplitter,
    speakable,
    split_sentences,
)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello there. How are you?", ["Hello there.", "How are you?"]),
        (
            "Dr. Smith met Mr. J. Jones at 3.5 km. Good!",
            ["Dr. Smith met Mr. J. Jones at 3.5 km.", "Good!"],
        ),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        ("Well... yes.", ["Well...", "yes."]),
        ("1. Open it. 2. Close it.", ["1. Open it.", "2. Close it."]),
        ("No end at all", ["No end at all"]),
        ("One\n\nTwo", ["One", "Two"]),
        ("", []),
        (" \n ", []),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_a_sentence_leaves_as_soon_as_its_end_is_certain() -> None:
    splitter = SentenceSplitter()
    assert splitter.feed("I am fi") == []
    assert splitter.feed("ne.") == [], "could still become 'fine.x'"
    assert splitter.feed(" And") == ["I am fine."]
    assert splitter.flush() == ["And"]


@given(st.text(alphabet="abc .,!?\n", max_size=700), st.integers(1, 20))
def test_nothing_is_lost_however_the_stream_is_cut(text: str, size: int) -> None:
    splitter = SentenceSplitter()
    sentences = [
        sentence
        for start in range(0, len(text), size)
        for sentence in splitter.feed(text[start : start + size])
    ]
    sentences += splitter.flush()
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(len(sentence) <= MAX_SENTENCE_CHARS + 1 for sentence in sentences)


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("**Bold** and `code`", "Bold and code"),
        ("See [the page](https://example.com/x) now", "See the page now"),
        ("Look: https://example.com/a?b=c ok", "Look: a link ok"),
        ("- first\n- second", "first second"),
        ("Great 🎉!", "Great !"),
        ("🎉", ""),
        ("...", ""),
        ("Café, naïve", "Café, naïve"),
    ],
)
def test_speakable(text: str, spoken: str) -> None:
    assert speakable(text) == spoken
