"""The HTTP API against real group processes: what is admitted, refused, ended and told."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.routing import WebSocketRoute

from characters_serve.config import Config, load_config
from characters_serve.fleet import group as group_module
from characters_serve.fleet import queue as queue_module
from characters_serve.gateway import app as app_module
from characters_serve.gateway import characters as characters_module
from characters_serve.gateway import limits, service, sessions
from characters_serve.gateway.app import create_app
from characters_serve.gateway.images import load_reference

ROOT = Path(__file__).parents[2]
BASE = "http://127.0.0.1:8080"
SDP = {"Content-Type": "application/sdp"}
OFFER = "v=0\r\na=ice-ufrag:abcd\r\n"


def picture(colour: str = "teal", size: tuple[int, int] = (96, 64)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("CHARACTERS_API_KEY", raising=False)
    presets = tmp_path / "presets"
    presets.mkdir()
    (presets / "ada.png").write_bytes(picture())
    entry = {
        "id": "ada",
        "name": "Ada",
        "style": "flat",
        "persona": "A lighthouse keeper.",
        "age": 61,
        "likes": ["storms"],
        "greeting": "Ahoy.",
    }
    (presets / "characters.json").write_text(json.dumps([entry]))
    monkeypatch.setattr(service, "load_characters", lambda: _load(presets))


_load = characters_module.load_characters


def app_config(tmp_path: Path, *overrides: str) -> Config:
    return load_config(
        overrides=[
            f"server.run_dir={tmp_path / 'run'}",
            "fleet.stop_timeout_s=2",
            "model.width=96",
            "model.height=64",
            *overrides,
        ]
    )


class Api:
    def __init__(self, http: httpx.AsyncClient, app: FastAPI) -> None:
        self.http = http
        self.app = app
        self.gateway: service.Gateway = app.state.gateway

    async def until(self, true: Callable[[], object], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not true():
                await asyncio.sleep(0.02)

    def groups(self, state: str) -> int:
        return {str(s): n for s, n in self.gateway.fleet.pool.counts().items()}[state]

    async def create(self, persona: str = "") -> dict[str, Any]:
        response = await self.http.post(
            "/v1/sessions", files={"image": picture()}, data={"persona": persona}
        )
        assert response.status_code == 201, response.text
        return dict(response.json())

    async def status(self, session: dict[str, Any]) -> dict[str, Any]:
        response = await self.http.get(f"/v1/sessions/{session['id']}", headers=secret_of(session))
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def reach(self, session: dict[str, Any], state: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while (now := await self.status(session))["status"] != state:
                await asyncio.sleep(0.02)
        return now

    async def offer(
        self, session: dict[str, Any], sdp: str = OFFER, query: str = ""
    ) -> httpx.Response:
        return await self.http.post(
            f"/v1/sessions/{session['id']}/webrtc{query}",
            content=sdp,
            headers={**secret_of(session), **SDP},
        )

    async def metric(self, line: str) -> float:
        text = (await self.http.get("/metrics")).text
        return next(
            (float(row.split()[-1]) for row in text.splitlines() if row.startswith(line + " ")), 0.0
        )


def resumed(session: dict[str, Any], answer: httpx.Response) -> dict[str, Any]:
    """The session as its client knows it once it has an answer."""
    return {**session, "client_secret": {"value": answer.headers["resume-token"]}}


def secret_of(session: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {session['client_secret']['value']}"}


@asynccontextmanager
async def serving(config: Config, wait: bool = True) -> AsyncIterator[Api]:
    app = create_app(config, host_module="tests.fake_host")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url=BASE) as http,
    ):
        api = Api(http, app)
        if wait:
            await api.until(lambda: api.groups("ready"))
        yield api


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serving(app_config(tmp_path)) as running:
        yield running


def problem(response: httpx.Response, status: int, field: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    field = "Authorization" if status == 401 else field
    assert body["status"] == status and body["title"] and body.get("field") == field, body
    return str(body["detail"])


# ---------------------------------------------------------------- a session's life


async def test_from_creation_to_the_end(api: Api) -> None:
    response = await api.http.post("/v1/sessions", json={"character": "ada", "max_duration_s": 60})
    assert response.status_code == 201 and response.headers["cache-control"] == "no-store"
    session = response.json()
    assert len(session["id"]) == 32 and session["status"] in ("starting", "ready")
    assert session["max_duration_s"] == 60 and session["idle_timeout_s"] == 300
    assert session["video"] == {"width": 96, "height": 64, "fps": 24}
    assert session["ice_servers"] == [] and session["character"] == "ada"
    assert response.headers["location"] == f"/v1/sessions/{session['id']}"

    answer = await api.offer(session)
    assert answer.status_code == 201 and answer.text.startswith("v=0")
    assert answer.headers["content-type"].startswith("application/sdp")
    location = answer.headers["location"]
    await api.reach(session, "live")
    assert await api.metric('characters_sessions{state="live"}') == 1
    assert await api.metric('characters_groups{state="live"}') == 1

    for path, body in (("interrupt", None), ("say", {"text": "Hello there"})):
        response = await api.http.post(
            f"/v1/sessions/{session['id']}/{path}", json=body, headers=secret_of(session)
        )
        assert response.status_code == 204
    for _ in range(2):
        response = await api.http.delete(location, headers=secret_of(session))
        assert response.status_code == 204
    assert (await api.reach(session, "ended"))["reason"] == "ended by the user"
    await api.until(lambda: api.groups("ready"))
    assert await api.metric('characters_sessions_ended_total{reason="user",state="ended"}') == 1
    problem(await api.offer(session), 410)
    await api.create()


async def test_how_an_uploaded_picture_moves_is_told_and_a_presets_needs_no_trial(api: Api) -> None:
    session = await api.create()
    assert session["picture"] is None, "it is not tried yet"
    async with asyncio.timeout(20):
        while (picture := (await api.status(session))["picture"]) is None:
            await asyncio.sleep(0.02)
    assert picture == {"expression": 0.02, "least": 0.1, "familiar": False}
    await api.offer(session)
    assert (await api.reach(session, "live"))["picture"] == picture
    await api.http.delete(f"/v1/sessions/{session['id']}", headers=secret_of(session))
    await api.until(lambda: api.groups("ready"))
    preset = (await api.http.post("/v1/sessions", json={"character": "ada"})).json()
    await api.offer(preset)
    assert (await api.reach(preset, "live"))["picture"] is None


async def test_json_offers_are_answered_in_json(api: Api) -> None:
    session = await api.create()
    response = await api.http.post(
        f"/v1/sessions/{session['id']}/webrtc",
        json={"sdp": OFFER, "type": "offer"},
        headers=secret_of(session),
    )
    assert response.status_code == 201
    assert response.json() == {
        "sdp": "v=0\r\nanswer",
        "type": "answer",
        "location": response.headers["location"],
        "resume_token": response.headers["resume-token"],
    }


async def test_an_offer_waits_for_the_character(api: Api) -> None:
    session = await api.create("slow")
    assert session["status"] == "starting"
    assert (await api.offer(session)).status_code == 201


async def test_an_offer_does_not_wait_for_ever(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "OFFER_WAIT_S", 0.1)
    session = await api.create("slow")
    assert "still being prepared" in problem(await api.offer(session), 409)


async def test_a_second_offer_needs_takeover(api: Api) -> None:
    session = await api.create()
    answer = await api.offer(session)
    assert answer.status_code == 201
    session = resumed(session, answer)
    problem(await api.offer(session), 409)
    assert (await api.offer(session, query="?takeover=1")).status_code == 201
    assert api.groups("live") == 1


async def test_a_client_secret_makes_one_connection_and_the_resume_token_the_others(
    api: Api,
) -> None:
    session = await api.create()
    answer = await api.offer(session)
    await api.reach(session, "live")
    assert "resume token" in problem(await api.offer(session, query="?takeover=1"), 403)
    client = resumed(session, answer)
    for _ in range(2):
        answer = await api.offer(client, query="?takeover=1")
        assert answer.status_code == 201
        client = resumed(client, answer)
    other = await api.http.delete(f"/v1/sessions/{'0' * 32}", headers=secret_of(client))
    problem(other, 404)


async def test_a_connection_that_came_to_nothing_may_be_tried_again(api: Api) -> None:
    session = await api.create()
    problem(await api.offer(session, OFFER + "refuse"), 400)
    assert (await api.offer(session)).status_code == 201


async def test_an_expired_secret_ends_no_session_and_the_resume_token_goes_on(api: Api) -> None:
    session = await api.create()
    client = resumed(session, await api.offer(session))
    await api.reach(session, "live")
    began_s = api.gateway.now_unix_s()
    api.gateway.now_unix_s = lambda: began_s + 600.0  # type: ignore[assignment]
    path = f"/v1/sessions/{session['id']}"
    problem(await api.http.get(path, headers=secret_of(session)), 401)
    assert (await api.status(client))["status"] == "live"
    assert (await api.http.delete(path, headers=secret_of(client))).status_code == 204
    await api.until(lambda: api.groups("ready"))


async def test_a_step_of_the_wall_clock_changes_nothing_live(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.create()
    assert (await api.offer(session)).status_code == 201
    await api.reach(session, "live")
    real = time.time
    for step_s in (86_400.0, -86_400.0):
        monkeypatch.setattr(time, "time", lambda step_s=step_s: real() + step_s)
        await asyncio.sleep(1.2)  # the sweeps have looked
        assert (await api.status(session))["status"] == "live"
    path = f"/v1/sessions/{session['id']}"
    assert (await api.http.delete(path, headers=secret_of(session))).status_code == 204
    await api.until(lambda: api.groups("ready"))


async def test_offers_at_the_same_time_are_answered_one_by_one(api: Api) -> None:
    session = await api.create()
    answers = await asyncio.gather(*(api.offer(session) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409]
    client = resumed(session, next(a for a in answers if a.status_code == 201))
    answers = await asyncio.gather(*(api.offer(client, OFFER + "slow") for _ in range(3)))
    assert [answer.status_code for answer in answers] == [201] * 3


async def test_a_beacon_ends_the_session(api: Api) -> None:
    session = await api.create()
    response = await api.http.post(
        f"/v1/sessions/{session['id']}/end", content=session["client_secret"]["value"]
    )
    assert response.status_code == 204
    await api.reach(session, "ended")


async def test_what_the_host_ends_is_ended(api: Api) -> None:
    session = await api.create()
    await api.reach(session, "ready")
    await api.gateway.sessions.say(api.gateway.sessions.get(session["id"]), "end")  # type: ignore[arg-type]
    assert (await api.reach(session, "ended"))["reason"] == "maximum duration"
    await api.until(lambda: api.groups("ready"))


async def test_a_session_ended_while_it_opens_is_closed_once_it_has(api: Api) -> None:
    session = await api.create("slow")
    await api.http.delete(f"/v1/sessions/{session['id']}", headers=secret_of(session))
    assert (await api.status(session))["status"] == "ended"
    assert api.groups("ready") == 0
    assert (await api.offer(await api.create())).status_code == 201
    assert await api.metric("characters_groups_lost_total") == 0


# ---------------------------------------------------------------- full


async def test_one_of_eight_is_admitted_and_the_rest_are_told_when_to_come_back(api: Api) -> None:
    responses = await asyncio.gather(
        *(api.http.post("/v1/sessions", json={"character": "ada"}) for _ in range(8))
    )
    assert sorted(r.status_code for r in responses) == [201] + [503] * 7
    for response in responses:
        if response.status_code == 503:
            problem(response, 503)
            assert int(response.headers["retry-after"]) >= 1
    assert await api.metric('characters_sessions_refused_total{why="full"}') == 7


# ---------------------------------------------------------------- the queue


@asynccontextmanager
async def queueing(tmp_path: Path, *overrides: str) -> AsyncIterator[Api]:
    async with serving(app_config(tmp_path, "server.queue_size=2", *overrides)) as api:
        yield api


async def test_who_finds_no_free_group_waits_for_a_turn(tmp_path: Path) -> None:
    async with queueing(tmp_path) as api:
        talking = await api.create()
        first, second = await api.create(), await api.create()
        assert [s["status"] for s in (first, second)] == ["queued"] * 2
        assert [s["queue_position"] for s in (first, second)] == [1, 2]
        full = await api.http.post("/v1/sessions", json={"character": "ada"})
        assert problem(full, 503) and int(full.headers["retry-after"]) >= 1
        assert "queue" in problem(await api.offer(first), 409)
        poll = await api.http.get(f"/v1/sessions/{second['id']}", headers=secret_of(second))
        assert poll.json()["queue_position"] == 2 and poll.headers["retry-after"] == "2"
        assert await api.metric('characters_sessions{state="queued"}') == 2

        await api.http.delete(f"/v1/sessions/{talking['id']}", headers=secret_of(talking))
        ready = await api.reach(first, "ready")
        assert "queue_position" not in ready
        assert (await api.offer(first)).status_code == 201
        assert (await api.status(second))["queue_position"] == 1
        await api.http.delete(f"/v1/sessions/{first['id']}", headers=secret_of(first))
        await api.reach(second, "ready")


async def test_who_leaves_the_queue_gives_up_the_place(tmp_path: Path) -> None:
    async with queueing(tmp_path) as api:
        await api.create()
        first, second = await api.create(), await api.create()
        response = await api.http.delete(f"/v1/sessions/{first['id']}", headers=secret_of(first))
        assert response.status_code == 204
        assert (await api.status(first))["status"] == "ended"
        assert (await api.status(second))["queue_position"] == 1
        assert (await api.create())["queue_position"] == 2


async def test_a_client_that_vanishes_from_the_queue_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "SILENCE_S", 0.2)
    async with queueing(tmp_path) as api:
        await api.create()
        gone = await api.create()
        await api.until(lambda: api.gateway.sessions.counts()["queued"] == 0)
        assert "nobody asked" in (await api.status(gone))["reason"]
        line = 'characters_sessions_ended_total{reason="left_queue",state="ended"}'
        assert await api.metric(line) == 1


async def test_waiting_has_an_end(tmp_path: Path) -> None:
    async with queueing(tmp_path, "server.queue_timeout_s=0.1") as api:
        await api.create()
        waiting = await api.create()
        assert "no character became free" in (await api.reach(waiting, "ended"))["reason"]


async def test_a_group_that_dies_serves_the_queue_once_it_is_rebuilt(tmp_path: Path) -> None:
    async with queueing(tmp_path) as api:
        talking, waiting = await api.create(), await api.create()
        await api.reach(talking, "ready")
        await api.http.post(
            f"/v1/sessions/{talking['id']}/say",
            json={"text": "crash"},
            headers=secret_of(talking),
        )
        await api.reach(talking, "failed")
        await api.reach(waiting, "ready")


async def test_a_server_that_leaves_empties_its_queue(tmp_path: Path) -> None:
    async with queueing(tmp_path, "server.drain_s=0.1") as api:
        await api.create()
        waiting = await api.create()
        await api.gateway.drain()
        assert (await api.status(waiting))["reason"] == service.LEAVING


async def test_the_queue_opens_while_the_groups_still_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOST_START", "hang")
    async with serving(app_config(tmp_path, "server.queue_size=1"), wait=False) as api:
        assert (await api.create())["queue_position"] == 1


# ---------------------------------------------------------------- starting, and faults


async def test_the_page_loads_while_no_group_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOST_START", "hang")
    async with serving(app_config(tmp_path), wait=False) as api:
        assert (await api.http.get("/healthz/live")).status_code == 200
        ready = await api.http.get("/healthz/ready")
        assert ready.status_code == 503 and ready.json()["status"] == "starting"
        response = await api.http.post("/v1/sessions", json={"character": "ada"})
        assert "still starting" in problem(response, 503)
        assert response.headers["retry-after"] == "2"


async def test_readiness_says_why_there_is_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOST_START", "failed")
    async with serving(app_config(tmp_path), wait=False) as api:
        await api.until(lambda: api.gateway.fleet.pool.reasons())
        assert "no model on this machine" in str((await api.http.get("/healthz/ready")).json())
        response = await api.http.post("/v1/sessions", json={"character": "ada"})
        assert "/healthz/ready" in problem(response, 503)
        assert "no model" not in response.text  # words of a process: paths may be in them


async def test_a_full_server_is_ready_but_has_nothing_free(api: Api) -> None:
    assert (await api.http.get("/healthz/ready")).json()["free"] == 1
    await api.create()
    response = await api.http.get("/healthz/ready")
    assert response.status_code == 200 and response.json()["free"] == 0


@pytest.mark.parametrize("fault", ["refuse", "crash"])
async def test_a_host_that_cannot_open_fails_the_session_and_frees_the_group(
    api: Api, fault: str
) -> None:
    session = await api.create(fault)
    reason = (await api.reach(session, "failed"))["reason"]
    assert {"refuse": "cannot take it", "crash": "exited with code 4"}[fault] in reason
    await api.until(lambda: api.groups("ready"))
    assert await api.metric('characters_sessions{state="failed"}') == 1
    await api.reach(await api.create(), "ready")


async def test_a_host_that_never_opens_is_replaced(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "OPEN_SHARE", 0.01)
    session = await api.create("hang")
    assert "no answer to OpenSession" in (await api.reach(session, "failed"))["reason"]
    await api.until(lambda: api.groups("ready"))
    assert await api.metric("characters_groups_lost_total") == 1


async def test_a_host_that_dies_live_fails_its_session(api: Api) -> None:
    session = await api.create()
    session = resumed(session, await api.offer(session))
    problem(await api.offer(session, OFFER + "crash", "?takeover=1"), 504)
    assert "exited with code 5" in (await api.reach(session, "failed"))["reason"]
    await api.until(lambda: api.groups("ready"))
    assert (await api.offer(await api.create())).status_code == 201


async def test_an_offer_that_hangs_is_given_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "OFFER_TIMEOUT_S", 0.2)
    session = await api.create()
    problem(await api.offer(session, OFFER + "hang"), 504)
    assert (await api.offer(session)).status_code == 201


async def test_shutdown_tells_sessions_and_leaves_no_process(tmp_path: Path) -> None:
    async with serving(app_config(tmp_path)) as api:
        session = await api.create()
        assert (await api.offer(session)).status_code == 201
        pids = [group.pid for group in api.gateway.fleet._groups.values()]
        kept = api.gateway.sessions.get(session["id"])
    assert kept is not None and kept.state == "ended"
    assert kept.reason == "the server is shutting down"
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list((tmp_path / "run").iterdir()) == []


async def test_draining_admits_nobody_and_is_not_ready(api: Api) -> None:
    api.gateway.fleet.pool.drain()
    assert (await api.http.get("/healthz/ready")).json()["status"] == "draining"
    problem(await api.http.post("/v1/sessions", json={"character": "ada"}), 503)


async def test_ended_sessions_are_remembered_for_a_while(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "REMEMBER_S", 0.0)
    session = await api.create()
    await api.http.delete(f"/v1/sessions/{session['id']}", headers=secret_of(session))
    await api.until(lambda: api.gateway.sessions.get(session["id"]) is None)
    response = await api.http.get(f"/v1/sessions/{session['id']}", headers=secret_of(session))
    problem(response, 404)
    response = await api.http.delete(f"/v1/sessions/{session['id']}", headers=secret_of(session))
    assert response.status_code == 204, "idempotent, also when forgotten"


async def test_cycles_leave_the_gauges_at_zero_and_nothing_open(api: Api) -> None:
    open_before, tasks_before = 0, 0
    for cycle in range(12):
        session = await api.create()
        assert (await api.offer(session)).status_code == 201
        await api.http.delete(f"/v1/sessions/{session['id']}", headers=secret_of(session))
        if cycle == 1:
            await api.until(lambda: api.groups("ready") == 1)
            open_before, tasks_before = psutil.Process().num_fds(), len(asyncio.all_tasks())
    await api.until(lambda: api.groups("ready") == 1)
    assert psutil.Process().num_fds() <= open_before
    assert len(asyncio.all_tasks()) <= tasks_before
    assert await api.metric('characters_sessions{state="live"}') == 0
    assert await api.metric("characters_sessions_created_total") == 12
    assert await api.metric("characters_groups_lost_total") == 0


# ---------------------------------------------------------------- what is refused


async def test_garbage_offers_change_nothing(api: Api) -> None:
    session = await api.create()
    path = f"/v1/sessions/{session['id']}/webrtc"
    headers = secret_of(session)
    json_type = {**headers, "Content-Type": "application/json"}
    bad: list[tuple[dict[str, str], str, int, str | None]] = [
        ({**headers, **SDP}, "garbage", 400, "sdp"),
        ({**headers, **SDP}, "", 400, "sdp"),
        ({**headers, **SDP}, "v=0" + "x" * 5_000_000, 413, "sdp"),
        (json_type, "{", 400, None),
        (json_type, "[" * 5000, 400, None),
        (json_type, '{"type":"offer"}', 422, "sdp"),
        (json_type, '{"sdp":"v=0","type":"answer"}', 422, "type"),
        (json_type, '{"sdp":7,"type":"offer"}', 422, "sdp"),
        (json_type, '{"sdp":"garbage","type":"offer"}', 400, "sdp"),
        ({**headers, "Content-Type": "text/plain"}, OFFER, 415, "Content-Type"),
        (headers, OFFER, 415, "Content-Type"),
    ]
    for sent, body, status, field in bad:
        problem(await api.http.post(path, content=body, headers=sent), status, field)
    problem(await api.offer(session, OFFER + "refuse"), 400)
    assert (await api.offer(session)).status_code == 201
    assert api.groups("live") == 1


async def test_mangled_requests_are_answered_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def decode(data: bytes, width: int, height: int) -> bytes:
        return load_reference(data, width, height)  # without a process for each

    monkeypatch.setattr(service, "decode", decode)
    async with serving(app_config(tmp_path, "server.sessions_per_minute=1000")) as api:
        request = api.http.build_request(
            "POST", "/v1/sessions", files={"image": picture()}, data={"name": "Ada", "seed": "1"}
        )
        form, form_type = await request.aread(), request.headers["content-type"]
        chance = random.Random(7)
        for body, media_type in ((form, form_type), (b'{"character":"ada"}', "application/json")):
            for _ in range(150):
                mangled = bytearray(body)
                for _ in range(chance.randint(1, 4)):
                    mangled[chance.randrange(len(mangled))] = chance.randrange(256)
                del mangled[chance.randrange(len(mangled)) : chance.randrange(len(mangled))]
                response = await api.http.post(
                    "/v1/sessions", content=bytes(mangled), headers={"Content-Type": media_type}
                )
                if response.status_code == 201:
                    session = response.json()
                    await api.http.delete(
                        f"/v1/sessions/{session['id']}", headers=secret_of(session)
                    )
                else:
                    assert 400 <= response.status_code < 500, response.text
        await api.until(lambda: api.groups("ready") == 1)
        assert await api.metric("characters_groups_lost_total") == 0


async def test_a_bug_is_a_500_without_its_details(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_request: object) -> None:
        raise RuntimeError("the secret reason")

    monkeypatch.setattr(api.gateway.sessions, "create", broken)
    response = await api.http.post("/v1/sessions", json={"character": "ada"})
    problem(response, 500)
    assert "secret reason" not in response.text and "secret reason" in caplog.text
    (traced,) = (vars(r)["trace_id"] for r in caplog.records if "trace_id" in vars(r))
    assert response.headers["traceresponse"].split("-")[1] == traced
    assert response.headers["x-content-type-options"] == "nosniff"
    assert api.groups("ready") == 1


async def test_other_methods_are_405_with_what_is_allowed(api: Api) -> None:
    session = await api.create()
    for method in ("GET", "PUT"):
        response = await api.http.request(
            method, f"/v1/sessions/{session['id']}/webrtc", headers=secret_of(session)
        )
        problem(response, 405)
        assert "allow" in response.headers
    problem(await api.http.get("/v1/sessions"), 405)


async def test_candidates_are_accepted_and_an_ice_restart_is_not(api: Api) -> None:
    session = await api.create()
    location = (await api.offer(session)).headers["location"]
    headers = {**secret_of(session), "Content-Type": "application/trickle-ice-sdpfrag"}
    for body, status in (
        ("a=ice-ufrag:abcd\r\na=candidate:1 1 UDP 1 192.0.2.1 5 typ host\r\n", 204),
        ("a=ice-ufrag:EFGH\r\n", 422),
    ):
        response = await api.http.patch(location, content=body, headers=headers)
        assert response.status_code == status
    response = await api.http.patch(location, content="x", headers=secret_of(session))
    problem(response, 415, "Content-Type")
    await api.http.delete(location, headers=headers)
    problem(await api.http.patch(location, content="a=ice-ufrag:abcd\r\n", headers=headers), 410)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 422, "character"),
        ({"character": "nobody"}, 422, "character"),
        ({"character": "../../etc/passwd"}, 422, "character"),
        ({"character": "ada", "livekit": {}}, 422, "livekit"),
        ({"character": "ada", "seed": -1}, 422, "seed"),
        ({"character": "ada", "seed": "x"}, 422, "seed"),
        ({"character": "ada", "max_duration_s": 901}, 422, "max_duration_s"),
        ({"character": "ada", "max_duration_s": 0}, 422, "max_duration_s"),
        ({"character": "ada", "name": "x" * 41}, 422, "name"),
        ({"character": "ada", "persona": "x" * 2001}, 422, "persona"),
        ({"character": "ada", "name": "Eve"}, 422, "name"),
        ({"character": "ada", "persona": "A pirate."}, 422, "persona"),
        ([], 422, None),
    ],
)
async def test_a_bad_request_names_its_field(
    api: Api, body: object, status: int, field: str | None
) -> None:
    problem(await api.http.post("/v1/sessions", json=body), status, field)
    assert api.groups("ready") == 1


async def test_bad_uploads_name_the_image_and_hold_no_slot(api: Api) -> None:
    async def post(**kwargs: Any) -> httpx.Response:
        return await api.http.post("/v1/sessions", **kwargs)

    problem(await post(files={"image": b"GIF89a" + bytes(99)}), 422, "image")
    problem(await post(files={"image": b""}), 422, "image")
    problem(await post(files={"image": picture(size=(32, 32))}), 422, "image")
    problem(await post(files={"picture": picture()}), 422, "picture")
    problem(await post(files={"image": picture()}, data={"character": "ada"}), 422, "character")
    problem(await post(files={"image": picture()}, data={"seed": "one"}), 422, "seed")
    problem(await post(files={"image": bytes(10 * 1024 * 1024 + 1)}), 413, "image")
    problem(await post(files={"image": bytes(12 * 1024 * 1024)}), 413, "image")
    two = [("image", picture()), ("image", picture())]
    problem(await post(files=two), 422, "image")
    problem(await post(data={"image": "text"}, files={"x": b""}), 422, "image")
    problem(await post(data={str(i): "x" for i in range(20)}, files={"image": picture()}), 400)
    problem(await post(content=b"x", headers={"Content-Type": "multipart/form-data"}), 400)
    problem(await post(content=b"x", headers={"Content-Type": "text/plain"}), 415, "Content-Type")
    assert api.groups("ready") == 1
    assert await api.metric("characters_sessions_created_total") == 0


async def test_nothing_that_a_client_names_is_fetched(api: Api) -> None:
    visits = 0

    def visited(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        writer.close()

    elsewhere = await asyncio.start_server(visited, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{elsewhere.sockets[0].getsockname()[1]}/face.png"
    drawing = f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{url}"/></svg>'
    for request in (
        {"json": {"character": url}},
        {"json": {"character": "ada", "image": url}},
        {"json": {"character": "ada", "image_url": url}},
        {"data": {"image": url}, "files": {"x": b""}},
        {"files": {"image": url.encode()}},
        {"files": {"image": ("face.svg", drawing.encode(), "image/svg+xml")}},
    ):
        answer = await api.http.post("/v1/sessions", **request)
        assert 400 <= answer.status_code < 500, request
    elsewhere.close()
    await elsewhere.wait_closed()
    assert visits == 0 and api.groups("ready") == 1


async def test_pictures_do_not_queue_without_bound(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding, most = 0, 0

    async def slow(_data: bytes, width: int, height: int) -> bytes:
        nonlocal decoding, most
        decoding += 1
        most = max(most, decoding)
        await asyncio.sleep(0.1)
        decoding -= 1
        return bytes(width * height * 3)

    monkeypatch.setattr(service, "MAX_WAITING_IMAGES", 2)
    monkeypatch.setattr(service, "decode", slow)
    uploads = (api.http.post("/v1/sessions", files={"image": picture()}) for _ in range(4))
    responses = await asyncio.gather(*uploads)
    assert sorted(r.status_code for r in responses) == [201, 503, 503, 503]
    assert most == 1
    assert all("retry-after" in r.headers for r in responses if r.status_code == 503)


async def test_an_endless_body_is_cut_off_while_it_streams(api: Api) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65_536
            yield bytes(65_536)

    session = await api.create()
    response = await api.http.post(
        f"/v1/sessions/{session['id']}/webrtc",
        content=endless(),
        headers={**secret_of(session), **SDP},
    )
    problem(response, 413, "sdp")
    assert sent < 400_000


async def test_a_body_that_trickles_is_given_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.1)

    async def trickle() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    response = await api.http.post(
        "/v1/sessions", content=trickle(), headers={"Content-Type": "application/json"}
    )
    problem(response, 408)


@pytest.mark.parametrize("text", ["", "   ", "x" * 501, None, 7])
async def test_say_takes_words_and_not_too_many(api: Api, text: object) -> None:
    session = await api.create()
    await api.reach(session, "ready")
    path = f"/v1/sessions/{session['id']}/say"
    problem(await api.http.post(path, json={"text": text}, headers=secret_of(session)), 422, "text")


async def test_too_many_sessions_from_one_address_are_429(tmp_path: Path) -> None:
    async with serving(app_config(tmp_path, "server.sessions_per_minute=2")) as api:
        for _ in range(2):
            problem(await api.http.post("/v1/sessions", json={}), 422, "character")
        response = await api.http.post("/v1/sessions", json={"character": "ada"})
        problem(response, 429)
        assert 1 <= int(response.headers["retry-after"]) <= 30


async def test_requests_of_one_address_are_429_and_those_of_another_served(
    tmp_path: Path,
) -> None:
    async with serving(app_config(tmp_path, "server.requests_per_minute=5")) as api:
        codes = [(await api.http.get("/v1/characters")).status_code for _ in range(8)]
        assert codes == [200] * 5 + [429] * 3
        response = await api.http.get("/v1/characters")
        problem(response, 429)
        assert int(response.headers["retry-after"]) >= 1
        assert await closed_with(api.app, f"/v1/sessions/{'0' * 32}/audio", {}) == 4429
        assert (await api.http.get("/healthz/live")).status_code == 200
        elsewhere = httpx.ASGITransport(api.app, client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=elsewhere, base_url=BASE) as other:
            assert (await other.get("/v1/characters")).status_code == 200


async def test_a_key_has_its_own_rate_quota_and_sessions(tmp_path: Path) -> None:
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), **limits}
        for name, limits in (
            ("web", {"max_sessions": 1, "sessions_per_minute": 4}),
            ("app", {"sessions_per_minute": 9}),
        )
    ]
    config = app_config(tmp_path, f"server.api_keys={json.dumps(keys)}", "fleet.groups=2")
    async with serving(config) as api:
        await api.until(lambda: api.groups("ready") == 2)
        web, app = ({"Authorization": f"Bearer {name}"} for name in ("web", "app"))

        async def create(headers: dict[str, str]) -> httpx.Response:
            return await api.http.post("/v1/sessions", json={"character": "ada"}, headers=headers)

        problem(await create({}), 401)
        burst = await asyncio.gather(*(create(web) for _ in range(3)))
        assert sorted(response.status_code for response in burst) == [201, 429, 429]
        session = next(r.json() for r in burst if r.status_code == 201)
        path = f"/v1/sessions/{session['id']}"
        assert (await api.http.get(path, headers=web)).status_code == 200
        for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/interrupt")):
            problem(await api.http.request(method, path + suffix, headers=app), 404)
        assert (await create(app)).status_code == 201, "another key's quota is its own"
        assert (await api.http.delete(path, headers=web)).status_code == 204
        await api.until(lambda: api.groups("ready") == 1)
        assert (await create(web)).status_code == 201, "the fourth of this minute"
        assert "address or key" in problem(await create(web), 429)
        assert (await api.http.get("/metrics")).text.count('refused_total{why="quota"} 2.0') == 1


async def test_a_storm_of_commands_is_429(api: Api) -> None:
    session = await api.create()
    await api.reach(session, "ready")
    path = f"/v1/sessions/{session['id']}/interrupt"
    codes = [
        (await api.http.post(path, headers=secret_of(session))).status_code
        for _ in range(service.COMMANDS_PER_MINUTE + 10)
    ]
    assert codes[: service.COMMANDS_PER_MINUTE] == [204] * service.COMMANDS_PER_MINUTE
    assert codes[-1] == 429


async def test_a_storm_of_offers_is_429(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await api.create()
    codes = [(await api.offer(session, "garbage")).status_code for _ in range(32)]
    assert codes[:30] == [400] * 30 and codes[-1] == 429


# ---------------------------------------------------------------- who may do what


@asynccontextmanager
async def two_sessions(
    folder: Path,
) -> AsyncIterator[tuple[Api, dict[str, Any], dict[str, Any]]]:
    async with serving(app_config(folder, "fleet.groups=2")) as api:
        await api.until(lambda: api.groups("ready") == 2)
        yield api, await api.create(), await api.create()


async def test_a_secret_is_good_for_its_own_session_only(tmp_path: Path) -> None:
    async with two_sessions(tmp_path) as (api, mine, other):
        calls = [
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/webrtc"),
            ("PATCH", "/webrtc"),
            ("DELETE", "/webrtc"),
            ("POST", "/interrupt"),
            ("POST", "/say"),
            ("POST", "/end"),
        ]
        for method, path in calls:
            url = f"/v1/sessions/{other['id']}{path}"
            for headers, status in (
                (secret_of(mine), 404),
                ({}, 401),
                ({"Authorization": "Bearer x.y.z"}, 401),
            ):
                response = await api.http.request(method, url, headers=headers)
                problem(response, status)
        assert (await api.status(other))["status"] in ("starting", "ready")
        problem(await api.http.get("/v1/sessions/" + "0" * 32, headers=secret_of(mine)), 404)


def session_routes() -> list[tuple[str, str]]:
    """Every method and path of one session, as the app itself describes them."""
    paths = create_app(Config()).openapi()["paths"]
    return [
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if "{session_id}" in path
    ]


def test_the_description_has_every_session_route() -> None:
    described = {path for _, path in session_routes()}
    routed = {
        path
        for route in create_app(Config()).routes
        if "{session_id}" in (path := getattr(route, "path", "")) and hasattr(route, "methods")
    }
    assert described == routed and len(session_routes()) >= 8


async def test_no_route_of_a_session_serves_the_secret_of_another(tmp_path: Path) -> None:
    async with two_sessions(tmp_path) as (api, mine, other):
        other = resumed(other, await api.offer(other))
        await api.reach(other, "live")
        stranger = mine["client_secret"]["value"]
        bodies: list[tuple[dict[str, str], str]] = [
            ({}, ""),
            (SDP, OFFER),
            ({"Content-Type": "application/json"}, json.dumps({"text": "hi", "sdp": OFFER})),
            ({"Content-Type": "text/plain"}, stranger),
        ]
        for method, template in session_routes():
            url = template.replace("{session_id}", other["id"])
            for query in ("", "?takeover=1"):
                for headers, body in bodies:
                    response = await api.http.request(
                        method, url + query, content=body, headers={**headers, **secret_of(mine)}
                    )
                    assert problem(response, 404) == "no such session", (method, url)
                    response = await api.http.request(
                        method, url + query, content="", headers=headers
                    )
                    problem(response, 401)
            beacon = await api.http.post(f"/v1/sessions/{other['id']}/end", content=stranger)
            problem(beacon, 404)
        assert (await api.status(other))["status"] == "live"
        assert (await api.offer(other)).status_code == 409, "its own client is still connected"


async def closed_with(app: Any, url: str, headers: dict[str, str]) -> int:
    """The code that a WebSocket is closed with when nothing is sent on it."""
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    said = iter(({"type": "websocket.connect"}, {"type": "websocket.receive", "text": "{}"}))

    async def receive() -> dict[str, Any]:
        return next(said, {"type": "websocket.disconnect", "code": 1006})

    raw = [(b"host", b"127.0.0.1:8080")]
    raw += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "websocket", "path": url, "raw_path": url.encode(), "query_string": b""}
    scope |= {"headers": raw, "subprotocols": [], "client": ("127.0.0.1", 1)}
    await app(scope, receive, sent.put)
    messages = [sent.get_nowait() for _ in range(sent.qsize())]
    return next(int(m["code"]) for m in messages if m["type"] == "websocket.close")


async def test_no_socket_of_a_session_serves_the_secret_of_another(tmp_path: Path) -> None:
    async with two_sessions(tmp_path) as (api, mine, other):
        templates = [
            getattr(route, "path", "")
            for route in api.app.routes
            if isinstance(route, WebSocketRoute) and "{session_id}" in route.path
        ]
        assert templates == ["/v1/sessions/{session_id}/audio"]
        for template in templates:
            url = template.replace("{session_id}", other["id"])
            assert await closed_with(api.app, url, secret_of(mine)) == 4404
            assert await closed_with(api.app, url, {}) == 4401
            assert await closed_with(api.app, url, {"Authorization": "Bearer x.y.z"}) == 4401
        assert (await api.status(other))["status"] in ("starting", "ready")


async def test_a_server_key_is_needed_once_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARACTERS_API_KEY", "k-123")
    async with serving(app_config(tmp_path)) as api:
        for host in psutil.Process().children():
            assert "k-123" not in host.environ().values(), "a group has no use for it"
        body = {"character": "ada"}
        problem(await api.http.post("/v1/sessions", json=body), 401)
        wrong = {"Authorization": "Bearer k-124"}
        problem(await api.http.post("/v1/sessions", json=body, headers=wrong), 401)
        right = {"Authorization": "Bearer k-123"}
        response = await api.http.post("/v1/sessions", json=body, headers=right)
        assert response.status_code == 201
        session = response.json()
        assert (
            await api.http.get(f"/v1/sessions/{session['id']}", headers=right)
        ).status_code == 200
        assert (await api.status(session))["id"] == session["id"]


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, "127.0.0.1:8080", 201),
        ("http://127.0.0.1:8080", "127.0.0.1:8080", 201),
        ("http://localhost:8080", "localhost:8080", 201),
        ("https://app.example", "127.0.0.1:8080", 201),
        ("https://evil.example", "127.0.0.1:8080", 403),
        ("https://app.example.evil.example", "127.0.0.1:8080", 403),
        ("http://127.0.0.1:9999", "127.0.0.1:8080", 403),
        ("null", "127.0.0.1:8080", 403),
        ("http://rebound.example:8080", "rebound.example:8080", 403),
    ],
)
async def test_pages_of_other_sites_need_to_be_allowed(
    tmp_path: Path, origin: str | None, host: str, status: int
) -> None:
    config = app_config(tmp_path, "server.allowed_origins=['https://app.example']")
    async with serving(config) as api:
        headers = {"Host": host} | ({"Origin": origin} if origin else {})
        response = await api.http.post("/v1/sessions", json={"character": "ada"}, headers=headers)
        assert response.status_code == status, response.text
        allowed = response.headers.get("access-control-allow-origin")
        assert allowed == (origin if origin == "https://app.example" else None)
        assert "*" not in str(allowed)


async def test_preflights_are_answered_for_allowed_origins(tmp_path: Path) -> None:
    config = app_config(tmp_path, "server.allowed_origins=['https://app.example']")
    async with serving(config, wait=False) as api:
        url = "/v1/sessions/" + "0" * 32 + "/webrtc"
        response = await api.http.options(url, headers={"Origin": "https://app.example"})
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert "PATCH" in response.headers["access-control-allow-methods"]
        assert "application/sdp" in response.headers["accept-post"]
        assert "traceparent" in response.headers["access-control-allow-headers"]
        assert "traceresponse" in response.headers["access-control-expose-headers"]
        problem(
            await api.http.options(url, headers={"Origin": "https://evil.example"}), 403, "Origin"
        )


async def test_no_secret_and_no_sdp_reach_the_log(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "characters_serve"):
        session = await api.create()
        assert (await api.offer(session)).status_code == 201
        await api.http.delete(f"/v1/sessions/{session['id']}", headers=secret_of(session))
        await api.reach(session, "ended")
    assert session["client_secret"]["value"] not in caplog.text
    assert "ice-ufrag" not in caplog.text and session["id"] not in caplog.text
    about = [vars(record) for record in caplog.records if "session" in vars(record)]
    assert {fields["session"] for fields in about} == {session["id"][:8]}
    assert all(fields["lease_epoch"] > 0 and fields["group"] for fields in about)


async def test_a_session_is_part_of_the_trace_of_who_made_it(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{theirs}-00f067aa0ba902b7-01"}
    with caplog.at_level("INFO", "characters_serve"):
        made = await api.http.post("/v1/sessions", json={"character": "ada"}, headers=headers)
        session = made.json()
        assert re.fullmatch(rf"00-{theirs}-[0-9a-f]{{16}}-00", made.headers["traceresponse"])
        await api.reach(session, "ready")
        await api.http.delete(f"/v1/sessions/{session['id']}", headers=secret_of(session))
        await api.reach(session, "ended")
    about = [vars(record) for record in caplog.records if "session" in vars(record)]
    assert len(about) >= 3 and {fields["trace_id"] for fields in about} == {theirs}


# ---------------------------------------------------------------- the rest of the surface


async def test_presets_are_listed_with_their_pictures(api: Api) -> None:
    answer = (await api.http.get("/v1/characters")).json()
    assert answer["video"] == {"width": 96, "height": 64, "fps": 24}
    listed = answer["characters"]
    assert [c["id"] for c in listed] == ["ada"]
    assert listed[0]["name"] == "Ada" and listed[0]["blurb"] == "A lighthouse keeper."
    image = await api.http.get(listed[0]["image"])
    assert image.headers["content-type"] == "image/png" and image.content == picture()
    problem(await api.http.get("/v1/characters/nobody/image.png"), 404)
    persona = api.gateway.characters["ada"].persona
    assert persona.facts == {"age": "61"} and persona.likes == ["storms"]
    assert persona.greeting == "Ahoy." and persona.instructions == "A lighthouse keeper."


async def test_the_page_is_served_with_its_guards(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = tmp_path / "web"
    web.mkdir()
    (web / "index.html").write_text("<!doctype html><title>hello</title>")
    (web / "client.js").write_text("export {}")
    (tmp_path / "secret.txt").write_text("no")
    monkeypatch.setattr(app_module, "WEB", web)
    page = await api.http.get("/")
    assert page.status_code == 200 and "hello" in page.text
    assert page.headers["cache-control"] == "no-cache"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    script = await api.http.get("/client.js")
    assert "javascript" in script.headers["content-type"]
    # A module import from another origin needs it; nothing else on the page does.
    assert script.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in page.headers
    for path in ("/nothing.js", "/..%2Fsecret.txt", "/%2e%2e%2fsecret.txt", "/.hidden"):
        problem(await api.http.get(path), 404)


async def test_metrics_hold_what_hosts_report_and_no_ids(api: Api) -> None:
    session = await api.create()
    await api.status(session)

    async def reported() -> bool:
        return await api.metric("characters_step_ms_count") > 0

    async with asyncio.timeout(10):
        while not await reported():
            await asyncio.sleep(0.05)
    text = (await api.http.get("/metrics")).text
    assert "characters_decode_ms_bucket" in text and "characters_chunks_total" in text
    assert "characters_playout_chunks{group=" in text
    assert 'route="/v1/sessions/{session_id}"' in text and session["id"] not in text
    assert "characters_turn_latency_ms_count" in text
    assert await api.metric("characters_gateway_tasks") >= 1
    assert await api.metric("process_open_fds") > 0
    assert await api.metric("process_resident_memory_bytes") > 2**20


async def test_host_counters_never_fall_when_a_group_is_rebuilt(api: Api) -> None:
    async with asyncio.timeout(10):
        while (before := await api.metric("characters_chunks_total")) < 5:
            await asyncio.sleep(0.05)
    session = await api.create("crash")
    await api.reach(session, "failed")
    await api.until(lambda: api.groups("ready"))
    seen = [before]
    async with asyncio.timeout(10):
        while seen[-1] < before + 5:
            seen.append(await api.metric("characters_chunks_total"))
            await asyncio.sleep(0.05)
    assert seen == sorted(seen)
