"""What the turn benchmark makes of a browser's record: no browser, no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from characters_serve.bench.turns import SPACING_S, collect, summary, write_microphone


def event(at_ms: float, kind: str, **data: Any) -> dict[str, Any]:
    return {"atMs": at_ms, "type": kind, "data": data}


def test_each_question_gets_its_own_turn() -> None:
    first = {"end_of_turn": 320.0, "first_audio": 400.0, "voice": 700.0}
    second = {"end_of_turn": 512.0, "first_audio": 600.0, "voice": 1000.0}
    step_ms = 1000 * SPACING_S
    watched = {
        "micAtMs": 1000.0,
        "onsets": [6750.0, 6000.0 + step_ms + 1100.0],
        "events": [
            event(6330.0, "user-transcription", text="who are you", final=True),
            event(6700.0, "metrics", turn=first, turn_latency_ms=700),
            event(6900.0, "metrics", fps=24.0, held_ms=0, late=0),
            event(6000.0 + step_ms + 1000.0, "metrics", turn=second, turn_latency_ms=1000),
        ],
    }
    asked = [("Who are you?", 5.0), ("Why?", 5.0 + SPACING_S), ("Lost?", 5.0 + 2 * SPACING_S)]
    turns = collect(watched, asked)
    assert [turn["heard"] for turn in turns] == ["who are you", "", ""]
    assert turns[0]["stages_ms"] == {**first, "heard_in_browser": 750.0}
    assert turns[1]["stages_ms"]["heard_in_browser"] == 1100.0
    assert turns[2]["stages_ms"] == {}
    stages = summary(turns)
    assert stages["first_audio_to_voice"] == {"median": 350.0, "p95": 395.0}
    assert stages["voice"]["median"] == 850.0
    assert next(iter(stages)) == "first_audio_to_voice"


def test_the_microphone_asks_when_it_says(tmp_path: Path) -> None:
    path = tmp_path / "microphone.wav"
    (text, first_s), (_, second_s) = write_microphone(path, 2)
    assert text.endswith("?")
    assert 8.3 < first_s < 10.5
    assert second_s - first_s > 8
    assert path.stat().st_size > 2 * 48_000 * 60
