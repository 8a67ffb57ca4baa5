"""What strangers send: every answer is clear, and afterwards nothing is left."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from aiortc import RTCPeerConnection
from aiortc.mediastreams import AudioStreamTrack
from PIL import Image

from tests.e2e.rig import Measure, Server, running_server

ICE_TIMEOUT_S = 2
CONNECT_TIMEOUT_S = 4
UNKNOWN = "0" * 32
Created = dict[str, Any]


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(
        tmp_path_factory.mktemp("b"),
        "engine.kind=pattern",
        "agent.greet=false",
        "agent.recogniser=pocketsphinx",
        f"delivery.ice_timeout_s={ICE_TIMEOUT_S}",
        f"session.connect_timeout_s={CONNECT_TIMEOUT_S}",
    ) as running:
        yield running


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server.when_free()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def offer() -> str:
    """A browser's offer, for as many sessions as like it; nobody answers its checks."""
    return asyncio.run(_offer())


async def _offer() -> str:
    peer = _peer()
    peer.createDataChannel("events")
    await peer.setLocalDescription(await peer.createOffer())
    sdp = str(peer.localDescription.sdp)
    await peer.close()
    return sdp


def _peer() -> RTCPeerConnection:
    peer = RTCPeerConnection()
    peer.addTrack(AudioStreamTrack())
    peer.addTransceiver("video", direction="recvonly")
    return peer


def create(http: httpx.Client) -> Created:
    response = http.post("/v1/sessions", json={"character": "mira"})
    assert response.status_code == 201, response.text
    return dict(response.json())


def secret(session: Created) -> dict[str, str]:
    return {"Authorization": f"Bearer {session['client_secret']['value']}"}


def send_offer(http: httpx.Client, session: Created, sdp: str | bytes) -> httpx.Response:
    headers = {"Content-Type": "application/sdp", **secret(session)}
    return http.post(f"/v1/sessions/{session['id']}/webrtc", content=sdp, headers=headers)


def end(http: httpx.Client, session: Created) -> None:
    response = http.delete(f"/v1/sessions/{session['id']}", headers=secret(session))
    assert response.status_code == 204


def is_problem(response: httpx.Response, *statuses: int) -> bool:
    return (
        response.status_code in statuses
        and response.headers["content-type"] == "application/problem+json"
        and bool(response.json()["detail"])
    )


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "png")
    return out.getvalue()


def bomb() -> bytes:
    """A small file that claims to be 60,000 pixels wide and high."""
    small = bytearray(png(8, 8))
    small[16:24] = (60_000).to_bytes(4, "big") * 2
    return bytes(small)


def with_media(sdp: str, *kinds: str) -> str:
    """The same offer with the sections of these kinds, in this order."""
    head, *media = re.split(r"(?m)^(?=m=)", sdp)
    sections = {section[2:].split(" ")[0]: section for section in media}
    return head + "".join(sections[kind] for kind in kinds)


def with_candidates(sdp: str, count: int) -> str:
    """Every one a name to look up and a host to probe, if anything were done with them."""
    candidates = "".join(
        f"a=candidate:{n} 1 udp 1 h{n}.invalid {1024 + n % 60_000} typ host\r\n"
        for n in range(count)
    )
    return sdp + candidates


