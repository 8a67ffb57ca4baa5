"""Times spoken turns through a real server and a real browser, stage by stage.

    characters bench turns --turns 51 --sessions 12 --out turns.json --chart turns.png

Chromium's microphone plays questions spoken by the agent's own voice and, at the end of each
session, words spoken over an answer. The server stamps each turn's stages, in milliseconds from the
end of the user's speech; the page tells it when the answer was heard. The last line of the output,
and the file, are one JSON object that says what was measured, with which command, on which commit
and machine, and how busy other programs kept it; the chart shows the medians beside a published
report's. 13 minutes for 51 turns. Needs playwright (the `dev` extra) and a Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import wave
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch

from characters_serve.bench.cores import usage
from characters_serve.bench.origin import device_name, origin, report

QUESTIONS: Final = (
    "What is your name?",
    "Where do you live?",
    "How old are you?",
    "What can you do?",
    "Who made you?",
    "How are you today?",
    "What is your favorite color?",
    "Tell me a joke.",
    "My sister has a new car.",
    "Are you a robot?",
    "What is seven plus five?",
    "What do you like to eat?",
)
# Its answer is long enough to be spoken over, that long after the question's end.
LONG_QUESTION: Final = "Tell me a joke."
OVER_IT: Final = "Wait, wait, stop."
OVER_IT_AFTER_S: Final = 2.2
AUDIBLE: Final = 0.01  # of full scale, as for the page's watcher
MICROPHONE_RATE: Final = 48_000
FIRST_QUESTION_S: Final = 6.0
SPACING_S: Final = 9.0
# Questions must not keep step with the chunks.
AFTER_S: Final = 4.0
DRIFT_S: Final = 0.037
READY_S: Final = 120.0
CHROMIUM_FLAGS: Final = (
    "--autoplay-policy=no-user-gesture-required",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--disable-features=WebRtcHideLocalIpsWithMdns",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Watches the page's own connection: its events, and from when to when there was sound.
WATCH_JS: Final = """
(() => {
  const watch = (window.turnWatch = { events: [], sounds: [], micAtMs: null });
  const Peer = window.RTCPeerConnection;
  window.RTCPeerConnection = class extends Peer {
    constructor(...options) {
      super(...options);
      window.turnPeer = this;
      this.addEventListener("track", ({ track }) => {
        if (track.kind !== "audio") return;
        const context = new AudioContext();
        const analyser = new AnalyserNode(context, { fftSize: 512 });
        context.createMediaStreamSource(new MediaStream([track])).connect(analyser);
        const samples = new Float32Array(analyser.fftSize);
        setInterval(() => {
          analyser.getFloatTimeDomainData(samples);
          if (samples.every((sample) => Math.abs(sample) < 0.01)) return;
          const atMs = performance.now();
          const last = watch.sounds.at(-1);
          if (last && atMs - last[1] < 400) last[1] = atMs;
          else watch.sounds.push([atMs, atMs]);
        }, 10);
      });
    }
    createDataChannel(label, options) {
      const channel = super.createDataChannel(label, options);
      const keep = ({ data }) =>
        watch.events.push({ atMs: performance.now(), ...JSON.parse(data) });
      if (label === "events") channel.addEventListener("message", keep);
      return channel;
    }
  };
  const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  navigator.mediaDevices.getUserMedia = async (wanted) => {
    const stream = await open(wanted);
    watch.micAtMs = performance.now();
    return stream;
  };
})();
"""
# What the browser missed: freezes of the picture, and sound that it made up.
MISSED_JS: Final = """
async () => {
  const missed = {};
  for (const stats of (await turnPeer.getStats()).values()) {
    if (stats.type !== "inbound-rtp") continue;
    if (stats.kind === "video") {
      missed.freezes = stats.freezeCount;
      missed.frozen_ms = 1000 * stats.totalFreezesDuration;
    } else {
      missed.concealed_ms = (stats.concealedSamples - stats.silentConcealedSamples) / 48;
    }
  }
  return missed;
}
"""
# Published medians, in seconds: the agent's share, the pipeline's, the delivery's, and the rest.
REPORT_S: Final = {"agent": 1.42, "pipeline": 0.49, "delivery": 0.19, "other": 0.03}
# Who spends the time up to each stage, and what on.
SHARES: Final = {
    "end_of_turn": ("agent", "pause"),
    "transcript": ("agent", "words"),
    "reply": ("agent", "reply"),
    "first_audio": ("agent", "voice"),
    "generated": ("pipeline", "step"),
    "frames": ("pipeline", "decode"),
    "voice": ("pipeline", "buffer"),
    "heard": ("delivery", "delivery"),
}
PART: Final = "part_"
INK: Final = "#1b1c20"
COLOURS: Final = {
    "agent": ("#5b5bd6", "#7b7be0"),
    "pipeline": ("#0f9d8c", "#35b0a1"),
    "delivery": ("#c9861a", "#d79b3d"),
    "other": ("#8a8d96", "#8a8d96"),
}


@dataclass(frozen=True)
class Script:
    """What one session's microphone says: each text with the second at which it ends.

    over_it_begins_s: the first audible sample; a voice's recording begins 15 to 30 ms before it.
    """

    asked: list[tuple[str, float]]
    over_it_begins_s: float


def write_microphone(path: Path, texts: Sequence[str]) -> Script:
    import soxr

    from characters_serve.agent.voice import SAMPLE_RATE, HibariVoice

    voice = HibariVoice()
    pcm = bytearray()

    def say(text: str, begin_s: float) -> float:
        pcm.extend(bytes(2 * round(begin_s * MICROPHONE_RATE) - len(pcm)))
        spoken = np.frombuffer(voice.synthesize(text), "<i2")
        resampled = np.asarray(soxr.resample(spoken, SAMPLE_RATE, MICROPHONE_RATE))
        pcm.extend(resampled.astype("<i2").tobytes())
        return len(pcm) / 2 / MICROPHONE_RATE

    def begin_s(index: int) -> float:
        return FIRST_QUESTION_S + index * (SPACING_S + DRIFT_S)

    asked = [(text, say(text, begin_s(index))) for index, text in enumerate(texts)]
    over_it_s = say(LONG_QUESTION, begin_s(len(texts))) + OVER_IT_AFTER_S
    say(OVER_IT, over_it_s)
    over_it = np.frombuffer(bytes(pcm[2 * round(over_it_s * MICROPHONE_RATE) :]), "<i2")
    over_it_s += int(np.argmax(np.abs(over_it) > AUDIBLE * 32768)) / MICROPHONE_RATE
    pcm.extend(bytes(2 * MICROPHONE_RATE * 60))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(MICROPHONE_RATE)
        file.writeframes(bytes(pcm))
    return Script(asked, over_it_s)


@contextmanager
def serving(folder: Path, overrides: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A server of this code on a free port: its address and its process."""
    own = ["server.port=0", f"server.run_dir={folder}", "server.drain_s=0", "agent.greet=false"]
    settings = [*own, *overrides]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "characters_serve.cli", "serve"),
                *(part for setting in settings for part in ("--set", setting)),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline_s = time.monotonic() + READY_S
        while (found := re.search(r"\nOpen (http://\S+:\d+)", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield found[1], psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def converse(url: str, microphone: Path, script: Script) -> dict[str, Any]:
    """Talks as the file does; returns what the page's watcher gathered."""
    from playwright.async_api import async_playwright

    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=next((path for name in names if (path := shutil.which(name))), None),
            chromium_sandbox=False,
            args=[*CHROMIUM_FLAGS, f"--use-file-for-fake-audio-capture={microphone}%noloop"],
        )
        page = await browser.new_page()
        await page.add_init_script(WATCH_JS)
        await page.goto(url)
        await page.locator("[data-testid^=gallery-card-]").first.click()
        await page.get_by_test_id("talk").click()
        await page.wait_for_selector("body[data-phase=live]")
        # A call from here every so often would take a share of what is measured.
        await asyncio.sleep(script.over_it_begins_s + AFTER_S)
        watched: dict[str, Any] = await page.evaluate("() => turnWatch")
        watched["missed"] = await page.evaluate(MISSED_JS)
        await page.get_by_test_id("stop").click()
        await browser.close()
    return watched


def collect(watched: dict[str, Any], asked: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """One record for each question: its stages, what was heard, and the sound in the browser."""
    turns = []
    for text, end_s in asked:
        end_ms = watched["micAtMs"] + 1000 * end_s
        # A question's events can come before its file says that it is over: devices run ahead.
        events = [
            e for e in watched["events"] if -300 < e["atMs"] - end_ms < 1000 * SPACING_S - 2000
        ]
        data = [event.get("data") or {} for event in events]
        heard = [
            d["text"]
            for e, d in zip(events, data, strict=True)
            if e["type"] == "user-transcription" and d["final"]
        ]
        stages = [d["turn"] for d in data if "turn" in d]
        turn = dict(stages[-1]) if stages else {}
        turns.append({"asked": text, "heard": heard[0] if heard else "", "stages_ms": turn})
    return turns


def barge_in_ms(watched: dict[str, Any], begins_s: float) -> float | None:
    """From the user's first sound to the voice's last; None when nothing was spoken over."""
    began_ms = watched["micAtMs"] + 1000 * begins_s
    for first_ms, last_ms in watched["sounds"]:
        if first_ms < began_ms < last_ms:
            return round(float(last_ms - began_ms), 1)
    return None


def summary(turns: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Each stage's median and 95th percentile over the turns that were answered."""
    by_stage: dict[str, list[float]] = {}
    for turn in turns:
        stages = turn["stages_ms"]
        for stage, value in stages.items():
            by_stage.setdefault(stage, []).append(value)
        if "first_audio" in stages and "voice" in stages:
            spent = stages["voice"] - stages["first_audio"]
            by_stage.setdefault("first_audio_to_voice", []).append(spent)
        before_ms = 0.0
        for stage in SHARES:
            if stage in stages:
                by_stage.setdefault(f"{PART}{stage}", []).append(stages[stage] - before_ms)
                before_ms = stages[stage]
    return {
        stage: {
            "median": round(float(np.median(values)), 1),
            "p95": round(float(np.percentile(values, 95)), 1),
        }
        for stage, values in sorted(by_stage.items(), key=lambda item: float(np.median(item[1])))
    }


def measure(num_turns: int, num_sessions: int, overrides: list[str]) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    barge_ins: list[float] = []
    missed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder, overrides) as (url, server):
            before, began_s = usage(server), time.monotonic()
            for index in range(num_sessions):
                share = range(len(turns), num_turns * (index + 1) // num_sessions)
                texts = [QUESTIONS[number % len(QUESTIONS)] for number in share]
                script = write_microphone(folder / "microphone.wav", texts)
                watched = asyncio.run(converse(url, folder / "microphone.wav", script))
                turns += collect(watched, script.asked)
                events += watched["events"]
                missed.update(watched["missed"])
                over_it_ms = barge_in_ms(watched, script.over_it_begins_s)
                barge_ins += [] if over_it_ms is None else [over_it_ms]
                sys.stderr.write(f"session {index + 1} of {num_sessions}\n")
            elapsed_s = time.monotonic() - began_s
            after = usage(server)
    numbers = [e["data"] for e in events if "held_ms" in (e.get("data") or {})]
    about = [e["data"] for e in events if e["type"] == "bot-ready"]
    stages_ms = summary(turns)
    return {
        "turns": len(turns),
        "sessions": num_sessions,
        "answered": sum(1 for turn in turns if turn["stages_ms"]),
        "heard": sum(1 for turn in turns if "heard" in turn["stages_ms"]),
        "turn_s_median": _seconds(stages_ms, "heard", "median"),
        "turn_s_p95": _seconds(stages_ms, "heard", "p95"),
        "agent_s_median": _seconds(stages_ms, "first_audio", "median"),
        "pipeline_s_median": _seconds(stages_ms, "first_audio_to_voice", "median"),
        "delivery_s_median": _seconds(stages_ms, f"{PART}heard", "median"),
        "barge_ins": len(barge_ins),
        "barge_in_ms_median": round(float(np.median(barge_ins)), 1) if barge_ins else None,
        "barge_in_ms_p95": round(float(np.percentile(barge_ins, 95)), 1) if barge_ins else None,
        "stages_ms": stages_ms,
        "listener": about[0]["listener"] if about else "unknown",
        "fps_median": round(float(np.median([n["fps"] for n in numbers])), 2) if numbers else None,
        **{name: round(amount, 1) for name, amount in sorted(missed.items())},
        "seconds": round(elapsed_s, 1),
        "server_cores": round((after.cpu_s - before.cpu_s) / elapsed_s, 2),
        "other_cores_with_browser": round((after.others_s - before.others_s) / elapsed_s, 2),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "nice": os.nice(0),
        "each": turns,
        "device": f"{os.cpu_count()} x {device_name(torch.device('cpu'))}",
        **origin(),
    }


def _seconds(stages_ms: dict[str, dict[str, float]], stage: str, figure: str) -> float | None:
    return round(stages_ms[stage][figure] / 1000, 3) if stage in stages_ms else None


def draw(result: dict[str, Any], path: Path) -> None:
    """A PNG: the median of each part of a turn, beside the report's shares. Medians of parts do not
    add up to the median of the whole, which is written at the bar's end."""
    from PIL import Image, ImageDraw, ImageFont

    ours = [
        (owner, label, result["stages_ms"][f"{PART}{stage}"]["median"] / 1000)
        for stage, (owner, label) in SHARES.items()
        if f"{PART}{stage}" in result["stages_ms"]
    ]
    theirs = [(owner, owner, value_s) for owner, value_s in REPORT_S.items()]
    ours_s = result["turn_s_median"] or sum(value_s for *_, value_s in ours)
    bars = [("this server", ours, ours_s), ("published report", theirs, sum(REPORT_S.values()))]
    image = Image.new("RGB", (1200, 330), "white")
    pen = ImageDraw.Draw(image)
    large, small = ImageFont.load_default(22), ImageFont.load_default(15)
    left, scale = 190, 860 / max(whole_s for *_, whole_s in bars)
    pen.text((20, 14), "End of the user's speech to the character's voice, median", INK, large)
    for row, (name, parts, whole_s) in enumerate(bars):
        top, at = 66 + 104 * row, float(left)
        pen.text((20, top + 14), name, INK, small)
        for index, (owner, label, value_s) in enumerate(parts):
            wide = value_s * scale
            fill = COLOURS[owner][index % 2]
            if wide >= 1:
                pen.rectangle((round(at), top, round(at + wide - 1), top + 46), fill)
            if pen.textlength(label, small) < wide - 8:
                pen.text((at + 5, top + 5), label, "white", small)
                pen.text((at + 5, top + 24), f"{value_s:.2f}", "white", small)
            at += wide
        pen.text((at + 10, top + 11), f"{whole_s:.2f} s", INK, large)
    at = float(left)
    for owner, words in (
        ("agent", "the agent: hearing, thinking, speaking"),
        ("pipeline", "making the pictures"),
        ("delivery", "network and browser"),
    ):
        pen.rectangle((round(at), 282, round(at) + 14, 296), COLOURS[owner][0])
        pen.text((at + 22, 279), words, INK, small)
        at += 60 + pen.textlength(words, small)
    image.save(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="characters bench turns", description="Times spoken turns through a real browser."
    )
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--turns", type=int, default=51)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chart", type=Path, metavar="PNG")
    options = parser.parse_args(arguments)
    if not 1 <= options.sessions <= options.turns:
        parser.error("--sessions must lie between 1 and --turns")
    result = measure(options.turns, options.sessions, options.set)
    if options.chart:
        draw(result, options.chart)
    report(result, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
