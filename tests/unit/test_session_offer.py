"""Offers of strangers: what is wrong with them is said, and nothing of them stays."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from aiortc.sdp import SessionDescription
from hypothesis import given, settings
from hypothesis import strategies as st

from characters_serve.config import DeliveryConfig
from characters_serve.session import arrivals
from characters_serve.session.clock import MediaClock
from characters_serve.session.offer import MAX_OFFER_BYTES, OfferRefused, check_offer
from characters_serve.session.peer import Peer, PeerCallbacks
from characters_serve.session.playout import Playout
from characters_serve.session.tracks import Delivery
from tests.unit.session_rig import Browser


async def real_offer(*, microphone: bool = True) -> str:
    browser = Browser(microphone=microphone)
    sdp = await browser.offer()
    await browser.close()
    return sdp


def make_peer() -> Peer:
    playout = Playout(fps=24, voice_samples_per_chunk=8000, target_chunks=2)
    delivery = Delivery(MediaClock(time.monotonic(), 0.0, 24), playout, 384, 256, lambda: None)
    calls = PeerCallbacks(
        on_connected=lambda: None,
        on_lost=lambda reason: None,
        on_microphone=lambda pcm: None,
        on_channel=lambda label, channel: None,
        on_message=lambda label, message: None,
    )
    return Peer(DeliveryConfig(), delivery, calls)


@pytest.mark.parametrize("microphone", [True, False])
async def test_candidates_are_dropped_and_all_else_kept(microphone: bool) -> None:
    sdp = await real_offer(microphone=microphone)
    assert "a=candidate" in sdp
    checked = check_offer(sdp)
    assert "candidate" not in checked
    kept = [line for line in sdp.splitlines() if "candidate" not in line]
    assert checked.splitlines() == kept


OFFER = asyncio.run(real_offer()).splitlines()
BREAKS = ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028")
STRANGERS = st.sampled_from([
    "a=candidate:1 1 udp 2130706431 10.1.2.3 5000 typ host",
    "a=end-of-candidates",
    "m=audio 9 UDP/TLS/RTP/SAVPF 96",
    "a=setup:active",
    "a=fingerprint:md5 00",
    "a=inactive",
])  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    edits=st.lists(
        st.tuples(st.integers(1, len(OFFER) - 1), st.sampled_from(BREAKS), STRANGERS | st.text()),
        max_size=4,
    )
)
def test_what_is_let_through_has_been_read_as_aiortc_reads_it(
    edits: list[tuple[int, str, str]],
) -> None:
    """A candidate that hid behind another kind of line break would be probed."""
    lines = list(OFFER)
    for at, line_break, text in edits:
        lines[at] += line_break + text
    try:
        checked = check_offer("\r\n".join(lines))
    except OfferRefused:
        return
    assert check_offer(checked) == checked
    media = SessionDescription.parse(checked).media
    assert not any(each.ice_candidates or each.ice_candidates_complete for each in media)
    assert sorted(each.kind for each in media) == ["application", "audio", "video"]


async def test_what_is_wrong_is_said() -> None:
    sdp = await real_offer()
    sections = sdp.split("m=")
    audio = next(s for s in sections if s.startswith("audio"))
    video = next(s for s in sections if s.startswith("video"))

    def refused(text: str, words: str) -> None:
        with pytest.raises(OfferRefused, match=words):
            check_offer(text)

    refused("", "v=0")
    refused("hello", "v=0")
    refused("v=0\r\n", "media sections")
    refused("v=0\r\n" + "a=x\r\n" * 1_000_000, str(MAX_OFFER_BYTES))
    refused(sdp.replace("a=setup:actpass", "a=setup:active"), "answer")
    refused(sdp.replace("m=" + audio, ""), "no audio")
    refused(sdp.replace("m=" + video, ""), "no video")
    refused(sdp + "m=" + audio, "more than one audio")
    refused(sdp + "m=" + video * 9, "video|media sections|fingerprint|more than one")
    refused(sdp.replace("m=video", "m=image"), "unknown media kind")
    refused(sdp.replace("m=" + video, "m=" + video.replace("recvonly", "sendonly")), "sendonly")
    refused(sdp.replace("m=" + audio, "m=" + audio.replace("sendrecv", "inactive")), "inactive")
    refused(sdp.replace("a=fingerprint:sha-256", "a=fingerprint:md5"), "sha-256")
    refused(sdp.replace("a=ice-pwd", "a=ice-pad"), "ICE")
    refused(sdp.replace("a=mid:0", "a=mid:" + "0" * 5000), "too long")


async def test_mutated_offers_are_answered_or_refused_and_always_closed() -> None:
    sdp = await real_offer()
    lines = sdp.splitlines()
    rng = random.Random(7)
    tasks = len(asyncio.all_tasks())
    outcomes = {"answered": 0, "refused": 0}
    for _ in range(60):
        mutated = list(lines)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(1, len(mutated))
            match rng.randrange(4):
                case 0:
                    del mutated[at]
                case 1:
                    mutated[at] = mutated[at][: rng.randrange(len(mutated[at]) + 1)]
                case 2:
                    mutated.insert(at, mutated[rng.randrange(len(mutated))])
                case 3:
                    line = list(mutated[at] or "x")
                    line[rng.randrange(len(line))] = chr(rng.randrange(32, 127))
                    mutated[at] = "".join(line)
        try:
            checked = check_offer("\r\n".join(mutated) + "\r\n")
        except OfferRefused:
            outcomes["refused"] += 1
            continue
        peer = make_peer()
        try:
            await peer.answer(checked)
        except OfferRefused:
            outcomes["refused"] += 1  # and closed already
        else:
            outcomes["answered"] += 1
            await peer.close()
    assert outcomes["answered"] > 5 and outcomes["refused"] > 5
    await asyncio.sleep(0.3)
    assert len(asyncio.all_tasks()) <= tasks + 1


async def test_an_offer_without_a_common_codec_is_refused() -> None:
    sdp = await real_offer()
    peer = make_peer()
    with pytest.raises(OfferRefused, match="negotiated"):
        await peer.answer(check_offer(sdp.replace("opus/48000", "speex/48000")))
    assert peer._pc.connectionState == "closed"


async def test_a_client_that_can_tell_arrivals_is_asked_for_them() -> None:
    sdp = await real_offer()
    before, video = sdp.split("m=video", 1)
    payload_types = video.split("\r\n", 1)[0].split()[2:]
    telling = "".join(f"a=rtcp-fb:{kind} transport-cc\r\n" for kind in payload_types)
    telling += f"a=extmap:9 {arrivals.EXTENSION}\r\n"
    mid = video[video.index("a=mid") :].split("\r\n", 1)[0] + "\r\n"
    plain = check_offer(sdp)
    able = check_offer(before + "m=video" + video.replace(mid, mid + telling, 1))
    for offer, count in ((plain, 0), (able, 1)):
        peer = make_peer()
        answer = await peer.answer(offer)
        await peer.close()
        assert answer.count(f"a=extmap:9 {arrivals.EXTENSION}") == count
        assert (answer.count(" transport-cc") > 0) == (count > 0)
