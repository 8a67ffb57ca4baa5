"""What is exported: bounded labels, rates of whole sessions, stages of a turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from characters_serve import metrics as metrics_module
from characters_serve.messages import GpuMemory, HostMetrics, StepCounts, VideoChunk
from characters_serve.metrics import Metrics, end_reason
from characters_serve.session.counters import COUNTERS, TURN_STAGE, Counters
from characters_serve.session.degrade import DegradeLadder
from characters_serve.session.encoders import EncoderThread
from characters_serve.session.events import EventsChannel
from characters_serve.session.peer import Peer
from characters_serve.session.playout import Playout
from characters_serve.session.reporter import Reporter

FPS = 24


def registry() -> Metrics:
    return Metrics(
        sessions_by_state=lambda: {"live": 1}, groups_by_state=lambda: {"ready": 2}, tasks=lambda: 3
    )


class InventedPeer:
    """Sends `frames` pictures between two reports."""

    def __init__(self) -> None:
        self.frames = 0
        self.rate = SimpleNamespace(rtt_s=0.02, kbps=1200)
        self.delivery = SimpleNamespace(take_counts=self._take)

    def take_encode_ms(self) -> list[float]:
        return [4.0]

    def _take(self) -> tuple[int, int]:
        taken, self.frames = self.frames, 0
        return taken, 0


class Session:
    """A reporter whose time, pictures and holds are invented."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.playout = Playout(fps=FPS, voice_samples_per_chunk=8000, target_chunks=2)
        ladder = DegradeLadder(
            passes=4, degraded_passes=2, idle_passes=2, period_s=1 / 6, overlapped=True
        )
        self.reporter = Reporter(
            self.counters, EventsChannel(), self.playout, ladder, FPS, now_s=0.0
        )
        self.peer = InventedPeer()
        self.now_s = 0.0

    def seconds(self, count: int, frames: int = FPS, held: int = 0, connected: bool = True) -> None:
        for _ in range(count):
            self.now_s += 1.0
            self.peer.frames = frames
            self.playout.held_slots += held
            self.reporter.tick(self.now_s, cast(Peer, self.peer) if connected else None)

    def finish(self) -> HostMetrics:
        self.reporter.finish()
        return self.counters.take()


def test_a_steady_session_has_its_rate() -> None:
    session = Session()
    session.seconds(1, frames=3)  # the second in which it began
    session.seconds(20)
    taken = session.finish()
    assert taken.observations["session_fps"] == [24.0]
    assert taken.observations["encode_ms"] == [4.0] * 21
    assert taken.counters["sessions_measured_total"] == 1
    assert taken.counters["sessions_slow_total"] == 0


def test_held_pictures_are_not_new_ones() -> None:
    session = Session()
    session.seconds(21, held=1)
    taken = session.finish()
    assert taken.observations["session_fps"] == [pytest.approx(23.0)]
    assert taken.counters["sessions_slow_total"] == 1
    assert taken.counters["held_ms_total"] == pytest.approx(21 * 1000 / FPS)


def test_a_gap_without_a_client_is_no_slowness() -> None:
    session = Session()
    session.seconds(10)
    session.seconds(10, frames=0, connected=False)
    session.seconds(1, frames=5)
    session.seconds(10)
    assert session.finish().observations["session_fps"] == [24.0]


def test_a_moment_is_not_measured() -> None:
    session = Session()
    session.seconds(4)
    taken = session.finish()
    assert "session_fps" not in taken.observations
    assert taken.counters["sessions_measured_total"] == 0


def test_the_watchdog_counts_each_stall_once_and_shows_it_while_it_lasts() -> None:
    session = Session()
    for waited_s, shown in ((0.1, 0), (1.9, 0), (2.1, 1), (3.0, 1), (0.0, 0), (2.5, 1)):
        session.reporter.chunk_awaited(waited_s)
        assert session.counters.take().gauges["chunk_stalled"] == shown
    assert session.counters.take().counters["chunk_watchdog_total"] == 2


