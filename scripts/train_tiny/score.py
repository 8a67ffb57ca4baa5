"""Scores the exported character again, on any device.

python -m scripts.train_tiny.score --run scripts/train_tiny/runs/1 --characters 8 --seconds 60
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from characters_serve.config import ModelConfig
from characters_serve.model.weights import BUILTIN, load_generator
from scripts.train_tiny.data import ClipSource
from scripts.train_tiny.evaluate import evaluate
from scripts.train_tiny.fused_renderer import FusedRenderer
from scripts.train_tiny.renderer import Renderer
from scripts.train_tiny.train import CHECKPOINT
from scripts.train_tiny.train_autoencoder import load_autoencoder, say


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("scripts/train_tiny/data"))
    parser.add_argument("--run", type=Path, required=True, help="where the results go")
    parser.add_argument("--weights", type=Path, default=BUILTIN)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--characters", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--window-seconds", type=int, default=8)
    parser.add_argument("--passes", type=int, default=4)
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ModelConfig(weights=str(options.weights))
    source = ClipSource(options.data, model, device)
    renderer = (
        FusedRenderer(device, options.data / "renderer.cubin")
        if device.type == "cuda"
        else Renderer(device)
    )
    autoencoder, reader = load_autoencoder(model, options.checkpoint, options.weights, device)
    score = evaluate(
        load_generator(model, device=device, dtype=torch.float32),
        autoencoder,
        reader,
        source,
        renderer,
        options.run,
        characters=options.characters,
        seconds=options.seconds,
        passes=options.passes,
        window_seconds=options.window_seconds,
    )
    (options.run / f"score-{options.passes}.json").write_text(json.dumps(score, indent=1))
    say(json.dumps(score, indent=1))


if __name__ == "__main__":
    main()
