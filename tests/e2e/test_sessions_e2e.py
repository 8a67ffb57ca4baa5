"""Conversations begun, shared, lost, taken up again and interrupted, in a real browser."""

from __future__ import annotations

import asyncio
import io
import json
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest
from PIL import ExifTags, Image, ImageDraw
from playwright.async_api import Route, expect

from characters_serve.gateway.images import BACKGROUND
from tests.e2e.rig import (
    JUDGED,
    Measure,
    Others,
    Server,
    browser,
    new_tab,
    running_server,
    until,
    watched_s,
)
from tests.e2e.speech import microphone_wav, question_wav

HEARTBEAT_S = 5.0
GRACE_S = 3.0
FPS = 24
KINDS = ("audio", "video")


async def freed(server: Server, within_s: float) -> float:
    return await asyncio.to_thread(server.seconds_until_free, within_s)


async def test_picture_and_sound_arrive_together_and_in_order(
    pattern: Server, measure: Measure
) -> None:
    async with browser() as launched:
        tab = await new_tab(launched, pattern, hears=True)
        measure("live_s", await tab.talk())
        await tab.hear()
        await tab.page.evaluate("() => probe.read()")
        before, used_s, others = await tab.inbound(), pattern.cpu_s(), Others()
        browser_says = []
        for _ in range(round(watched_s(25))):
            await tab.passes(1)
            now = await tab.inbound()
            sound, picture = (now[kind].get("estimatedPlayoutTimestamp") for kind in KINDS)
            if sound is not None and picture is not None:  # not before the first sender reports
                browser_says.append(sound - picture)
        after, used_s = await tab.inbound(), pattern.cpu_s() - used_s
        frames, onsets = await tab.seen("frames"), await tab.seen("onsets")
        quiet_machine = others.can_judge(measure)
        await tab.page.get_by_test_id("stop").click()
    await freed(pattern, 5)

    elapsed_s = (after["atMs"] - before["atMs"]) / 1000  # type: ignore[operator]
    fps = (after["video"]["framesDecoded"] - before["video"]["framesDecoded"]) / elapsed_s
    measure("fps", round(fps, 2))
    assert fps > 8
    measure("cores", round(used_s / elapsed_s, 2))
    steps = [b["counter"] - a["counter"] for a, b in pairwise(frames)]
    measure("frames_seen", len(frames))
    assert min(steps) >= 0, "a frame was shown after a later one"

    # A flash whose first picture this page missed began earlier than it was seen.
    flashes = [
        b["shownMs"]
        for a, b in pairwise(frames)
        if b["flash"] and not a["flash"] and b["counter"] % FPS == 0
    ]
    offsets = [min((onset - flash for onset in onsets), key=abs) for flash in flashes]
    settled = offsets[len(offsets) // 2 :]
    measure("av_offset_by_get_stats_ms", [round(offset) for offset in browser_says])
    measure("av_offset_ms", round(statistics.median(settled), 1) if settled else None)
    measure("av_offsets_ms", [round(offset) for offset in offsets])
    if not quiet_machine:
        return
    assert fps >= 23.5
    assert after["video"].get("freezeCount", 0) <= 1
    assert len(frames) > 18 * elapsed_s, "the page's own callbacks came too seldom to judge"
    assert steps.count(0) <= 3, "frames were held"
    assert frames[-1]["counter"] - frames[0]["counter"] >= 23.5 * (elapsed_s - 1)
    assert len(settled) >= 8
    # Positive: the sound came after the picture. The probe reads sound 20 to 40 ms late: measured,
    # its median is that much above what the browser estimates of itself.
    assert abs(statistics.median(settled)) <= 60
    assert abs(statistics.median(browser_says)) <= 60


async def test_a_second_conversation_is_refused_until_the_first_stops(pattern: Server) -> None:
    async with browser() as launched:
        first, second = await new_tab(launched, pattern), await new_tab(launched, pattern)
        await first.talk()
        refused = httpx.post(f"{pattern.url}/v1/sessions", json={"character": "mira"})
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        await second.page.get_by_test_id("talk-text").click()
        await expect(second.page.get_by_test_id("error")).to_contain_text("busy")
        await expect(second.page.locator("body")).to_have_attribute("data-phase", "idle")
        await expect(first.page.locator("body")).to_have_attribute("data-phase", "live")

        await first.page.get_by_test_id("stop").click()
        await first.reach("idle")
        await freed(pattern, 5)
        await second.page.get_by_test_id("error-action").click()
        await second.reach("live")
        await second.page.get_by_test_id("stop").click()
        await second.reach("idle")
    await freed(pattern, 5)


async def test_the_first_sound_of_every_answer_is_noticed(pattern: Server) -> None:
    """A listener that is asked again must not be stopped by the turn before."""
    script = """async (turns) => {
      const { FirstSound } = await import("/client.js");
      const context = new AudioContext();
      const output = context.createMediaStreamDestination();
      const voice = new GainNode(context, { gain: 0 });
      const tone = new OscillatorNode(context);
      tone.connect(voice).connect(output);
      tone.start();
      setInterval(() => (voice.gain.value = 0.5 - voice.gain.value), 300);
      const [track] = output.stream.getAudioTracks();
      const first = new FirstSound();
      const ago = [];
      for (let turn = 0; turn < turns; turn++)
        ago.push(await new Promise((told) => first.listen(track, told)));
      first.close();
      return ago;
    }"""
    async with browser() as launched:
        tab = await new_tab(launched, pattern)
        async with asyncio.timeout(30):
            ago_ms = await tab.page.evaluate(script, 3)
    assert len(ago_ms) == 3 and min(ago_ms) >= 0


@pytest.mark.parametrize("step", ["session", "offer"])
async def test_a_refusal_is_told_and_not_tried_again(pattern: Server, step: str) -> None:
    """Whatever refuses, and at which step: one request, no candidates after it, and the seat."""
    asked: list[tuple[str, str]] = []
    async with browser() as launched:
        tab = await new_tab(launched, pattern)
        status = 0

        async def refuse(route: Route) -> None:
            if route.request.method != "POST":
                await route.continue_()
                return
            await route.fulfill(
                status=status,
                content_type="application/problem+json",
                headers={"Retry-After": "1"},
                body=json.dumps({"title": "Refused", "detail": "refused for a test"}),
            )

        where = "**/v1/sessions" if step == "session" else "**/v1/sessions/*/webrtc*"
        await tab.page.route(where, refuse)
        tab.page.on("request", lambda r: asked.append((r.method, urlsplit(r.url).path)))
        for status in (401, 409, 429, 503):
            asked.clear()
            await tab.page.get_by_test_id("talk-text").click()
            await expect(tab.page.get_by_test_id("error")).to_be_visible()
            await expect(tab.page.locator("body")).to_have_attribute("data-phase", "idle")
            await tab.passes(1.2)  # longer than it was told to wait
            tries = [path for method, path in asked if method == "POST"]
            refused = [path for path in tries if path.endswith(("sessions", "webrtc"))]
            assert len(refused) == (1 if step == "session" else 2), (status, asked)
            assert not [path for method, path in asked if method == "PATCH"]
            await freed(pattern, 5)


@pytest.mark.parametrize("says_goodbye", [True, False], ids=["told", "untold"])
async def test_a_closed_tab_frees_the_seat(
    pattern: Server, says_goodbye: bool, measure: Measure
) -> None:
    async with browser() as launched:
        tab = await new_tab(launched, pattern)
        await tab.talk()
        if not says_goodbye:
            await tab.page.evaluate("() => (navigator.sendBeacon = () => false)")
        await tab.page.close()
        measure("freed_after_s", await freed(pattern, HEARTBEAT_S + GRACE_S + 10))
        reason = (await tab.status())["reason"]
    assert reason == ("ended by the user" if says_goodbye else "the client did not come back")


async def test_a_killed_browser_frees_the_seat(
    pattern: Server, tmp_path: Path, measure: Measure
) -> None:
    mic = question_wav(tmp_path / "quiet.wav", "Hello.", 60, 0)
    async with browser(mic) as launched:
        tab = await new_tab(launched, pattern)
        await tab.talk("talk")
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any(str(mic) in word for word in words):
                process.kill()
        took_s = await freed(pattern, HEARTBEAT_S + GRACE_S + 10)
        measure("freed_after_s", round(took_s, 1))
        assert took_s > 1, "only the missing heartbeat could tell"


async def test_a_dropped_connection_comes_back_to_the_same_conversation(pattern: Server) -> None:
    async with browser() as launched:
        tab = await new_tab(launched, pattern)
        await tab.talk()
        await tab.page.evaluate("() => probe.read()")
        await tab.passes(2)
        await tab.page.evaluate("() => probe.peers.at(-1).close()")
        await tab.reach("reconnecting")
        await tab.reach("live")
        lost_at = await tab.page.evaluate("() => probe.frames.length")

        async def a_second_more() -> list[dict[str, Any]] | None:
            frames = await tab.seen("frames")
            return frames if len(frames) > lost_at + FPS else None

        frames = await until("a second of pictures", a_second_more, 10)
        assert frames[-1]["counter"] > frames[lost_at - 1]["counter"], "the character began anew"
        assert (await tab.status())["status"] == "live"
        assert len(await tab.seen("peers")) == 2
        await tab.page.get_by_test_id("stop").click()
        await tab.reach("idle")
    await freed(pattern, 5)


async def test_a_page_that_slept_asks_before_it_gives_up(pattern: Server) -> None:
    """Its timers stood still, as in a laptop that was closed, so nothing is known of the server."""
    async with browser() as launched:
        tab = await new_tab(launched, pattern)
        await tab.page.clock.install()
        await tab.talk()
        await tab.page.clock.fast_forward(30_000)
        await tab.passes(1)
        await tab.reach("live")
        assert len(await tab.seen("peers")) == 1
        await tab.page.get_by_test_id("stop").click()
        await tab.reach("idle")
    await freed(pattern, 5)


REFUSALS = {
    "NotAllowedError": "Allow it in the address bar",
    "NotReadableError": "could not be opened",
    "SecurityError": "only to https pages and localhost",
}
REFUSING = """
  Object.assign(window, { reason: null, needsTap: false, given: null });
  const [open, play] = [navigator.mediaDevices.getUserMedia, HTMLMediaElement.prototype.play];
  navigator.mediaDevices.getUserMedia = async function (wanted) {
    if (window.reason) throw new DOMException("refused", window.reason);
    return (window.given = await open.call(this, wanted));
  };
  HTMLMediaElement.prototype.play = async function () {
    if (window.needsTap && !this.muted) throw new DOMException("refused", "NotAllowedError");
    return play.call(this);
  };
"""


async def test_what_the_browser_refuses_is_told_and_the_conversation_goes_on(
    pattern: Server,
) -> None:
    """The microphone, for each reason; the sound, until a tap. It may be unplugged later, too."""
    async with browser() as launched:
        tab = await new_tab(launched, pattern, before=REFUSING)
        error, mute = tab.page.get_by_test_id("error"), tab.page.get_by_test_id("mute")
        unmute, video = tab.page.get_by_test_id("unmute"), tab.page.get_by_test_id("video")
        await tab.page.evaluate("[window.reason, window.needsTap] = ['NotFoundError', true]")
        await tab.talk("talk")
        await expect(error).to_contain_text("No microphone was found")
        await expect(tab.page.get_by_test_id("say-text")).to_be_enabled()
        await expect(unmute).to_be_visible()
        await expect(video).to_have_js_property("muted", True)
        await tab.page.evaluate("window.needsTap = false")
        await unmute.click()
        await expect(video).to_have_js_property("muted", False)
        await expect(unmute).to_be_hidden()

        for reason, words in REFUSALS.items():
            await tab.page.evaluate("name => (window.reason = name)", reason)
            await mute.click()
            await expect(error).to_contain_text(words)
        await tab.page.evaluate("window.reason = null")
        await mute.click()
        await expect(mute).to_have_text("Mute")
        await expect(error).to_be_hidden()
        await tab.page.evaluate("window.given.getTracks()[0].dispatchEvent(new Event('ended'))")
        await expect(error).to_contain_text("disconnected")
        await expect(mute).to_have_text("Use mic")
        await error.get_by_role("button", name="Try again").click()
        await expect(mute).to_have_text("Mute")
        await tab.page.get_by_test_id("stop").click()
        await tab.reach("idle")
        assert tab.complaints == []
    await freed(pattern, 5)


async def test_an_image_of_ones_own_without_a_microphone(pattern: Server, tmp_path: Path) -> None:
    picture = tmp_path / "mine.png"
    Image.new("RGB", (800, 600), (40, 120, 200)).save(picture)
    broken = tmp_path / "broken.png"
    broken.write_bytes(picture.read_bytes()[:40])
    async with browser(deny_mic=True) as launched:
        tab = await new_tab(launched, pattern)
        await tab.page.get_by_test_id("file-input").set_input_files(broken)
        await expect(tab.page.get_by_test_id("error")).to_contain_text("could not be read")
        await tab.page.get_by_test_id("file-input").set_input_files(picture)
        await tab.page.get_by_test_id("placing-use").click()
        await tab.page.get_by_test_id("upload-name").fill("Blue")
        await tab.talk("talk")
        await expect(tab.page.get_by_test_id("error")).to_contain_text("Microphone not allowed")
        await expect(tab.page.get_by_test_id("say-text")).to_be_enabled()
        assert (await tab.status())["name"] == "Blue"
        assert (await tab.inbound())["video"]["frameWidth"] == 384
        await tab.page.get_by_test_id("stop").click()
        await tab.reach("idle")
    await freed(pattern, 5)


def photo_of_a_disc(path: Path) -> Path:
    """Upright 2400 x 3200, a red disc of radius 200 up and right of its middle; lies on its side in
    the file, as cameras leave it."""
    upright = Image.new("RGB", (2400, 3200), (40, 120, 200))
    ImageDraw.Draw(upright).circle((1776, 779), 200, fill=(230, 20, 20))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    return path


KEEP_IMAGE = """
const fetchAsBefore = window.fetch;
window.fetch = (url, options) => {
  if (options?.body instanceof FormData) window.sentImage = options.body.get("image");
  return fetchAsBefore(url, options);
};
"""
READ_IMAGE = "async () => [...new Uint8Array(await window.sentImage.arrayBuffer())]"


async def test_an_image_is_sent_as_it_was_placed(pattern: Server, tmp_path: Path) -> None:
    photo = photo_of_a_disc(tmp_path / "photo.jpg")
    async with browser() as launched:
        tab = await new_tab(launched, pattern, before=KEEP_IMAGE)
        await tab.page.get_by_test_id("file-input").set_input_files(photo)
        picture = tab.page.get_by_test_id("placing-picture")
        await expect(picture).to_be_focused()
        for key in ("Shift+ArrowLeft", "ArrowLeft") * 2 + ("+",) * 5:
            await tab.page.keyboard.press(key)
        box = await picture.bounding_box()
        assert box is not None and box["width"] / box["height"] == pytest.approx(1.5, rel=0.01)
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        await tab.page.mouse.move(x, y - 100)
        await tab.page.mouse.down()
        await tab.page.mouse.move(x, y - 100 + 0.12 * 1.1**5 * box["width"])
        await tab.page.mouse.up()
        await tab.page.get_by_test_id("placing-use").click()
        await tab.talk()
        sent = Image.open(io.BytesIO(bytes(await tab.page.evaluate(READ_IMAGE))))
        await tab.page.get_by_test_id("stop").click()
        await tab.reach("idle")
        assert tab.complaints == []
    assert (sent.format, sent.size) == ("JPEG", (3 * 384, 3 * 256))
    assert not sent.getexif()
    red = np.asarray(sent.convert("RGB"), np.int16) @ (1, 0, -1) > 100
    rows, columns = red.nonzero()
    assert columns.mean() == pytest.approx(sent.width / 2, abs=4)
    assert rows.mean() == pytest.approx(sent.height / 2, abs=4)
    # The picture covered the frame at first, which the keys have enlarged from there.
    assert np.ptp(columns) == pytest.approx(400 / 2400 * 1.1**5 * sent.width, abs=6)
    assert sent.getpixel((sent.width - 1, 0)) == pytest.approx(BACKGROUND, abs=3)


# ---------------------------------------------------------------- with somebody to talk to


@pytest.fixture(scope="module")
def talking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The test picture with the real voice agent."""
    with running_server(
        tmp_path_factory.mktemp("t"),
        "engine.kind=pattern",
        "agent.greet=false",
        "agent.recogniser=pocketsphinx",
    ) as server:
        yield server


@pytest.fixture
def talking(talking_server: Server) -> Server:
    return talking_server.when_free()


LONG = (
    "Once upon a time there was a baker who lived by the river and sang to the bread each morning, "
    "and the whole town came to listen, and nobody ever wanted to leave before the song was over, "
    "because the song was long, and the bread was warm, and the river was quiet."
)
VOICE = 0.01  # above the beep behind the low-pass, below any vowel


def quiet_from(levels: list[list[float]], after_ms: float, for_ms: float) -> float:
    """When the voice had fallen silent for good (that long), counted from after_ms."""
    last_ms = after_ms
    for at_ms, rms in levels:
        if at_ms <= after_ms or rms < VOICE:
            continue
        if at_ms - last_ms > for_ms:
            break
        last_ms = at_ms
    return last_ms - after_ms


async def test_speaking_into_the_characters_speech_stops_it(
    talking: Server, tmp_path: Path, measure: Measure
) -> None:
    spoken_at_s = [9.0, 19.0, 29.0] if JUDGED else [9.0, 19.0]
    words = [(at_s, "Wait a moment, please stop.") for at_s in spoken_at_s]
    mic = microphone_wav(tmp_path / "wait.wav", words, 30)
    began_ms, cut_ms, quiet_ms = 0.0, [], []
    others = Others()
    async with browser(mic) as launched:
        tab = await new_tab(launched, talking, hears=True)
        await tab.talk("talk")
        await tab.hear(lowpass_hz=300)
        for at_s in spoken_at_s:
            await tab.mic_reaches(at_s - 4)
            await tab.say(LONG)
            began = await tab.event("bot-started-speaking", 4, after_ms=began_ms)
            heard = await tab.event("user-started-speaking", 10, after_ms=began["atMs"])
            cut = await tab.event("bot-interrupted", 3, after_ms=began["atMs"])
            await tab.mic_reaches(at_s + 1)
            levels = await tab.seen("levels")
            before = [rms for at, rms in levels if heard["atMs"] - 800 < at < heard["atMs"]]
            assert sum(rms > VOICE for rms in before) > len(before) / 2, "it was not speaking"
            quiet_ms.append(quiet_from(levels, heard["atMs"], 300))
            cut_ms.append(quiet_from(levels, cut["atMs"], 300))
            began_ms = cut["atMs"]
        quiet_machine = others.can_judge(measure)
        await tab.page.get_by_test_id("stop").click()
    await freed(talking, 5)
    measure("quiet_after_user_started_ms", [round(ms) for ms in quiet_ms])
    measure("quiet_after_bot_interrupted_ms", [round(ms) for ms in cut_ms])
    if quiet_machine:
        # What is left after the cut is the browser's own buffer, and 30 ms of this measurement.
        assert statistics.median(quiet_ms) <= 300
        assert max(cut_ms) <= 300


async def test_the_button_stops_the_character_and_typed_text_is_answered(
    talking: Server, measure: Measure
) -> None:
    others = Others()
    async with browser() as launched:
        tab = await new_tab(launched, talking, hears=True)
        await tab.pick("bruno")
        await tab.talk()
        await tab.hear(lowpass_hz=300)
        await tab.say(LONG)
        await expect(tab.page.locator("#frame")).to_have_attribute(
            "data-speaker", "character", timeout=8000
        )
        await tab.passes(1)
        pressed_ms = await tab.now_ms()
        await tab.page.get_by_test_id("interrupt").click()
        await tab.event("bot-stopped-speaking", 10, after_ms=pressed_ms, interrupted=True)
        await expect(tab.page.locator("#frame")).to_have_attribute("data-speaker", "listening")
        await tab.passes(1)
        quiet_ms = quiet_from(await tab.seen("levels"), pressed_ms, 400)
        measure("quiet_after_the_button_ms", round(quiet_ms))
        if others.can_judge(measure):
            assert quiet_ms <= 500

        await tab.page.get_by_test_id("say-text").fill("What is your name?")
        await tab.page.get_by_test_id("say-send").click()
        answer = tab.page.locator(".bubble[data-role=character] .words").last
        await expect(answer).to_contain_text("Bruno", timeout=8000)
        typed = tab.page.locator(".bubble[data-role=user] .words")
        await expect(typed).to_have_text(["What is your name?"])
        await tab.page.get_by_test_id("stop").click()
        await tab.reach("idle")
    await freed(talking, 5)


def test_the_rig_measures_a_cut_voice() -> None:
    voiced = [[float(at), 0.1] for at in range(0, 1000, 20)]
    silent = [[float(at), 0.0] for at in range(1000, 2000, 20)]
    assert quiet_from(voiced + silent, 900, 400) == 80
    assert quiet_from(voiced + silent, 100, 400) == 880
