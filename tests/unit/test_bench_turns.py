"""What the turn benchmark makes of a browser's record: no browser, no server."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from characters_serve.bench.turns import (
    COLOURS,
    SPACING_S,
    barge_in_ms,
    collect,
    draw,
    main,
    summary,
    write_microphone,
)


def event(at_ms: float, kind: str, **data: Any) -> dict[str, Any]:
    return {"atMs": at_ms, "type": kind, "data": data}


FIRST = {"end_of_turn": 320.0, "first_audio": 400.0, "frames": 550.0, "voice": 700.0}
SECOND = {"end_of_turn": 512.0, "first_audio": 600.0, "frames": 750.0, "voice": 1000.0}
STEP_MS = 1000 * SPACING_S
WATCHED = {
    "micAtMs": 1000.0,
    "sounds": [[6750.0, 9000.0], [6000.0 + STEP_MS + 1100.0, 6000.0 + STEP_MS + 3300.0]],
    "events": [
        event(6330.0, "user-transcription", text="who are you", final=True),
        event(6700.0, "metrics", turn=FIRST, turn_latency_ms=700),
        event(6850.0, "metrics", turn={**FIRST, "heard": 820.0}),
        event(6900.0, "metrics", fps=24.0, held_ms=0, late=0),
        event(6000.0 + STEP_MS + 1000.0, "metrics", turn=SECOND, turn_latency_ms=1000),
    ],
}
ASKED = [("Who are you?", 5.0), ("Why?", 5.0 + SPACING_S), ("Lost?", 5.0 + 2 * SPACING_S)]


def test_each_question_gets_its_own_turn() -> None:
    turns = collect(WATCHED, ASKED)
    assert [turn["heard"] for turn in turns] == ["who are you", "", ""]
    assert turns[0]["stages_ms"] == {**FIRST, "heard": 820.0}
    assert turns[1]["stages_ms"] == SECOND
    assert turns[2]["stages_ms"] == {}
    stages = summary(turns)
    assert stages["first_audio_to_voice"] == {"median": 350.0, "p95": 395.0}
    assert stages["voice"]["median"] == 850.0
    assert stages["part_frames"]["median"] == 150.0 and stages["part_heard"]["median"] == 120.0


def test_who_speaks_over_an_answer_waits_for_its_last_sound() -> None:
    assert barge_in_ms(WATCHED, 7.8) == 200.0
    assert barge_in_ms(WATCHED, 8.5) is None, "the answer was over by then"


def test_the_microphone_asks_when_it_says(tmp_path: Path) -> None:
    path = tmp_path / "microphone.wav"
    script = write_microphone(path, ["What is your name?", "Why?"])
    (text, first_s), (_, second_s) = script.asked
    assert text == "What is your name?"
    assert 6.3 < first_s < 8.5
    assert second_s - first_s > 7
    assert script.over_it_begins_s > second_s + SPACING_S
    assert path.stat().st_size > 2 * 48_000 * 60
    with wave.open(str(path)) as file:
        sound = np.abs(np.frombuffer(file.readframes(file.getnframes()), "<i2")[: -60 * 48_000])
    over_it = round(script.over_it_begins_s * 48_000)
    assert sound[over_it] > 327 and sound[over_it - 48_000 : over_it].max() <= 327
    assert len(sound) - over_it > 0.8 * 48_000, "of three words, the first"


def test_the_chart_shows_every_share(tmp_path: Path) -> None:
    path = tmp_path / "turns.png"
    draw({"stages_ms": summary(collect(WATCHED, ASKED)), "turn_s_median": 0.82}, path)
    with Image.open(path) as image:
        seen = {colour for _, colour in image.convert("RGB").getcolors(1 << 20) or []}
    for shade, _ in COLOURS.values():
        assert tuple(bytes.fromhex(shade[1:])) in seen


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--turns", "3", "--sessions", "4"])