def bad_offers(offer: str) -> dict[str, str | bytes]:
    return {
        "empty": "",
        "garbage": "\x01\x02 this is no SDP",
        "not text": b"v=0\xff\xfe",
        "header only": "v=0\r\n",
        "5 MB": "v=0\r\n" + "a=x\r\n" * 1_000_000,
        "an answer": offer.replace("a=setup:actpass", "a=setup:active"),
        "no audio": with_media(offer, "video"),
        "no video": with_media(offer, "audio"),
        "two videos": with_media(offer, "audio", "video", "video"),
        "nine sections": with_media(offer, *["audio", "video"] * 5),
        "data only": with_media(offer, "application"),
        "nothing wanted": re.sub("a=(sendrecv|recvonly)", "a=inactive", offer),
        "codecs of others": offer.replace("VP8/90000", "VP9/90000").replace("H264/", "AV1/"),
        "too many candidates": with_candidates(offer, 5000),
        "no fingerprint": re.sub(r"a=fingerprint:.*\r\n", "", offer),
        "cut short": offer[: len(offer) // 3],
        "video sent to us": offer.replace("a=recvonly", "a=sendonly"),
    }


def test_bad_offers_are_refused_and_a_good_one_still_works(
    server: Server, http: httpx.Client, offer: str
) -> None:
    session = create(http)
    for name, sdp in bad_offers(offer).items():
        response = send_offer(http, session, sdp)
        assert is_problem(response, 400, 413), (name, response.status_code, response.text[:200])
    assert send_offer(http, session, with_candidates(offer, 900)).status_code == 201
    end(http, session)
    server.wait_until("the group is free", server.is_free, 8)


def test_ids_and_tokens_of_nobody(server: Server, http: httpx.Client, offer: str) -> None:
    session = create(http)
    for path in (f"/v1/sessions/{UNKNOWN}", "/v1/sessions/..%2f..%2fetc", "/v1/sessions/%00"):
        assert http.get(path, headers=secret(session)).status_code == 404
    for token in ("", "x", "Bearer", "Bearer x.y.z", f"Bearer {'a' * 10_000}", "Basic eDp5"):
        headers = {"Authorization": token}
        own = f"/v1/sessions/{session['id']}"
        assert is_problem(http.get(own, headers=headers), 401), token[:20]
        assert is_problem(http.post(f"{own}/webrtc", content=offer, headers=headers), 401)
        assert is_problem(http.post(f"{own}/say", json={"text": "x"}, headers=headers), 401)
        assert is_problem(http.delete(own, headers=headers), 401)
    end(http, session)
    server.wait_until("the group is free", server.is_free, 8)
    end(http, session)
    assert is_problem(send_offer(http, session, offer), 410)
    said = http.post(
        f"/v1/sessions/{session['id']}/say", json={"text": "x"}, headers=secret(session)
    )
    assert is_problem(said, 410)
    next_one = create(http)
    others = {"Authorization": secret(session)["Authorization"]}
    assert is_problem(http.get(f"/v1/sessions/{next_one['id']}", headers=others), 404)
    assert is_problem(http.delete(f"/v1/sessions/{next_one['id']}", headers=others), 404)
    assert not server.is_free(), "another session's secret ended it"
    end(http, next_one)


def test_pictures_that_are_none(server: Server, http: httpx.Client) -> None:
    whole = png(64, 64)
    for name, data, statuses in (
        ("empty", b"", (400, 422)),
        ("text", b"hello", (400, 415, 422)),
        ("cut", whole[: len(whole) // 2], (400, 422)),
        ("tiny", png(1, 1), (400, 422)),
        ("a bomb", bomb(), (400, 413, 422)),
        ("11 MB", whole + bytes(11 * 1024 * 1024), (413,)),
    ):
        response = http.post("/v1/sessions", files={"image": ("a.png", data, "image/png")})
        assert is_problem(response, *statuses), (name, response.status_code, response.text[:200])
        assert response.json()["field"] == "image", name
    assert server.is_free(), "a refused picture held the group"


def test_an_offer_whose_browser_vanishes_costs_its_session_alone(
    server: Server, http: httpx.Client, offer: str, measure: Measure
) -> None:
    session = create(http)
    assert send_offer(http, session, offer).status_code == 201
    measure("freed_after_s", round(server.seconds_until_free(CONNECT_TIMEOUT_S + 6), 1))
    described = http.get(f"/v1/sessions/{session['id']}", headers=secret(session)).json()
    assert described["status"] == "ended"
    assert "connect" in described["reason"]


async def test_offers_that_meet_the_end_of_their_session(server: Server, offer: str) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        for delay_s in (0.0, 0.005, 0.02, 0.08):
            session = (await http.post("/v1/sessions", json={"character": "mira"})).json()
            own = f"/v1/sessions/{session['id']}"
            headers = {"Content-Type": "application/sdp", **secret(session)}

            async def ask(
                path: str = f"{own}/webrtc?takeover=1", headers: dict[str, str] = headers
            ) -> httpx.Response:
                return await http.post(path, content=offer, headers=headers)

            assert (await ask()).status_code == 201
            offers = [asyncio.create_task(ask()) for _ in range(2)]
            await asyncio.sleep(delay_s)
            assert (await http.delete(own, headers=secret(session))).status_code == 204
            for response in (*await asyncio.gather(*offers), await ask()):
                assert response.status_code == 201 or is_problem(response, 409, 410), response.text
            assert is_problem(await ask(), 410)
            assert (await http.get(own, headers=secret(session))).json()["status"] == "ended"
            await asyncio.to_thread(server.seconds_until_free, 8)


def test_candidates_come_in_any_order(server: Server, http: httpx.Client, offer: str) -> None:
    session = create(http)
    own = f"/v1/sessions/{session['id']}/webrtc"
    (ufrag,) = set(re.findall(r"a=ice-ufrag:(\S+)", offer))

    def trickle(name: str, lines: str = "a=end-of-candidates\r\n") -> httpx.Response:
        headers = {"Content-Type": "application/trickle-ice-sdpfrag", **secret(session)}
        return http.patch(own, content=f"a=ice-ufrag:{name}\r\n{lines}", headers=headers)

    candidate = "a=candidate:1 1 udp 2130706431 192.0.2.77 50000 typ host\r\n"
    assert is_problem(trickle(ufrag), 422)  # there is no offer that it could belong to
    assert send_offer(http, session, offer).status_code == 201
    many = candidate * 900
    for lines in ("a=end-of-candidates\r\n", candidate, candidate, "", "nonsense\r\n", many):
        assert trickle(ufrag, lines).status_code == 204
    assert is_problem(trickle("another"), 422)
    assert is_problem(trickle(ufrag, 10 * many), 413)
    headers = {"Content-Type": "application/sdp", **secret(session)}
    renamed = offer.replace(ufrag, "renewed1")
    again = http.post(f"{own}?takeover=1", content=renamed, headers=headers)
    assert again.status_code == 201
    assert is_problem(trickle(ufrag), 422)  # of the offer before
    assert trickle("renewed1", candidate).status_code == 204
    end(http, session)
    assert is_problem(trickle("renewed1"), 410)
    server.wait_until("the group is free", server.is_free, 8)


# ---------------------------------------------------------------- nothing is left


@dataclass(frozen=True)
class Footprint:
    """What grows when something is forgotten."""

    gateway_files: int
    host_files: int
    processes: int
    tasks: float
    live: dict[str, float]


def footprint(server: Server) -> Footprint:
    text = httpx.get(f"{server.url}/metrics").text
    states = re.findall(r'^(characters_(?:sessions|groups)\{state="\w+"\}) (\S+)$', text, re.M)
    tasks = re.search(r"^characters_host_tasks\{.*\} (\S+)$", text, re.M)
    assert states
    return Footprint(
        gateway_files=server.gateway.num_fds(),
        host_files=server.host.num_fds(),
        processes=len(server.gateway.children(recursive=True)),
        tasks=float(tasks[1]) if tasks else float("inf"),  # a host reports each second
        # Sessions that are over are remembered for a while, so that their reason can be asked.
        live={k: float(v) for k, v in states if '"ended"' not in k and '"failed"' not in k},
    )


def test_fifty_of_everything_leave_nothing(
    server: Server, http: httpx.Client, offer: str, measure: Measure
) -> None:
    def one(number: int) -> None:
        if number % 5 == 4:
            picture = {"image": ("a.png", bomb(), "image/png")}
            assert is_problem(http.post("/v1/sessions", files=picture), 400, 413, 422)
            return
        session = create(http)
        if number % 5 == 0:
            pass
        elif number % 5 == 1:
            bad = list(bad_offers(offer).values())
            assert is_problem(send_offer(http, session, bad[number % len(bad)]), 400, 413)
        elif number % 5 == 2:
            assert send_offer(http, session, offer).status_code == 201
        else:
            assert send_offer(http, session, offer).status_code == 201
            headers = {"Content-Type": "application/sdp", **secret(session)}
            again = f"/v1/sessions/{session['id']}/webrtc?takeover=1"
            assert http.post(again, content=offer, headers=headers).status_code == 201
        end(http, session)

    for number in range(5):
        one(number)
    server.wait_until("the group is free", server.is_free, 10)
    before = settled(server)
    began_s = time.monotonic()
    for number in range(50):
        one(number)
    server.wait_until("the group is free", server.is_free, 10)
    measure("seconds", round(time.monotonic() - began_s, 1))

    def same() -> bool:
        after = footprint(server)
        return (
            after.live == before.live
            and after.processes == before.processes
            and after.tasks <= before.tasks
            and after.gateway_files <= before.gateway_files
            and after.host_files <= before.host_files
        )

    try:
        server.wait_until("everything is as it was", same, 12)
    except pytest.fail.Exception:
        assert footprint(server) == before
        raise
    measure("files", f"gateway {before.gateway_files}, host {before.host_files}")


def settled(server: Server) -> Footprint:
    """After three seconds: timers and closing sockets end in them."""
    seen: list[Footprint] = []
    deadline_s = time.monotonic() + 3

    def enough() -> bool:
        seen.append(footprint(server))
        return time.monotonic() > deadline_s

    server.wait_until("three seconds have passed", enough, 10)
    return seen[-1]
