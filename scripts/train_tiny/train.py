"""Trains the embedded character end to end and exports it into the package.

    python -m scripts.train_tiny.speech --minutes 230 --out scripts/train_tiny/data/speech.npz
    python -m scripts.train_tiny.idle_tracks --out scripts/train_tiny/data/idle.npz
    python -m scripts.train_tiny.fused_renderer --out scripts/train_tiny/data/renderer.cubin
    python -m scripts.train_tiny.real_pictures --out scripts/train_tiny/data/real.npz
    python -m scripts.train_tiny.train --run scripts/train_tiny/runs/1 --seconds 1400

Stages: autoencoder, transformer (teacher forcing, then self-rollout), export, scores on held-out
characters and voices. It fits its stages into the seconds it is given on one H200-class GPU; on a
CPU it only proves that the code runs. A run's folder holds all that a later run can start from.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch

from characters_serve.config import ModelConfig
from characters_serve.model.weights import BUILTIN, load_generator, save_network
from scripts.train_tiny.data import ClipSource
from scripts.train_tiny.networks import blend
from scripts.train_tiny.profiler import StepProfiler
from scripts.train_tiny.quality import CHECKPOINT, Judges, converse, judge, make_renderer
from scripts.train_tiny.real_clips import RealPictures
from scripts.train_tiny.renderer import sample_characters
from scripts.train_tiny.train_autoencoder import (
    load_autoencoder,
    save_autoencoder,
    say,
    train_autoencoder,
)
from scripts.train_tiny.train_dit import load_with_new_audio_encoder, train_dit

EXPORT_AND_SCORE_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("scripts/train_tiny/data"))
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1400, help="for everything")
    parser.add_argument("--autoencoder-batch", type=int, default=24)
    parser.add_argument(
        "--real-clips",
        type=int,
        default=4,
        help="of the autoencoder's batch; 0: rendered ones only",
    )
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--decoded", type=int, default=12, help="clips a step that are decoded")
    parser.add_argument(
        "--pool", type=int, default=3072, help="clips the transformer trains on at a time"
    )
    parser.add_argument("--evaluate-characters", type=int, default=12)
    parser.add_argument("--evaluate-seconds", type=int, default=60)
    parser.add_argument("--rate", type=float, default=2e-3, help="of Muon and AdamW, at its peak")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--autoencoder-share", type=float, default=0.38, help="of the seconds; 0 keeps it as it is"
    )
    parser.add_argument(
        "--teacher-share",
        type=float,
        default=0.35,
        help="of the transformer's seconds: in true context; then in that of its own rollouts",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=CHECKPOINT,
        help="from a run's folder; without one, from checkpoint/ and the weights in the package",
    )
    parser.add_argument(
        "--new-audio-encoder",
        action="store_true",
        help="where --resume finds one of another shape: begin it afresh and keep all the rest",
    )
    parser.add_argument(
        "--start-share",
        type=float,
        default=0.0,
        help="of the transformer that --resume found, in the one that is exported: where two runs "
        "ended, the mean of their weights errs less than either (RECORD.md, run 5)",
    )
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    options = parser.parse_args()
    if options.start_share and (not options.resume or options.new_audio_encoder):
        parser.error("--start-share needs all of the transformer that --resume finds")
    started = time.monotonic()

    def left_s() -> float:
        return float(options.seconds) - EXPORT_AND_SCORE_S - (time.monotonic() - started)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    if cuda:
        # Its backward crashes on these shapes (illegal memory access, torch 2.11).
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    options.run.mkdir(parents=True, exist_ok=True)
    model = ModelConfig()
    source = ClipSource(options.data, model, device)
    renderer = make_renderer(device, options.data)
    real = None
    if options.real_clips:
        real = RealPictures(options.data, model, device, options.real_clips)
    record: dict[str, Any] = {}

    def keep(key: str, value: Any) -> None:
        record[key] = value
        (options.run / "record.json").write_text(json.dumps(record))

    profiler = StepProfiler(enabled=options.profile)
    autoencoder = reader = dit = None
    if options.resume:
        weights = BUILTIN if options.resume == CHECKPOINT else options.resume
        autoencoder, reader = load_autoencoder(model, options.resume, weights, device)
        if options.new_audio_encoder:
            dit = load_with_new_audio_encoder(model, weights, device)
        else:
            begun = model.model_copy(update={"weights": str(weights)})
            dit = load_generator(begun, device=device, dtype=torch.float32)
    if autoencoder is None or reader is None or options.autoencoder_share:
        autoencoder, reader, log = train_autoencoder(
            model,
            source,
            renderer,
            options.run,
            start=autoencoder,
            profiler=profiler,
            real=real,
            seconds=left_s() * options.autoencoder_share,
            batch=options.autoencoder_batch,
            rate=options.rate,
            seed=options.seed,
        )
        keep("autoencoder", log)
        save_autoencoder(autoencoder, reader, options.run)
        save_network(autoencoder.decoder, options.run, "decoder")
    say(f"{left_s():.0f} s left for the transformer")
    beginning = copy.deepcopy(dit) if options.start_share else None
    dit, painter, log = train_dit(
        model,
        autoencoder,
        source,
        renderer,
        start=dit,
        profiler=profiler,
        real=real,
        seconds_left=left_s,
        pool_size=options.pool,
        pool_chunks=20 if cuda else 6,
        batch=options.batch,
        chunks=12 if cuda else 6,
        decoded=options.decoded,
        rate=options.rate,
        teacher_share=options.teacher_share,
        seed=options.seed,
    )
    if beginning is not None:
        blend(dit, beginning, options.start_share)
    save_network(dit, options.run, "dit")
    save_network(painter.decoder, options.run, "decoder")
    keep("dit", log)
    say(f"exported after {time.monotonic() - started:.0f} s")
    generator = torch.Generator(device=device).manual_seed(4321)
    attributes = sample_characters(options.evaluate_characters, generator, device)
    frames = options.evaluate_seconds * model.fps
    talk = converse(source, renderer, model, attributes, frames, generator)
    score = judge(
        dit,
        Judges(painter, reader, renderer),
        talk,
        windows=3,
        window_seconds=8 if cuda else 1,
        sheet=options.run / "rollout.png",
    )
    keep("scores", score)
    say(json.dumps(score))
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
