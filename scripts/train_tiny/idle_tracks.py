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
        turn = rng.choices(("speaking", "listening", "quiet"), (0.5, 0.3, 0.2))[0]
        low, high = {"speaking": (1.5, 9.0), "listening": (1.0, 6.0), "quiet": (0.5, 4.0)}[turn]
        end = min(num_frames, done + FRAMES_PER_CHUNK * round(rng.uniform(low, high) * 6))
        while done < end:
            energy = rng.uniform(0.1, 0.9) if turn == "listening" else 0.0
            count = min(FRAMES_PER_CHUNK, end - done)
            controls[done : done + count] = stream.next(
                count, speaking=turn == "speaking", listening_energy=energy
            )
            flags[done : done + count] = turn == "speaking"
            done += count
    return controls, flags


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
