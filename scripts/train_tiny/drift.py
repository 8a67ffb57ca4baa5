"""Minutes of preset characters through the served model: do colours, identity, sharpness stay?

    python -m scripts.train_tiny.drift --minutes 3 --out drift.json mira bruno saffron

Background and colour are the largest channel difference to the reference (of 255); sharpness is the
mean horizontal gradient over the reference's. Speech is the held-out clips, over and over.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from characters_serve.config import Config
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.idle_controls import IdleControls
from characters_serve.model.weights import StreamDecoder, load_decoder, load_generator
from scripts.train_tiny.pictures import save_sheet

CHARACTERS = Path(__file__).parents[2] / "characters_serve" / "assets" / "characters"
LOOK_EVERY_CHUNKS = 90
LOOK_CHUNKS = 6


def reference(name: str) -> Tensor:
    pixels = np.asarray(Image.open(CHARACTERS / f"{name}.png").convert("RGB"))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


def speech(folder: Path, samples: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    clips = []
    for file in sorted(folder.glob("held_out_*.wav")):
        with wave.open(str(file)) as clip:
            clips.append(np.frombuffer(clip.readframes(clip.getnframes()), np.int16))
    pcm = np.concatenate(clips).astype(np.float32) / 32768
    return np.resize(pcm, samples)


@torch.inference_mode()
def measure(names: list[str], minutes: float, wavs: Path) -> tuple[dict[str, Any], list[Tensor]]:
    config = Config()
    model = config.model
    cpu = torch.device("cpu")
    images = torch.stack([reference(name) for name in names])
    network = load_generator(model, device=cpu, dtype=torch.float32)
    denoiser = Denoiser(network, model, config.optimizations, batch=len(names))
    denoiser.start(images, seed=1)
    decoder: StreamDecoder = load_decoder(model, device=cpu, dtype=torch.float32)
    states = [decoder.start(images[i : i + 1]) for i in range(len(names))]
    idle = [IdleControls(10 + i, model.fps) for i in range(len(names))]
    chunks = round(minutes * 60 * model.fps / model.frames_per_chunk)
    step, window = model.audio_samples_per_chunk, network.log_mel.window_samples
    pcm = torch.from_numpy(speech(wavs, chunks * step + window))
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    shown: list[list[Tensor]] = [[image] for image in images]
    for chunk in range(chunks):
        mel = network.log_mel(pcm[chunk * step : chunk * step + window].expand(len(names), -1))
        controls = np.stack([one.next(model.frames_per_chunk, speaking=True) for one in idle])
        condition = network.condition_on_mel(mel, torch.from_numpy(controls))
        latents = denoiser.denoise(condition, len(model.noise_levels))
        look = chunk % LOOK_EVERY_CHUNKS
        if look >= LOOK_CHUNKS:
            continue
        for i, name in enumerate(names):
            frames, states[i] = decoder.decode(latents[i], states[i])
            if look == 0:
                continue  # its state is of a minute ago
            seen[name].append(
                {"second": chunk * model.chunk_period_s, **compare(frames, images[i])}
            )
            if look == 1:
                shown[i].append(frames[0])
    third = minutes * 20
    result = {
        name: {
            f"{round(first)} to {round(first + third)} s": {
                key: round(
                    float(np.mean([r[key] for r in rows if first <= r["second"] < first + third])),
                    3,
                )
                for key in ("background", "colour", "sharpness")
            }
            for first in (0.0, third, 2 * third)
        }
        for name, rows in seen.items()
    }
    return result, [picture for row in shown for picture in row]


def compare(frames: Tensor, image: Tensor) -> dict[str, float]:
    corner = frames[..., :60, :40].mean((0, 2, 3)) - image[..., :60, :40].mean((1, 2))
    whole = frames.mean((0, 2, 3)) - image.mean((1, 2))
    gradient = frames.diff(dim=-1).abs().mean() / image.diff(dim=-1).abs().mean()
    return {
        "background": float(corner.abs().max()) * 255,
        "colour": float(whole.abs().max()) * 255,
        "sharpness": float(gradient),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--wavs", type=Path, default=Path("scripts/train_tiny/data/wav"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result, pictures = measure(options.names, options.minutes, options.wavs)
    command = shlex.join(["python", "-m", "scripts.train_tiny.drift", *sys.argv[1:]])
    options.out.write_text(json.dumps({"command": command, **result}, indent=1) + "\n")
    columns = len(pictures) // len(options.names)
    save_sheet(torch.stack(pictures), options.out.with_suffix(".png"), columns)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
