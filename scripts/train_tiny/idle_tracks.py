"""Pre-generates idle control tracks for training with the server's own generator.

    python scripts/train_tiny/idle_tracks.py --out scripts/train_tiny/data/idle.npz

``controls`` float16 (S, T, 7) at 24 fps, see :data:`CONTROL_NAMES`; ``speaking`` uint8 (S, T).
Each track alternates turns of speaking, of listening to a user and of quiet.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from characters_serve.model.idle_controls import NUM_CONTROLS, IdleControls

FPS: Final = 24
FRAMES_PER_CHUNK: Final = 4


def idle_track(seed: int, num_frames: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Controls (num_frames, 7) and speaking flag (num_frames,) of one conversation."""
    rng = random.Random(seed ^ 0x5EED)
    stream = IdleControls(seed, FPS)
    controls = np.empty((num_frames, NUM_CONTROLS), np.float32)
    flags = np.zeros(num_frames, np.uint8)
    done = 0
    while done < num_frames:
        turn = rng.choices(("speaking", "listening", "quiet"), (0.45, 0.38, 0.17))[0]
        low, high = {"speaking": (1.5, 9.0), "listening": (2.0, 9.0), "quiet": (0.5, 4.0)}[turn]
        chunks = round(rng.uniform(low, high) * FPS / FRAMES_PER_CHUNK)
        energies = _phrases(rng, chunks) if turn == "listening" else [0.0] * chunks
        for energy in energies:
            count = min(FRAMES_PER_CHUNK, num_frames - done)
            controls[done : done + count] = stream.next(
                count, speaking=turn == "speaking", listening_energy=energy
            )
            flags[done : done + count] = turn == "speaking"
            done += count
    return controls, flags


def _phrases(rng: random.Random, chunks: int) -> list[float]:
    """How loud a user is in each chunk: phrases, pauses between them, and silence at the end.

    Nods answer the fall of the voice, so that it has to fall as a voice does.
    """
    energies: list[float] = []
    level = rng.uniform(0.25, 0.9)
    while len(energies) < chunks:
        said = rng.randint(4, 18)
        energies += [min(1.0, level * rng.uniform(0.6, 1.2)) for _ in range(said)]
        energies += [0.0] * rng.randint(1, 6)
    silence = min(rng.randint(2, 7), chunks)
    return energies[: chunks - silence] + [0.0] * silence


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tracks", type=int, default=600)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=100_000)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    num_frames = arguments.seconds * FPS
    tracks = [idle_track(arguments.seed + index, num_frames) for index in range(arguments.tracks)]
    controls = np.stack([track for track, _ in tracks]).astype(np.float16)
    speaking = np.stack([flags for _, flags in tracks])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, controls=controls, speaking=speaking)
    size = arguments.out.stat().st_size / 1e6
    print(f"{arguments.out}: {controls.shape}, speaking {speaking.mean():.3f}, {size:.1f} MB")


if __name__ == "__main__":
    main()
