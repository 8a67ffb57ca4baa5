"""Turn logic on invented probabilities: no audio, no model, no clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from characters_serve.agent.turns import TurnDetector, TurnEvent, TurnRules

RULES = TurnRules(end_silence_s=0.5, barge_in_s=0.12, hop_s=0.016)
HOP_S = RULES.hop_s


def play(
    probabilities: list[float], *, over_voice: bool = False, rules: TurnRules = RULES
) -> list[tuple[float, TurnEvent]]:
    """Each event with the second of audio at which it came."""
    detector = TurnDetector(rules)
    return [
        (round((index + 1) * rules.hop_s, 3), event)
        for index, probability in enumerate(probabilities)
        for event in detector.step(probability, over_voice)
    ]


def hops(seconds: float, probability: float) -> list[float]:
    return [probability] * round(seconds / HOP_S)


def test_one_turn_starts_pauses_and_ends() -> None:
    events = play(hops(0.32, 0.02) + hops(1.024, 0.95) + hops(0.64, 0.02))
    assert [event for _, event in events] == [
        TurnEvent.STARTED,
        TurnEvent.PAUSED,
        TurnEvent.ENDED,
    ]
    started, paused, ended = (second for second, _ in events)
    assert started == 0.352
    assert abs(paused - 1.344 - 0.1) <= HOP_S
    assert abs(ended - 1.344 - 0.5) <= HOP_S


def test_a_breath_inside_a_sentence_does_not_end_the_turn() -> None:
    events = play(hops(0.5, 0.9) + hops(0.4, 0.05) + hops(0.5, 0.9) + hops(0.6, 0.05))
    assert [event for _, event in events] == [
        TurnEvent.STARTED,
        TurnEvent.PAUSED,
        TurnEvent.RESUMED,
        TurnEvent.PAUSED,
        TurnEvent.ENDED,
    ]


def test_a_click_starts_nothing_and_a_cough_is_discarded() -> None:
    assert play([0.0, 0.9, 0.0, 0.9, 0.0] * 10) == []
    events = play(hops(0.096, 0.9) + hops(0.6, 0.0))
    assert [event for _, event in events][-1] is TurnEvent.DISCARDED


def test_barge_in_needs_lasting_speech_and_comes_within_its_time() -> None:
    events = play(hops(0.32, 0.1) + hops(1.0, 0.95), over_voice=True)
    barge_ins = [second for second, event in events if event is TurnEvent.BARGE_IN]
    assert barge_ins == [round(0.32 + 0.128, 3)]


def test_echo_between_the_thresholds_never_interrupts_the_character() -> None:
    echo = [0.3, 0.5, 0.65, 0.6, 0.2, 0.68, 0.1] * 30
    assert play(echo, over_voice=True) == []
    assert play(echo, over_voice=False), "the same sound does count while the character listens"


def test_short_loud_bursts_over_the_voice_do_not_add_up() -> None:
    bursts = (hops(0.064, 0.95) + hops(0.1, 0.1)) * 10
    assert TurnEvent.BARGE_IN not in [event for _, event in play(bursts, over_voice=True)]


def test_a_dip_between_the_thresholds_does_not_restart_the_barge_in() -> None:
    events = play([0.9] * 4 + [0.5] + [0.9] * 4, over_voice=True)
    assert [event for _, event in events] == [TurnEvent.STARTED, TurnEvent.BARGE_IN]


def test_one_turn_barges_in_once_for_each_time_the_character_speaks() -> None:
    detector = TurnDetector(RULES)
    speaking = [False] * 10 + [True] * 10 + [False] * 5 + [True] * 10
    events = [event for flag in speaking for event in detector.step(0.95, flag)]
    assert events.count(TurnEvent.BARGE_IN) == 2
    assert events.count(TurnEvent.STARTED) == 1


def test_noise_between_the_thresholds_cannot_resume_a_paused_turn() -> None:
    events = play(hops(0.5, 0.9) + hops(0.25, 0.1) + hops(3.0, 0.45))
    assert [event for _, event in events][-1] is TurnEvent.ENDED


def test_a_turn_without_an_end_is_ended() -> None:
    events = play(hops(31.0, 0.9))
    assert TurnEvent.ENDED in [event for _, event in events]


def test_words_shorten_or_lengthen_one_silence_and_no_other() -> None:
    for silence_s in (0.3, 0.9):
        detector = TurnDetector(RULES)
        ends: list[float] = []
        for _ in range(2):
            for probability in hops(0.5, 0.9) + hops(0.288, 0.05) + hops(0.5, 0.9):
                assert TurnEvent.ENDED not in detector.step(probability, False)
                if detector.paused:
                    detector.end_after(silence_s)
            count = 0
            while detector.in_turn:
                count += 1
                if TurnEvent.PAUSED in detector.step(0.05, False) and not ends:
                    detector.end_after(silence_s)
            ends.append(count * HOP_S)
        assert abs(ends[0] - silence_s) <= HOP_S
        assert abs(ends[1] - RULES.end_silence_s) <= HOP_S, "the next turn is as any other"


def test_words_that_come_late_end_the_turn_at_the_next_hop() -> None:
    detector = TurnDetector(RULES)
    for probability in hops(0.5, 0.9) + hops(0.416, 0.05):
        detector.step(probability, False)
    detector.end_after(0.3)
    assert detector.step(0.05, False) == [TurnEvent.ENDED]


def ahead(detector: TurnDetector, speech_s: float, over_voice: bool = False) -> list[TurnEvent]:
    """Speech, and a silence that its words let be answered after 0.1 s and end after 0.3."""
    events = []
    for probability in hops(speech_s, 0.9) + hops(0.128, 0.05):
        for event in detector.step(probability, over_voice):
            if event is TurnEvent.PAUSED:
                detector.end_after(0.3, 0.1)
            events.append(event)
    return events


def test_what_is_likely_over_ends_when_its_silence_has_lasted() -> None:
    detector = TurnDetector(RULES)
    assert ahead(detector, 0.5)[1:] == [TurnEvent.PAUSED, TurnEvent.LIKELY_OVER]
    assert detector.in_turn
    rest = [event for p in hops(0.192, 0.05) for event in detector.step(p, True)]
    assert rest == [TurnEvent.ENDED]


def test_who_goes_on_takes_up_the_same_turn_although_an_answer_is_on_its_way() -> None:
    detector = TurnDetector(RULES)
    ahead(detector, 0.5)
    assert detector.step(0.6, True) == [TurnEvent.RESUMED], "nothing sounds that could echo"
    assert detector.step(0.9, False) == []
    later = [event for p in hops(0.6, 0.05) for event in detector.step(p, False)]
    assert later == [TurnEvent.PAUSED, TurnEvent.ENDED], "the next silence is as any other"


def test_a_cough_is_never_answered_ahead() -> None:
    assert TurnEvent.LIKELY_OVER not in ahead(TurnDetector(RULES), 0.096)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=400))
def test_events_always_alternate(steps: list[tuple[float, bool]]) -> None:
    detector = TurnDetector(RULES)
    inside = False
    for probability, over_voice in steps:
        for event in detector.step(probability, over_voice):
            if event is TurnEvent.STARTED:
                assert not inside
                inside = True
            else:
                assert inside
                inside = event not in (TurnEvent.ENDED, TurnEvent.DISCARDED)
        assert detector.in_turn == inside