def test_shares_at_or_below_the_mark_can_be_read_from_the_histogram() -> None:
    metrics = registry()
    metrics.absorb("g0", HostMetrics({}, {}, {"session_fps": [24.0, 23.5, 23.51, 12.0]}))
    text = metrics.render().decode()
    assert 'characters_session_fps_bucket{le="23.5"} 2.0' in text
    assert "characters_session_fps_count 4.0" in text


def test_every_host_counter_is_there_before_a_host_reports() -> None:
    text = registry().render().decode()
    for name, words in COUNTERS.items():
        assert f"\n# HELP characters_{name} {words}\n" in text
        assert f"\ncharacters_{name} 0.0" in text


def test_stages_are_labels_and_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "_MAX_STAGES", 3)
    metrics = registry()
    for name in ("transcript", "reply", "No Name!", "first_audio", "one_more"):
        metrics.absorb("g0", HostMetrics({}, {}, {TURN_STAGE + name: [300.0]}))
    text = metrics.render().decode()
    assert 'characters_turn_stage_ms_count{stage="first_audio"} 1.0' in text
    assert "No Name" not in text and "one_more" not in text


def test_what_ranks_count_is_summed_and_their_memory_stays_apart() -> None:
    counters, metrics = Counters(), registry()
    for process, saturated in (("rank0", 2), ("rank1", 3)):
        for _ in range(2):
            counters.engine(StepCounts(process, 6, 1, saturated, plain_sums=60))
    for process, used_bytes in (("rank0", 1), ("rank1", 7), ("decoder", 5), ("rank0", 8)):
        counters.engine(GpuMemory(process, used_bytes * 10**9))
    metrics.absorb("g0", counters.take())
    text = metrics.render().decode()
    assert "\ncharacters_rank_steps_total 24.0" in text
    assert "\ncharacters_eager_steps_total 4.0" in text
    assert "\ncharacters_fp8_saturated_total 10.0" in text
    assert "\ncharacters_plain_sums_total 240.0" in text
    for process, used in (("rank0", "8e+09"), ("rank1", "7e+09"), ("decoder", "5e+09")):
        assert f'characters_gpu_memory_bytes{{group="g0",process="{process}"}} {used}' in text
    metrics.forget("g0")
    assert "gpu_memory_bytes{" not in metrics.render().decode()


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("ended by the user", "user"),
        ("maximum duration", "max_duration"),
        ("idle timeout", "idle"),
        ("no client connected in time", "never_connected"),
        ("the client did not come back", "connection_lost"),
        ("the server is shutting down", "shutdown"),
        ("the engine sent no chunk for 10 s", "engine_stalled"),
        ("decoder exited with code -9", "process_died"),
        ("g0-a1b2c3: no answer to Offer in 15 s", "host_silent"),
        ("anything that a stranger could say", "other"),
    ],
)
def test_reasons_become_a_few_words(reason: str, label: str) -> None:
    assert end_reason(reason) == label
    metrics = registry()
    metrics.sessions_ended.labels("ended", end_reason(reason)).inc()
    sample = f'characters_sessions_ended_total{{reason="{label}",state="ended"}} 1.0'
    assert sample in metrics.render().decode()


@pytest.mark.parametrize(("utterance_id", "silent"), [(1, 3), (0, 0)])
def test_a_hold_is_silent_only_where_speech_should_sound(utterance_id: int, silent: int) -> None:
    playout = Playout(fps=FPS, voice_samples_per_chunk=8000, target_chunks=2)
    playout.step_sent(0.0, speaking=utterance_id != 0)
    frames, voice = [b""] * 4, bytes(16_000)
    playout.push(VideoChunk("s", 0, 0, frames, voice, utterance_id, 0.0, False, 4, 1.0, 1.0), 0.1)
    playout.start(0)
    playout.picture(6)
    assert (playout.held_slots, playout.silent_slots) == (3, silent)


def test_each_pictures_encoding_is_timed_once() -> None:
    thread = EncoderThread()
    assert thread.submit(sum, (1, 2)).result() == 3
    thread.shutdown()
    (encode_ms,) = thread.take_times_ms()
    assert encode_ms >= 0 and thread.take_times_ms() == []
