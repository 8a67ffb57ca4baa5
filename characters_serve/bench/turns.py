"""Times spoken turns through a real server and a real browser, stage by stage.

    python -m characters_serve.bench.turns --turns 16 --out turns.json

Chromium's microphone plays questions spoken by the agent's own voice; the server stamps each turn's
stages, in milliseconds from the end of the user's speech, and the browser says when it heard the
answer. The last line of the output, and the file, are one JSON object that says what was measured,
with which command, on which commit and machine, and how busy other programs kept it. Needs
playwright (the `dev` extra) and a Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch

from characters_serve.bench.origin import commit
from characters_serve.bench.step import device_name

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
MICROPHONE_RATE: Final = 48_000
FIRST_QUESTION_S: Final = 8.0
SPACING_S: Final = 11.0
# Questions must not keep step with the chunks.
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
# Watches the page's own connection: its events, and when the answer's sound is played.
WATCH_JS: Final = """
(() => {
  const watch = (window.turnWatch = { events: [], onsets: [], micAtMs: null });
  const Peer = window.RTCPeerConnection;
  window.RTCPeerConnection = class extends Peer {
    constructor(...options) {
      super(...options);
      let quietSinceMs = performance.now();
      setInterval(() => {
        const nowMs = performance.now();
        for (const receiver of this.getReceivers()) {
          if (receiver.track.kind !== "audio") continue;
          for (const { audioLevel, timestamp } of receiver.getSynchronizationSources()) {
            if (audioLevel === undefined || audioLevel < 0.01) continue;
            if (nowMs - quietSinceMs > 500) watch.onsets.push(timestamp - performance.timeOrigin);
            quietSinceMs = nowMs;
          }
        }
      }, 10);
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


def write_microphone(path: Path, turns: int) -> list[tuple[str, float]]:
    """The questions' WAV; returns each with the second of the file at which it ends."""
    import soxr

    from characters_serve.agent.voice import SAMPLE_RATE, HibariVoice

    voice = HibariVoice()
    asked = []
    pcm = bytearray()
    for index in range(turns):
        text = QUESTIONS[index % len(QUESTIONS)]
        begin_s = FIRST_QUESTION_S + index * (SPACING_S + DRIFT_S)
        pcm += bytes(2 * round(begin_s * MICROPHONE_RATE) - len(pcm))
        spoken = np.frombuffer(voice.synthesize(text), "<i2")
        resampled = np.asarray(soxr.resample(spoken, SAMPLE_RATE, MICROPHONE_RATE))
        pcm += resampled.astype("<i2").tobytes()
        asked.append((text, len(pcm) / 2 / MICROPHONE_RATE))
    pcm += bytes(2 * MICROPHONE_RATE * 60)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(MICROPHONE_RATE)
        file.writeframes(bytes(pcm))
    return asked


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


async def converse(url: str, microphone: Path, last_s: float) -> dict[str, Any]:
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
        await asyncio.sleep(last_s + SPACING_S)
        watched: dict[str, Any] = await page.evaluate("() => turnWatch")
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
        sounds = [at for at in watched["onsets"] if 0 < at - end_ms < 1000 * SPACING_S - 2000]
        turn = dict(stages[0]) if stages else {}
        if turn and sounds:
            turn["heard_in_browser"] = round(sounds[0] - end_ms, 1)
        turns.append({"asked": text, "heard": heard[0] if heard else "", "stages_ms": turn})
    return turns


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
    return {
        stage: {
            "median": round(float(np.median(values)), 1),
            "p95": round(float(np.percentile(values, 95)), 1),
        }
        for stage, values in sorted(by_stage.items(), key=lambda item: float(np.median(item[1])))
    }


def measure(num_turns: int, overrides: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = write_microphone(folder / "microphone.wav", num_turns)
        with serving(folder, overrides) as (url, server):
            before, began_s = _cpu_s(server), time.monotonic()
            watched = asyncio.run(converse(url, folder / "microphone.wav", asked[-1][1]))
            elapsed_s = time.monotonic() - began_s
            server_s, others_s = (
                after - earlier for after, earlier in zip(_cpu_s(server), before, strict=True)
            )
    turns = collect(watched, asked)
    numbers = [e["data"] for e in watched["events"] if "held_ms" in (e.get("data") or {})]
    about = [e["data"] for e in watched["events"] if e["type"] == "bot-ready"]
    return {
        "turns": len(turns),
        "answered": sum(1 for turn in turns if turn["stages_ms"]),
        "stages_ms": summary(turns),
        "listener": about[0]["listener"] if about else "unknown",
        "held_ms": numbers[-1]["held_ms"] if numbers else None,
        "late": numbers[-1]["late"] if numbers else None,
        "fps_median": round(float(np.median([n["fps"] for n in numbers])), 2) if numbers else None,
        "seconds": round(elapsed_s, 1),
        "server_cores": round(server_s / elapsed_s, 2),
        "other_cores_with_browser": round(others_s / elapsed_s, 2),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "nice": os.nice(0),
        "each": turns,
        "device": f"{os.cpu_count()} x {device_name(torch.device('cpu'))}",
        "command": shlex.join(["python", "-m", "characters_serve.bench.turns", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_s(server: psutil.Process) -> tuple[float, float]:
    """Processor time so far: of the server's processes, and of everything else on the machine."""
    spent = psutil.cpu_times()
    busy = sum(spent) - spent.idle - spent.iowait - spent.guest - spent.guest_nice
    ours = 0.0
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            ours += used.user + used.system
    return ours, busy - ours


def main() -> int:
    parser = argparse.ArgumentParser(description="Times spoken turns through a real browser.")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(options.turns, options.overrides)
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
