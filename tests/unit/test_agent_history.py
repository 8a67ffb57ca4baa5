"""The conversation's memory: an interrupted utterance keeps only what was played."""

from __future__ import annotations

from characters_serve.agent.history import History, Line, SpokenSentence, Utterance


def utterance(utterance_id: int = 1) -> Utterance:
    made = Utterance(utterance_id)
    made.sentences = [
        SpokenSentence("I like storms.", 0.0, 1000.0),
        SpokenSentence("They make the sea sing loudly.", 1120.0, 3120.0),
    ]
    made.sent_ms = 3240.0
    return made


def test_everything_is_kept_when_everything_was_played() -> None:
    said = utterance()
    said.played_ms = said.sent_ms
    assert said.heard() == "I like storms. They make the sea sing loudly."


def test_mid_word_keeps_the_whole_words_before_it() -> None:
    said = utterance()
    said.played_ms = 1120.0 + 2000.0 * 10 / 25
    assert said.heard() == "I like storms. They make"


def test_between_sentences_keeps_the_first() -> None:
    said = utterance()
    said.played_ms = 1050.0
    assert said.heard() == "I like storms."


def test_nothing_played_leaves_no_line() -> None:
    history = History()
    said = utterance()
    history.add_user("hello")
    history.add_utterance(said)
    said.drop(now_s=5.0)
    history.add_user("wait")
    assert history.lines(10) == [Line("user", "hello wait")]


def test_a_drop_is_placed_by_the_clock_until_the_player_reports() -> None:
    said = utterance()
    said.started_s = 10.0
    said.drop(now_s=11.05)
    assert said.heard() == "I like storms."
    said.played_ms = 3240.0
    assert said.heard().endswith("loudly.")


def test_memory_is_bounded_and_lines_are_the_newest() -> None:
    history = History(max_entries=10)
    for index in range(50):
        history.add_user(f"u{index}")
        history.add_utterance(utterance(index))
    assert len(history.lines(100)) == 10
    assert [line.role for line in history.lines(3)] == ["character", "user", "character"]
    assert history.utterance(49) is not None
    assert history.utterance(1) is None
