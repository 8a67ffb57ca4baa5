"""Trains the embedded character end to end and exports it into the package.

  python -m scripts.train_tiny.train --data scripts/train_tiny/data --run scripts/train_tiny/runs/1

Stages: autoencoder, transformer (teacher forcing, then self-rollout), scores, export. Takes one
H200-class GPU about twenty minutes; on a CPU it only proves that the code runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from characters_serve.config import ModelConfig
from characters_serve.model.weights import save_network
from scripts.train_tiny.data import ClipSource
from scripts.train_tiny.evaluate import evaluate
from scripts.train_tiny.networks import MouthReader
from scripts.train_tiny.pictures import save_curves
from scripts.train_tiny.renderer import Renderer
from scripts.train_tiny.train_autoencoder import load_autoencoder, say, train_autoencoder
from scripts.train_tiny.train_dit import train_dit


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--autoencoder-seconds", type=float, default=480)
    parser.add_argument("--teacher-seconds", type=float, default=280)
    parser.add_argument("--rollout-seconds", type=float, default=280)
    parser.add_argument("--autoencoder-batch", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--decoded", type=int, default=22, help="clips a step that are decoded")
    parser.add_argument("--pool", type=int, default=8192, help="clips the transformer trains on")
    parser.add_argument("--evaluate-characters", type=int, default=24)
    parser.add_argument("--evaluate-seconds", type=int, default=180)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reuse-autoencoder", action="store_true")
    options = parser.parse_args()

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
    renderer = Renderer(device, batch=180 if cuda else 8, compiled=cuda)
    started = time.monotonic()

    if options.reuse_autoencoder:
        autoencoder = load_autoencoder(model, options.run, device)
        reader = MouthReader().to(device).eval()
        reader.load_state_dict(torch.load(options.run / "mouth_reader.pt", map_location=device))
    else:
        autoencoder, reader = train_autoencoder(
            model,
            source,
            renderer,
            options.run,
            seconds=options.autoencoder_seconds,
            batch=options.autoencoder_batch,
            rate=2e-3,
            seed=options.seed,
        )
    dit, painter = train_dit(
        model,
        autoencoder,
        source,
        renderer,
        options.run,
        teacher_seconds=options.teacher_seconds,
        rollout_seconds=options.rollout_seconds,
        pool_size=options.pool,
        pool_chunks=20 if cuda else 6,
        batch=options.batch,
        chunks=12 if cuda else 6,
        decoded=options.decoded,
        rate=2e-3,
        seed=options.seed,
    )
    save_network(dit, options.run, "dit")
    save_network(painter.decoder, options.run, "decoder")
    say(f"exported after {time.monotonic() - started:.0f} s")
    scores = {}
    for passes in (4, 2):
        scores[f"{passes} passes"] = evaluate(
            dit,
            painter,
            reader,
            source,
            renderer,
            options.run,
            characters=options.evaluate_characters,
            seconds=options.evaluate_seconds if passes == 4 else 20,
            passes=passes,
            window_seconds=8 if cuda else 1,
            name=f"rollout-{passes}",
        )
        say(json.dumps(scores))
    (options.run / "scores.json").write_text(json.dumps(scores, indent=1))
    curves: dict[str, list[tuple[float, float]]] = {}
    for file, keys in (("autoencoder.json", ["loss"]), ("dit.json", ["latent", "picture"])):
        if (options.run / file).exists():
            log = json.loads((options.run / file).read_text())["log"]
            curves |= {f"{file[:-5]} {k}": [(e["seconds"], e[k]) for e in log] for k in keys}
    try:
        save_curves(curves, options.run / "curves.png")
    except ImportError:
        say("no matplotlib: curves.png not drawn")
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
