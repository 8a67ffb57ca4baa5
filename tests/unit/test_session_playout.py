"""The playout, with invented clocks: one decision for both tracks, whatever arrives when."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from characters_serve.messages import VideoChunk
from characters_serve.session.playout import CUT_FADE_SAMPLES, Playout, PlayoutEvent

FPS, FRAMES, SLOT, CHUNK = 24, 4, 2000, 8000
Pcm = NDArray[np.int16]


def chunk(
    index: int,
    *,
    epoch: int = 0,
    utterance_id: int = 0,
    offset_ms: float = 0.0,
    last: bool = False,
    level: int | None = None,
    speech: int = CHUNK,
) -> VideoChunk:
    """Frame f of the stream is named by its number, and sounds at 1000 + f."""
    first = index * FRAMES
    voice = np.repeat(1000 + np.arange(first, first + FRAMES), SLOT).astype(np.int16)
    if level is not None:
        voice[:] = level
    voice[speech:] = 0
    return VideoChunk(
        session_id="s",
        epoch=epoch,
        chunk_index=index,
        frames_i420=[str(first + frame).encode() for frame in range(FRAMES)],
        voice_48k=voice.tobytes(),
        utterance_id=utterance_id,
        utterance_offset_ms=offset_ms,
        last=last,
        passes=4,
        step_ms=1.0,
        decode_ms=1.0,
    )


class Rig:
    """Pulls both tracks as their deadlines come; time is counted in 1 / 600 s."""

    def __init__(self, target: int = 2) -> None:
        self.playout = Playout(fps=FPS, voice_samples_per_chunk=CHUNK, target_chunks=target)
        self.now = 0
        self.pictures: list[str] = []
        self.packets: list[Pcm] = []
        self.events: list[PlayoutEvent] = []
        # The engine's: chunks with the time at which they are done, and when steps were sent.
        self.in_work: list[tuple[int, int]] = []
        self.sent: dict[int, int] = {}

    @property
    def now_s(self) -> float:
        return self.now / 600

    def give(self, message: VideoChunk) -> None:
        """As an engine that needs no time."""
        speaking = message.utterance_id != 0 and not message.last
        self.playout.step_sent(self.now_s, speaking=speaking)
        assert self.playout.push(message, self.now_s)

    def start(self) -> None:
        assert self.playout.can_start
        self.playout.start(0)

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            if self.now % 12 == 0:
                self.packets.append(self.playout.packet(self.now // 12))
            if self.now % 25 == 0:
                self.pictures.append(self.playout.picture(self.now // 25).decode())
            self.now += 1
            self.events += self.playout.take_events()

    @property
    def sound(self) -> Pcm:
        return np.concatenate(self.packets)

    def of(self, kind: str) -> list[PlayoutEvent]:
        return [event for event in self.events if event.kind == kind]


TICKS_PER_CHUNK = 100


def test_content_plays_unchanged() -> None:
    rig = Rig()
    rig.give(chunk(0))
    assert not rig.playout.can_start
    rig.give(chunk(1))
    rig.start()
    for index in range(2, 8):
        rig.give(chunk(index))
        rig.run(TICKS_PER_CHUNK)
    assert rig.pictures == [str(frame) for frame in range(24)]
    expected = np.repeat(1000 + np.arange(24), SLOT)
    assert np.array_equal(rig.sound[: len(expected)], expected[: len(rig.sound)])
    assert rig.playout.underruns == 0


@settings(max_examples=30, deadline=None)
@given(
    gaps=st.lists(st.integers(0, 260), min_size=6, max_size=30),
    target=st.integers(1, 4),
)
def test_picture_and_voice_never_part(gaps: list[int], target: int) -> None:
    rig = Rig(target)
    for index in range(target):
        rig.give(chunk(index))
    rig.start()
    given_chunks = target
    for gap in gaps:
        rig.run(gap)
        if rig.playout.credits() > 0:
            rig.give(chunk(given_chunks))
            given_chunks += 1
    rig.run(TICKS_PER_CHUNK * 5)
    slots = len(rig.pictures)
    # Pictures: every frame once, in order; a hold repeats the one before it.
    shown = list(dict.fromkeys(rig.pictures))
    assert sorted(rig.pictures, key=int) == rig.pictures
    assert shown == [str(frame) for frame in range(len(shown))]
    assert len(shown) == given_chunks * FRAMES
    # Voice: in the middle of each slot, that frame's own samples, or silence in a hold.
    sound = rig.sound
    for slot in range(min(slots, len(sound) // SLOT)):
        held = slot > 0 and rig.pictures[slot] == rig.pictures[slot - 1]
        middle = int(sound[slot * SLOT + SLOT // 2])
        assert middle == (0 if held else 1000 + int(rig.pictures[slot]))
    # No clicks: at most one step of the fade (about 1100 / 240) or of the staircase.
    assert np.abs(np.diff(sound.astype(np.int32))).max() <= 1 + 1200 // CUT_FADE_SAMPLES + 1
    assert rig.playout.held_slots == slots - len(shown) + _ahead(rig, slots)


def _ahead(rig: Rig, slots: int) -> int:
    """Holds that were decided for packets but whose picture is not yet due."""
    return rig.playout._next_slot - slots


@settings(max_examples=20, deadline=None)
@given(delays=st.lists(st.integers(0, 300), min_size=10, max_size=40), speaking=st.booleans())
def test_the_engine_never_runs_ahead_of_its_credits(delays: list[int], speaking: bool) -> None:
    rig = Rig(2)
    in_work: list[tuple[int, int]] = []
    sent = 0
    for delay in delays:
        while rig.playout.credits() > 0:
            rig.playout.step_sent(rig.now_s, speaking=speaking)
            in_work.append((sent, rig.now + delay))
            sent += 1
        rig.run(20)
        while in_work and in_work[0][1] <= rig.now:
            assert rig.playout.push(chunk(in_work.pop(0)[0]), rig.now_s)
        if rig.playout.can_start:
            rig.playout.start(rig.now // 25 + 1)
            rig.now = (rig.now // 300 + 1) * 300
        assert rig.playout.in_flight + int(rig.playout.depth) <= rig.playout.target <= 4
        assert rig.playout.credits() >= 0 or rig.playout.playing


def engine_tick(rig: Rig, latency: int, *, speech_from: int | None = None) -> None:
    """1/600 s of an engine with that latency, fed by credit; chunks from speech_from on speak."""
    playout = rig.playout
    while True:
        index = playout._expected_index + len(rig.in_work)
        speaks = speech_from is not None and index >= speech_from
        if playout.credits(speech_waits=speaks) <= 0:
            break
        playout.step_sent(rig.now_s, speaking=speaks or playout.speaking)
        busy_until = rig.in_work[-1][1] if rig.in_work else 0
        rig.in_work.append((index, max(rig.now + latency, busy_until + latency // 2)))
        rig.sent[index] = rig.now
    if rig.in_work and rig.in_work[0][1] <= rig.now:
        index = rig.in_work.pop(0)[0]
        spoken = 1 if speech_from is not None and index >= speech_from else 0
        assert playout.push(chunk(index, utterance_id=spoken), rig.now_s)
    if playout.can_start:
        rig.now = 0
        rig.start()
    if playout.playing:
        rig.run(1)
    else:
        rig.now += 1


def engine_run(rig: Rig, chunks: int, latency: int, *, speaking: bool) -> list[float]:
    """That many chunks of an engine; returns how long steps wait to play."""
    first = rig.playout._expected_index
    rig.playout.speaking = speaking
    while rig.playout._expected_index < first + chunks:
        engine_tick(rig, latency)
    shown = {int(frame): 25 * slot for slot, frame in reversed(list(enumerate(rig.pictures)))}
    return [
        (shown[index * FRAMES] - at) / 600
        for index, at in rig.sent.items()
        if index * FRAMES in shown and index > first + 12
    ]


def test_an_idle_character_answers_sooner_and_still_never_runs_dry() -> None:
    rig = Rig(2)
    waits = engine_run(rig, 60, latency=78, speaking=False)  # 130 ms
    assert rig.playout.underruns == 0
    assert max(waits) < 0.24  # a full buffer would make it 0.33
    rig.playout.speaking = True
    engine_run(rig, 10, latency=78, speaking=True)
    assert rig.playout.underruns == 0 and rig.playout.depth > 1


def test_an_engine_at_20_fps_is_waited_for_and_leaves_no_lag() -> None:
    rig = Rig(2)
    engine_run(rig, 12, latency=78, speaking=True)
    assert rig.playout.held_slots == 0
    engine_run(rig, 50, latency=240, speaking=True)  # pipelined: a chunk every 200 ms, for 10 s
    assert rig.playout.underruns > 5
    held = rig.playout.held_slots
    # 10 of 60 chunks were missing, less what was buffered; each late one waits for its slot too.
    assert (10 - 3) * FRAMES <= held <= 10 * FRAMES + 50 // 2
    engine_run(rig, 60, latency=78, speaking=True)
    assert rig.playout.held_slots <= held + FRAMES, "it has caught up"
    assert rig.playout.depth + rig.playout.in_flight <= rig.playout.target + 1, "and holds no more"
    shown = list(dict.fromkeys(rig.pictures))
    assert shown == [str(frame) for frame in range(len(shown))]


def test_a_slow_engine_gets_the_whole_lead() -> None:
    rig = Rig(2)
    engine_run(rig, 60, latency=180, speaking=False)  # 300 ms, pipelined
    assert rig.playout.underruns == 0
    assert rig.playout.lead > 1.9


@settings(max_examples=12, deadline=None)
@given(latency=st.integers(12, 120), jitter=st.integers(0, 12), moment=st.integers(0, 299))
def test_new_speech_goes_into_the_very_next_step(latency: int, jitter: int, moment: int) -> None:
    rig = Rig(2)
    engine_run(rig, 24, latency=latency, speaking=False)
    for _ in range(moment):  # until the speech arrives, the engine idles on
        engine_tick(rig, latency + rig.now % (jitter + 1))
    underruns, arrived = rig.playout.underruns, rig.now
    ahead = rig.playout.depth + rig.playout.in_flight
    room = rig.playout.credits(speech_waits=True)
    first = rig.playout._expected_index + rig.playout.in_flight
    while rig.playout._expected_index < first + 8:
        engine_tick(rig, latency + rig.now % (jitter + 1), speech_from=first)
    if room:
        assert rig.sent[first] == arrived, "it does not wait until idling would need a step"
    rig.run(3 * TICKS_PER_CHUNK)
    shown = rig.pictures.index(str(first * FRAMES)) * 25
    # Nothing is ahead of it but what had been handed out. The slot that plays is no part of depth,
    # and may have been decided up to 25 ms early.
    holds = 25 * (rig.playout.underruns - underruns)
    assert shown - arrived <= ahead * TICKS_PER_CHUNK + 25 + 15 + holds
    assert shown - arrived <= latency + jitter + 24 + TICKS_PER_CHUNK + 25 + 15 + holds
    # No picture is left out, so nothing jumps; and no hold falls into the speech.
    started = rig.pictures.index(str(first * FRAMES))
    spoken = rig.pictures[started : started + 8 * FRAMES]
    assert spoken == [str(first * FRAMES + frame) for frame in range(8 * FRAMES)]
    kept = list(dict.fromkeys(rig.pictures))
    assert kept == [str(frame) for frame in range(len(kept))]


def test_idle_holds_widen_the_margin_and_a_calm_time_narrows_it() -> None:
    rig = Rig(2)
    engine_run(rig, 40, latency=60, speaking=False)
    calm = rig.playout.lead
    for _ in range(3):
        rig.run(2 * TICKS_PER_CHUNK)
        engine_run(rig, 2, latency=60, speaking=False)
    assert rig.playout.underruns == 3
    assert rig.playout.lead > calm + 0.2
    assert rig.playout.target == 2, "what is not heard costs no buffer"
    engine_run(rig, 1200, latency=60, speaking=False)
    assert rig.playout.lead < calm + 0.1


def test_how_long_steps_of_speech_wait_does_not_delay_the_next_answer() -> None:
    rig = Rig(2)
    engine_run(rig, 40, latency=60, speaking=False)
    calm = rig.playout.lead
    first = rig.playout._expected_index + rig.playout.in_flight
    while rig.playout._expected_index < first + 20:
        engine_tick(rig, 150, speech_from=first)
    engine_run(rig, 5, latency=60, speaking=False)
    assert rig.playout.lead < calm + 0.3  # a hold or two widened the margin


@pytest.mark.parametrize("silent", range(9))
def test_silence_before_words_that_have_come_plays_in_half_its_time(silent: int) -> None:
    rig = Rig(4)
    for index in range(4):
        rig.give(chunk(index, level=0))
    rig.start()
    rig.run(1 + 25 * (15 - silent))
    rig.give(chunk(4, utterance_id=1, level=3000))
    rig.give(chunk(5, utterance_id=1, offset_ms=1000 / 6, last=True, level=3000))
    rig.give(chunk(6, level=0))
    rig.run(25 * (silent // 2 + 2 * FRAMES + 1))
    left = list(range(16 - silent, 16))[1::2]
    expected = [*range(16 - silent), *left, *range(16, 24)]
    assert rig.pictures[: len(expected)] == [str(frame) for frame in expected]
    assert [event.played_ms for event in rig.of("finished")] == [pytest.approx(2000 / 6)]
    assert np.count_nonzero(rig.sound) == 2 * CHUNK, "no sample of speech is left out"


def test_what_is_no_silence_plays_as_it_came() -> None:
    rig = Rig(3)
    rig.give(chunk(0, utterance_id=1, level=0))  # an utterance's own pause
    rig.give(chunk(1, level=5))  # the voice dies away
    rig.give(chunk(2, utterance_id=2, level=3000))
    rig.start()
    rig.give(chunk(3, utterance_id=2, last=True, level=3000))
    rig.run(25 * 16)
    assert rig.pictures == [str(frame) for frame in range(16)]


class BusyEngine:
    """A rank and a decoder, each with its queue; so many ticks for each pass and each decoding."""

    def __init__(self, rig: Rig, pass_ticks: int, decode_ticks: int) -> None:
        self.rig = rig
        self.passes = [2, 2]
        for index in range(2):
            rig.give(chunk(index, level=0))
        rig.start()
        self._costs = pass_ticks, decode_ticks
        self._free = [0, 0]
        self._done: list[tuple[int, VideoChunk]] = []

    def tick(self, utterance_id: int = 0, words: int = 0) -> int:
        """Speech waits for so many more steps; returns for how many it still does."""
        rig, playout = self.rig, self.rig.playout
        while playout.credits(speech_waits=words > 0) > 0:
            self.passes.append(4 if words and not playout.hurried else 2)
            made = chunk(
                len(self.passes) - 1,
                epoch=playout._epoch,
                utterance_id=utterance_id if words else 0,
                level=3000 if words else 0,
                last=words == 1,
            )
            words = max(0, words - 1)
            playout.step_sent(rig.now_s, speaking=words > 0)
            self._free[0] = max(rig.now, self._free[0]) + self.passes[-1] * self._costs[0]
            self._free[1] = max(self._free) + self._costs[1]
            self._done.append((self._free[1], made))
        while self._done and self._done[0][0] <= rig.now:
            assert playout.push(self._done.pop(0)[1], rig.now_s)
        rig.run(1)
        return words


@pytest.mark.parametrize("raised", [0, 1])
def test_the_first_words_come_soon_and_none_is_late(raised: int) -> None:
    """30 ms a pass and 80 ms a decoding are twice what an idle core takes.

    raised: speech has run dry before, so that it keeps more in hand; what precedes it does not.
    """
    rig = Rig(2)
    rig.playout.target += raised
    engine = BusyEngine(rig, pass_ticks=18, decode_ticks=48)
    waits_s = []
    for utterance_id in range(1, 9):
        for _ in range(900 + 37 * utterance_id):
            engine.tick()
        arrived, before, words = rig.now, len(engine.passes), 8
        while len(rig.of("finished")) < utterance_id:
            words = engine.tick(utterance_id, words)
        silent_before = np.flatnonzero(rig.sound[arrived * 80 :])[0]
        waits_s.append(int(silent_before) / 48_000)
        # Few passes until as much is in hand as speech keeps, and then all of them.
        spoken = engine.passes[before : before + 8]
        assert spoken == sorted(spoken) and spoken[0] == 2 and spoken[4:] == [4] * 4
    assert np.mean(waits_s) < 0.21 and max(waits_s) < 0.27
    assert rig.playout.silent_slots == 0


@pytest.mark.parametrize("late", [0, 48])
def test_silence_before_words_lasts_until_they_are_due(late: int) -> None:
    """late: by how many ticks their decoding takes longer than that of silence."""
    rig = Rig(2)
    playout = rig.playout
    engine = BusyEngine(rig, pass_ticks=24, decode_ticks=72)
    for _ in range(3000):
        engine.tick()
    while playout.credits() < 1:
        rig.run(1)
    engine.tick()
    assert playout.credits(speech_waits=True) == 1, "words do not wait until less is in hand"
    engine._costs = 24, 72 + late
    lead, underruns, arrived = playout.lead, playout.underruns, rig.now
    first, words = FRAMES * len(engine.passes), 8  # the picture that comes with them
    while not rig.of("voiced"):
        words = engine.tick(1, words)
    # The step of silence before them keeps the engine busy for a while.
    made = 72 + max(48 + 48, 72) + late
    voiced = int(np.flatnonzero(rig.sound[arrived * 80 :])[0]) / 80
    assert made <= voiced <= made + 50
    shown = [frame for frame in map(int, rig.pictures[arrived // 25 :]) if frame < first]
    assert set(np.diff(shown)) <= {0, 1, 2}, "silence plays in half its time, and no faster"
    assert playout.underruns - underruns <= 1
    playout.speaking = False
    assert playout.lead <= lead, "words that are late say nothing of silence"


@pytest.mark.parametrize("moment", range(0, 100, 9))
def test_the_mouth_is_at_rest_two_chunks_after_an_interruption(moment: int) -> None:
    rig = Rig(2)
    engine = BusyEngine(rig, pass_ticks=18, decode_ticks=48)
    for _ in range(1200):
        engine.tick()
    words, first = 60, len(engine.passes)
    for _ in range(1200 + moment):
        words = engine.tick(1, words)
    rig.playout.interrupt(1, 1)
    spoken, shown, held = len(engine.passes), len(rig.pictures), rig.playout.held_slots
    margin_s = rig.playout._margin_s
    for _ in range(600):
        engine.tick()
    after = [first <= int(frame) // FRAMES < spoken for frame in rig.pictures[shown:]]
    assert sum(after) <= 2 * FRAMES
    assert rig.playout.held_slots - held <= 2
    assert rig.playout._margin_s <= margin_s, "a hold of theirs says nothing of silence"


def test_strays_are_refused_and_impossible_chunks_raise() -> None:
    rig = Rig()
    assert not rig.playout.push(chunk(0), 0.0)  # nothing was asked for
    rig.playout.step_sent(0.0, speaking=False)
    assert not rig.playout.push(chunk(1), 0.1)
    assert rig.playout.push(chunk(0), 0.1)
    assert not rig.playout.push(chunk(0), 0.1)
    assert rig.playout.rejected_chunks == 3
    rig.playout.step_sent(0.1, speaking=False)
    broken = VideoChunk("s", 0, 1, [b""], b"\0\0", 0, 0.0, False, 4, 1.0, 1.0)
    with pytest.raises(ValueError, match="chunk 1"):
        rig.playout.push(broken, 0.2)


def test_utterance_is_reported_once_with_its_spoken_length() -> None:
    rig = Rig()
    rig.give(chunk(0))
    rig.give(chunk(1, utterance_id=1))
    rig.start()
    rig.run(TICKS_PER_CHUNK)
    rig.give(chunk(2, utterance_id=1, offset_ms=1000 / 6, last=True, speech=3000))
    rig.give(chunk(3))
    rig.run(4 * TICKS_PER_CHUNK)
    assert [(event.kind, event.utterance_id) for event in rig.events] == [
        ("started", 1),
        ("voiced", 1),
        ("finished", 1),
    ]
    assert rig.events[-1].played_ms == pytest.approx((8000 + 3000) / 48)


def test_a_silent_utterance_ends_too() -> None:
    rig = Rig()
    rig.give(chunk(0, utterance_id=1, last=True, speech=0))
    rig.give(chunk(1))
    rig.start()
    rig.run(TICKS_PER_CHUNK)
    assert [event.kind for event in rig.events] == ["started", "finished"]
    assert rig.events[-1].played_ms == 0


@settings(max_examples=25, deadline=None)
@given(at=st.integers(1, 399))
def test_barge_in_silences_within_30_ms_and_the_picture_goes_on(at: int) -> None:
    rig = Rig(4)
    for index in range(4):
        rig.give(chunk(index, utterance_id=1, offset_ms=index * 1000 / 6, level=9000))
    rig.start()
    rig.run(at)
    rig.playout.interrupt(1, 1)
    handed_out, shown = len(rig.packets) * 960, len(rig.pictures)
    rig.run(500 - at)
    assert not rig.sound[handed_out + 480 :].any()
    steps = np.abs(np.diff(rig.sound[: handed_out + 960].astype(np.int32)))
    assert steps.max() <= 60  # both fades at once
    frames = [int(frame) for frame in rig.pictures]
    assert frames[:shown] == list(range(shown))
    assert set(np.diff(frames)) <= {0, 1, 2}, "what nobody hears plays in half its time: no jump"
    assert frames.index(15) <= shown + (16 - shown) // 2 + 1
    ends = rig.of("interrupted") + rig.of("finished")
    assert [event.utterance_id for event in ends] == [1]
    assert ends[0].played_ms == pytest.approx(min(handed_out / 48, 2000 / 3))


@settings(max_examples=25, deadline=None)
@given(at=st.integers(60, 330))
def test_what_waits_in_vain_goes_on_from_a_little_before_and_loses_nothing(at: int) -> None:
    rig = Rig(4)
    for index in range(4):
        rig.give(chunk(index, utterance_id=1, offset_ms=index * 1000 / 6))
    rig.start()
    rig.run(at)
    assert rig.playout.wait()
    assert not rig.playout.wait()  # once is enough
    rig.run(700 - at)
    assert len(rig.of("resumed")) == 1
    shown = [int(name) for name in rig.pictures]
    back = next(n for n in range(1, len(shown)) if shown[n] < shown[n - 1])
    assert shown[back - 1] - shown[back] == 2  # three pictures again
    assert shown[:back] == sorted(shown[:back])
    assert shown[back : back + 16 - shown[back]] == list(range(shown[back], 16))
    assert 6 <= shown[:back].count(shown[back - 1]) <= 7
    # Each frame sounds for its whole length, its fades aside.
    for frame in range(16):
        assert (rig.sound == 1000 + frame).sum() >= SLOT - 2 * CUT_FADE_SAMPLES
    assert np.abs(np.diff(rig.sound.astype(np.int32))).max() <= 12  # no click


@settings(max_examples=25, deadline=None)
@given(at=st.integers(60, 330), wait=st.integers(0, 110))
@example(at=313, wait=24)  # between the decision to wait and the packet with its fade
def test_an_interruption_ends_the_wait_and_nothing_sounds_again(at: int, wait: int) -> None:
    rig = Rig(4)
    for index in range(4):
        rig.give(chunk(index, utterance_id=1, offset_ms=index * 1000 / 6, level=9000))
    rig.start()
    rig.run(at)
    rig.playout.wait()
    rig.run(wait)
    rig.playout.interrupt(1, 1)
    handed_out = len(rig.packets) * 960
    rig.run(600 - at - wait)
    assert not rig.sound[handed_out + 480 :].any()
    assert np.abs(np.diff(rig.sound[9600:].astype(np.int32))).max() <= 60
    assert [event.kind for event in rig.events] == ["started", "voiced", "interrupted"]
    frames = [int(frame) for frame in rig.pictures]
    assert set(np.diff(frames)) <= {0, 1, 2} and frames[-1] == 15, "the picture goes on"


def test_only_speech_that_goes_on_waits() -> None:
    rig = Rig(2)
    rig.give(chunk(0, utterance_id=1, last=True, speech=3000))
    rig.give(chunk(1))
    assert not rig.playout.wait()  # nobody listens yet
    rig.start()
    rig.run(5)
    assert rig.playout.wait()
    rig.run(200)
    assert not rig.playout.wait()


def test_after_a_barge_in_the_next_utterance_plays_whole() -> None:
    rig = Rig(4)
    for index in range(4):
        rig.give(chunk(index, utterance_id=1, level=9000))
    rig.start()
    rig.run(150)
    rig.playout.interrupt(1, 2)  # a second utterance was queued but never reached the engine
    rig.give(chunk(4, epoch=1))
    rig.run(200)
    rig.give(chunk(5, epoch=1, utterance_id=3, level=5000))
    rig.give(chunk(6, epoch=1, utterance_id=3, offset_ms=1000 / 6, level=5000, last=True))
    rig.give(chunk(7, epoch=1, level=0))
    rig.run(400)
    assert int((rig.sound == 5000).sum()) == 2 * CHUNK
    assert [(e.kind, e.utterance_id) for e in rig.events] == [
        ("started", 1),
        ("voiced", 1),
        ("interrupted", 1),
        ("interrupted", 2),
        ("started", 3),
        ("voiced", 3),
        ("finished", 3),
    ]
    assert rig.events[3].played_ms == 0


@settings(max_examples=20, deadline=None)
@given(moments=st.lists(st.integers(5, 60), min_size=5, max_size=30))
def test_thirty_barge_ins_in_a_row_report_each_utterance_once(moments: list[int]) -> None:
    rig = Rig(2)
    utterance_id, index = 1, 0
    for epoch, moment in enumerate(moments):
        while rig.playout.credits() > 0:
            rig.give(chunk(index, epoch=epoch, utterance_id=utterance_id, level=9000))
            index += 1
        if rig.playout.can_start:
            rig.start()
        rig.run(moment)
        rig.playout.interrupt(epoch + 1, utterance_id)
        utterance_id += 1
    rig.run(300)
    ended = [e.utterance_id for e in rig.events if e.kind in ("finished", "interrupted")]
    assert ended == list(range(1, utterance_id))
    started = [e.utterance_id for e in rig.of("started")]
    assert started == sorted(set(started))


def test_target_rises_after_two_underruns_and_falls_when_calm() -> None:
    rig = Rig(1)
    rig.give(chunk(0, utterance_id=1))
    rig.start()
    index = 1
    for _ in range(2):
        rig.run(150)
        rig.give(chunk(index, utterance_id=1))
        index += 1
        rig.run(TICKS_PER_CHUNK)
    assert rig.playout.underruns >= 2 and rig.playout.target == 2
    underruns = rig.playout.underruns
    for _ in range(7 * 62):
        while rig.playout.credits() > 0:
            rig.give(chunk(index))
            index += 1
        rig.run(TICKS_PER_CHUNK)
    assert rig.playout.target == 1
    assert rig.playout.underruns == underruns


def test_pause_keeps_content_for_the_next_start() -> None:
    rig = Rig()
    for index in range(2):
        rig.give(chunk(index))
    rig.start()
    rig.run(TICKS_PER_CHUNK // 2)
    rig.playout.pause()
    rig.give(chunk(2))
    assert rig.playout.can_start
    rig.playout.start(1000)
    again = [rig.playout.picture(slot).decode() for slot in range(1000, 1008)]
    assert int(again[0]) <= 3  # a slot or two may have been decided already
    assert [int(frame) for frame in again] == list(range(int(again[0]), int(again[0]) + 8))


def test_a_stalled_process_skips_slots_not_content() -> None:
    rig = Rig(4)
    for index in range(4):
        rig.give(chunk(index, utterance_id=1, last=index == 3))
    rig.start()
    rig.run(TICKS_PER_CHUNK)
    shown = int(rig.pictures[-1])
    rig.playout.skip_to(24)
    assert int(rig.playout.picture(24)) in (shown + 1, shown + 2)
    for packet in range(50, 80):
        rig.playout.packet(packet)
    events = rig.events + rig.playout.take_events()
    assert [event.kind for event in events] == ["started", "voiced", "finished"]


def test_an_utterance_whose_end_fell_into_a_stall_is_over() -> None:
    rig = Rig(4)
    rig.give(chunk(0, utterance_id=1, last=True, speech=7900))
    for index in range(1, 4):
        rig.give(chunk(index))
    rig.start()
    rig.run(TICKS_PER_CHUNK - 24)
    rig.playout.picture(3)  # decided, but its sound never left
    rig.playout.skip_to(24)
    rig.playout.packet(50)
    events = rig.events + rig.playout.take_events()
    assert [event.kind for event in events] == ["started", "voiced", "finished"]


def test_a_frame_rate_that_does_not_divide_48_khz_is_refused() -> None:
    with pytest.raises(ValueError, match="fps"):
        Playout(fps=7, voice_samples_per_chunk=CHUNK, target_chunks=2)
