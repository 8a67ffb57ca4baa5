"""The session's small policies, with invented clocks."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from characters_serve.session.clock import MediaClock
from characters_serve.session.counters import Counters
from characters_serve.session.degrade import WARMUP_CHUNKS, DegradeLadder
from characters_serve.session.lifecycle import Changed, EndingSoon, Lifecycle, Limits, Over
from characters_serve.session.microphone import Microphone, loudness

LIMITS = Limits(
    max_duration_s=600,
    idle_timeout_s=100,
    connect_timeout_s=30,
    reconnect_grace_s=20,
    ending_notice_s=30,
)

# ---------------------------------------------------------------- clock


@given(slot=st.integers(0, 10_000_000), fps=st.sampled_from([16, 24, 25, 30]))
def test_slots_and_packets_are_found_again_at_their_due_time(slot: int, fps: int) -> None:
    clock = MediaClock(1234.5, 1.7e9, fps)
    assert clock.slot_at(clock.video_due_s(slot)) == slot
    assert clock.packet_at(clock.audio_due_s(slot)) == slot


def test_ntp_counts_from_1900() -> None:
    clock = MediaClock(50.0, 0.0, 24)
    assert clock.ntp(0.5) == (2_208_988_800 << 32) + (1 << 31)
    assert clock.media_ms(51.5) == 1500


# ---------------------------------------------------------------- lifecycle


def test_nobody_connects() -> None:
    life = Lifecycle(LIMITS, 0)
    assert life.tick(29) == []
    assert life.tick(31) == [Over("no client connected in time")]


def test_a_lost_client_has_its_grace_and_comes_back() -> None:
    life = Lifecycle(LIMITS, 0)
    assert life.connected(1) == [Changed("live", "")]
    assert life.lost(10, "the connection failed") == [
        Changed("reconnecting", "the connection failed")
    ]
    assert life.tick(29) == []
    assert life.connected(29) == [Changed("live", "")]
    assert life.tick(40) == []
    life.lost(41, "x")
    assert life.tick(62) == [Over("the client did not come back")]


def test_a_silent_probe_is_reconnecting_until_it_is_heard_again() -> None:
    life = Lifecycle(LIMITS, 0)
    life.connected(1)
    assert life.tick(9) == []  # a client without a probe is ICE's business
    assert life.beat(10) == []
    assert life.tick(14.9) == []
    assert life.tick(15.1) == [Changed("reconnecting", "no heartbeat from the client")]
    assert life.beat(16) == [Changed("live", "")]
    life.tick(22)
    assert life.tick(43) == [Over("the client did not come back")]


def test_ends_are_announced_once_and_speech_puts_off_idleness() -> None:
    life = Lifecycle(LIMITS, 0)
    life.connected(20)
    assert life.tick(89) == []
    assert life.tick(91) == [EndingSoon("idle timeout", 29_000)]
    assert life.tick(92) == []
    life.activity(95)
    assert life.tick(150) == []
    assert life.tick(166) == [EndingSoon("idle timeout", 29_000)]
    for now_s in range(170, 590, 10):
        life.activity(now_s)
        assert life.tick(now_s) == []
    life.activity(591)
    assert life.tick(591) == [EndingSoon("maximum duration", 29_000)]
    assert life.tick(620) == [Over("maximum duration")]


def test_old_activity_does_not_renew_a_notice() -> None:
    life = Lifecycle(LIMITS, 0)
    life.connected(0)
    assert life.tick(80) == [EndingSoon("idle timeout", 20_000)]
    life.activity(0)
    assert life.tick(81) == []


# ---------------------------------------------------------------- degrade ladder


def ladder(*, passes: int = 4, overlapped: bool = True) -> DegradeLadder:
    made = DegradeLadder(
        passes=passes, degraded_passes=2, idle_passes=2, period_s=0.16, overlapped=overlapped
    )
    for _ in range(WARMUP_CHUNKS):
        made.chunk(0, made.passes, 1000, 1000)  # the first chunks are slow and say nothing
    return made


def test_a_fast_engine_keeps_all_passes() -> None:
    made = ladder()
    for second in range(100):
        made.chunk(second, made.passes, 100, 120)  # overlapped: 120 of 160 ms
    assert made.passes == 4 and made.load == pytest.approx(0.75)


def test_chunks_in_which_nothing_is_said_have_fewer_passes_and_hide_no_trouble() -> None:
    made = ladder()
    assert (made.passes, made.idle_passes) == (4, 2)
    for second in range(20):
        made.chunk(second, 4, 150, 50)
        made.chunk(second, 2, 80, 50)
    assert made.passes == made.idle_passes == 2
    made.chunk(40, 2, 80, 50)
    assert made.passes == 4, "what idles shows that the engine keeps up again"


def test_an_engine_with_nothing_to_leave_out_is_late_and_not_degraded() -> None:
    made = ladder(passes=2)
    for second in range(20):
        made.chunk(second, 2, 200, 50)
        made.underrun(second)
    assert not made.degraded and made.load > 1


def test_one_process_for_both_must_fit_both() -> None:
    made = ladder(overlapped=False)
    for second in range(20):
        made.chunk(second, made.passes, 100, 120)
    assert made.passes == 2


def test_degrades_when_late_and_recovers_after_calm() -> None:
    made = ladder()
    for chunk in range(20):
        made.chunk(chunk / 6, made.passes, 150, 50)
    assert made.passes == 2
    made.chunk(4.0, made.passes, 80, 50)
    made.chunk(7.0, made.passes, 80, 50)
    assert made.passes == 2
    made.chunk(9.0, made.passes, 80, 50)
    assert made.passes == 4


def test_relapses_wait_longer_each_time() -> None:
    made = ladder()
    now_s, waits = 0.0, []
    for _ in range(4):
        made.underrun(now_s)
        start_s = now_s
        while made.degraded:
            now_s += 0.16
            made.chunk(now_s, made.passes, 80, 50)
        waits.append(now_s - start_s)
        now_s += 1.0
    assert waits == pytest.approx([5, 10, 20, 40], abs=0.2)


# ---------------------------------------------------------------- microphone


def heard(pts: int, samples: int = 960, level: int = 1000) -> av.AudioFrame:
    pcm = np.full((1, 2 * samples), level, np.int16)
    frame = av.AudioFrame.from_ndarray(pcm, format="s16", layout="stereo")
    frame.sample_rate = 48_000
    frame.pts = pts
    frame.time_base = Fraction(1, 48_000)
    return frame


def test_the_microphone_becomes_16_khz_pieces_of_20_ms() -> None:
    microphone = Microphone(0.0)
    quiet = [microphone.frame(heard(960 * k, level=0), 0.02 * k) for k in range(25)]
    loud = [microphone.frame(heard(960 * k), 0.02 * k) for k in range(25, 50)]
    assert [len(pieces) for pieces in quiet + loud] == [1] * 50, "none waits for the next frame"
    assert {len(piece) for (piece,) in quiet + loud} == {640}
    assert abs(int(np.frombuffer(loud[20][0], np.int16)[100]) - 1000) <= 2
    heard_at_once = np.frombuffer(loud[0][0], np.int16) > 500
    assert np.count_nonzero(heard_at_once) >= 300  # the resampler keeps 1 ms


def test_lost_packets_become_silence_and_time_goes_on() -> None:
    microphone = Microphone(0.0)
    count = sum(len(microphone.frame(heard(960 * k), 0.02 * k)) for k in range(10))
    count += len(microphone.frame(heard(960 * 20), 0.4))
    assert count == 21
    # Silence given meanwhile is not given twice.
    for _ in range(5):
        count += len(microphone.silence())
    count += len(microphone.frame(heard(960 * 31), 0.62))
    assert count == 32


def test_a_flood_is_dropped() -> None:
    microphone = Microphone(0.0)
    for k in range(500):
        microphone.frame(heard(960 * k), 1.0)
    assert microphone.dropped_frames >= 440


def test_loudness_is_between_0_and_1() -> None:
    assert loudness(bytes(640)) == 0
    assert loudness(np.full(320, 32_000, np.int16).tobytes()) == 1
    assert loudness(b"") == 0


# ---------------------------------------------------------------- counters


def test_observations_are_handed_out_once_and_counts_stay() -> None:
    counters = Counters()
    counters.count("chunks_total")
    counters.observe("step_ms", 5.0)
    counters.gauge("rtt_ms", 1.0)
    counters.gauge("rtt_ms", None)
    first, second = counters.take(), counters.take()
    assert first.observations == {"step_ms": [5.0]} and second.observations == {}
    assert second.counters["chunks_total"] == 1 and second.gauges == {}
    with pytest.raises(KeyError):
        counters.count("misspelt_total")
