"""In: embeddings of a clip's picture and of its speech. Out: LSE-D, LSE-C and the offset.

Exactly as published (calc_pdist of joonson/syncnet_python, and evaluation/scores_LSE of Wav2Lip):
31 shifts, embeddings that are not normalised, zeros where a shift leaves the clip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

MAX_SHIFT: Final = 15
_EPS: Final = 1e-6
"""Of torch's pairwise_distance, added to each difference."""


@dataclass(frozen=True, slots=True)
class LipSync:
    """distance: LSE-D, lower is better. confidence: LSE-C, higher is better. offset: frames that
    the picture is late by; both scores are blind to it."""

    distance: float
    confidence: float
    offset: int


def num_windows(frames: int, samples: int, samples_per_frame: int) -> int:
    """How many windows of a clip are scored; the published code leaves the last one out."""
    return max(0, min(frames, samples // samples_per_frame) - 5)


def lse(video_ND: Tensor, speech_ND: Tensor) -> LipSync:
    """Row i of both begins at frame i. The mean distance over the clip is taken at each shift: its
    least is LSE-D, and LSE-C is how far that lies below the median. Raises ValueError."""
    if video_ND.shape != speech_ND.shape or not len(video_ND):
        raise ValueError(
            f"embeddings of shapes {tuple(video_ND.shape)}, {tuple(speech_ND.shape)}: "
            "as many of the picture as of the speech are needed, and at least one"
        )
    padded = functional.pad(speech_ND.float(), (0, 0, MAX_SHIFT, MAX_SHIFT))
    shifts = 2 * MAX_SHIFT + 1
    mean_distance = torch.stack(
        [
            (video_ND.float() - padded[shift : shift + len(video_ND)] + _EPS).norm(dim=1).mean()
            for shift in range(shifts)
        ]
    )
    least, where = mean_distance.min(0)
    confidence = mean_distance.median() - least
    return LipSync(float(least), float(confidence), MAX_SHIFT - int(where))
