"""A session's trace: each chunk on each hop, in a file that trace viewers read."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from characters_serve.config import AgentConfig, Config, EngineConfig, ModelConfig, ServerConfig
from characters_serve.messages import Done, VideoChunk
from characters_serve.session.trace import LANES, NoTrace, Trace, open_trace
from tests.unit.session_rig import Browser, HostParent
from tests.waiting import until


def chunk(index: int) -> VideoChunk:
    return VideoChunk("s", 3, index, [], b"", 0, 0.0, False, 4, 60.0, 30.0, 10.0, 10.07)


def spans(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Complete events by the name of their lane."""
    events = json.loads(path.read_text())
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[lanes[event["tid"]]].append(event)
    return found


def test_a_chunk_is_followed_from_its_step_to_its_first_picture(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", "session 01234567", 4 / 24)
    trace.event("live", 9.0)
    trace.sent(7, 9.95)
    trace.arrived(chunk(7), 10.11)
    for now_s in (10.2, 10.21, 10.24):
        trace.playing(7, now_s)
    trace.close()
    times = {
        lane: [(round(e["ts"] / 1e6, 6), round(e["dur"] / 1e3, 3)) for e in events]
        for lane, events in spans(tmp_path / "t.json").items()
    }
    assert times == {
        "engine owes": [(9.95, 160.0)],
        "rank": [(10.0, 60.0)],
        "decoder": [(10.07, 30.0)],
        "buffer": [(10.11, 90.0)],
        "play": [(10.2, 166.667)],
    }
    assert set(times) | {"session"} == set(LANES)
    about = spans(tmp_path / "t.json")["rank"][0]["args"]
    assert about == {"chunk": 7, "epoch": 3, "passes": 4}


def test_nobody_asked_and_nothing_is_written(tmp_path: Path) -> None:
    assert isinstance(open_trace(None, "s" * 32, "t" * 32, chunk_s=1.0), NoTrace)
    (tmp_path / "file").touch()
    assert isinstance(
        open_trace(str(tmp_path / "file" / "x"), "s" * 32, "t" * 32, chunk_s=1.0), NoTrace
    )


def test_it_is_named_by_its_session_and_its_w3c_trace(tmp_path: Path) -> None:
    open_trace(str(tmp_path), "0123456789abcdef" * 2, "4bf92f35" * 4, chunk_s=1.0).close()
    (path,) = tmp_path.iterdir()
    (named,) = (e["args"] for e in json.loads(path.read_text()) if e["name"] == "process_name")
    assert named == {"name": f"session 01234567, trace {'4bf92f35' * 4}"}


def test_a_full_disk_ends_the_trace_only(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(Path("/dev/full"), "01234567", 1.0)
    for index in range(2000):
        trace.sent(index, 1.0)
        trace.arrived(chunk(index), 2.0)
    trace.close()
    assert [r.getMessage() for r in caplog.records if "trace" in r.getMessage()]


async def test_a_live_session_is_traced_on_every_hop(tmp_path: Path) -> None:
    group, traces = tmp_path / "group", tmp_path / "traces"
    group.mkdir()
    config = Config(
        model=ModelConfig(width=192, height=128),
        engine=EngineConfig(kind="pattern"),
        agent=AgentConfig(kind="none"),
        server=ServerConfig(trace_dir=str(traces)),
    )
    host = HostParent(group, config)
    await host.start()
    session_id = "0123456789abcdef" * 2
    assert isinstance(await host.open(session_id), Done)
    browser = Browser()
    await host.connect(session_id, browser)
    await until(lambda: len(browser.pictures) > 48, 30)
    await host.close(session_id)
    await browser.close()
    await host.stop()
    (path,) = traces.iterdir()
    assert path.name.endswith("-01234567.json") and session_id not in path.read_text()
    lanes = spans(path)
    played = {event["args"]["chunk"] for event in lanes["play"]}
    assert len(played) > 10 and played <= {event["args"]["chunk"] for event in lanes["decoder"]}
    for event in lanes["decoder"]:
        (owed,) = (e for e in lanes["engine owes"] if e["name"] == event["name"])
        assert owed["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= owed["ts"] + owed["dur"] + 1
