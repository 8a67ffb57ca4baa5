"""Networks and the optimiser that only training needs: they are not served.

Letters: N clips, frames or crops, T frames and K chunks of a clip, C latent channels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig
from characters_serve.model.idle_controls import NUM_CONTROLS
from characters_serve.model.image_encoder import ResidualBlock
from scripts.train_tiny.replayed import capture
from scripts.train_tiny.visemes import MOUTH_CONTROLS as MOUTH_CONTROL_NAMES

MOUTH_CONTROLS = len(MOUTH_CONTROL_NAMES)
CONTROLS = NUM_CONTROLS + MOUTH_CONTROLS

MOUTH_CROP = (48, 64)
"""Rows and columns of a mouth crop."""


class ChunkEncoder(nn.Module):
    """Chunks of frames and the reference -> latents of unit mean square that are zero at rest.

    It sees the reference, and what it makes of frames that are the reference is taken away, so a
    latent says how frames differ from it and nothing else. Normalised by its mean and deviation
    instead, a latent's variance was 95 % one constant for each place, 3.4 % who it was and 1.5 %
    motion (eight held-out clips): about as much as the noise that training adds.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self._frames = model.frames_per_chunk
        channels = 3 * (self._frames + 3)
        self.layers = nn.Sequential(
            nn.PixelUnshuffle(4),
            nn.Conv2d(channels * 16, 96, 3, padding=1),
            ResidualBlock(96),
            nn.Conv2d(96, 160, 4, stride=2, padding=1),
            ResidualBlock(160),
            nn.Conv2d(160, 256, 4, stride=2, padding=1),
            ResidualBlock(256),
            nn.Conv2d(256, 320, 4, stride=2, padding=1),
            ResidualBlock(320),
            nn.SiLU(),
            nn.Conv2d(320, model.token_channels, 1),
        )
        self.scale = UnitScale(model.token_channels)

    def forward(self, frames: Tensor, reference: Tensor) -> Tensor:
        """frames (N, T, 3, H, W), reference (N, 3, H, W), both in [0, 1] -> (N, K, tokens, C)."""
        rest = reference[:, None].expand(-1, self._frames, -1, -1, -1)
        chunks = torch.unflatten(torch.cat([frames, rest], dim=1), 1, (-1, self._frames))
        mean = chunks.mean(2)
        changes = ((chunks - mean[:, :, None]) * 4).flatten(2, 3)
        still = reference[:, None].expand_as(mean)
        x = torch.cat([mean * 2 - 1, changes, (still - mean) * 2, still * 2 - 1], dim=2)
        code = self.layers(x.flatten(0, 1).contiguous(memory_format=torch.channels_last)).float()
        code = torch.unflatten(code.flatten(2).transpose(1, 2), 0, chunks.shape[:2])
        latent: Tensor = self.scale(code[:, :-1] - code[:, -1:])
        return latent


class UnitScale(nn.Module):
    """Divides channels (..., C) by their root mean squares: the batch's, later a running one."""

    mean_square: Tensor
    _MOMENTUM = 0.02

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean_square", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean_square = self.mean_square
        if self.training:
            mean_square = x.square().mean(tuple(range(x.ndim - 1)))
            self.mean_square.lerp_(mean_square.detach(), self._MOMENTUM)
        return x * torch.rsqrt(mean_square + 1e-8)


class LatentReader(nn.Module):
    """Reads how each frame's controls differ from the reference's, from a chunk's latent.

    Trained with the autoencoder it keeps latents readable; then it tells the transformer which of
    their directions are what. What the scores read, the pictures, another network reads.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.frames = model.frames_per_chunk
        self.grid = (model.grid_rows, model.grid_columns)
        self.layers = nn.Sequential(
            nn.Conv2d(model.token_channels, 128, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(128, 64, 3, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(64 * model.video_tokens, self.frames * CONTROLS),
        )

    def forward(self, latent: Tensor) -> Tensor:
        """(..., V, C) -> (..., frames, 12)."""
        channels_first = latent.flatten(0, -3).transpose(-1, -2)
        read: Tensor = self.layers(torch.unflatten(channels_first, -1, self.grid))
        return read.reshape(*latent.shape[:-2], self.frames, -1)


def unread(read: Tensor, change: Tensor) -> Tensor:
    """Squared error of what a LatentReader read, in shares of each control's variance: () from 0.

    read, change: (..., 12). Gaze varies by a third of what heads do, and counts as much.
    """
    over = tuple(range(change.ndim - 1))
    shares = (read - change).square().mean(over) / (change.var(over) + 1e-3)
    return shares.mean()


class MouthReader(nn.Module):
    """Mouth crop (N, 3, 48, 64) -> open, width, round. The yardstick of lip motion."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2),
            nn.SiLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(64, 96, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(96 * 48, 128),
            nn.SiLU(),
            nn.Linear(128, 3),
        )

    def forward(self, crop: Tensor) -> Tensor:
        read: Tensor = self.layers(crop.float() - 0.5)
        return read


def _orthogonalise(gradients: Tensor) -> Tensor:
    """Newton-Schulz iteration on a stack of matrices (Jordan et al. 2024, Muon)."""
    x = gradients.bfloat16()
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    result: Tensor = x.mT if transposed else x
    return result


class MuonAdamW:
    """Muon for the inner matrices, scaled to AdamW's step size, and AdamW for everything else.

    `adam_only`: parts of parameter names (first and last layers) that AdamW takes.
    """

    def __init__(self, networks: Iterable[nn.Module], adam_only: tuple[str, ...] = ()) -> None:
        named = [(n, p) for net in networks for n, p in net.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        matrices = [
            p
            for name, p in named
            if p.ndim >= 2
            and min(p.flatten(1).shape) >= 32
            and not any(part in name for part in adam_only)
        ]
        chosen = {id(p) for p in matrices}
        rest = [p for p in self.parameters if id(p) not in chosen]
        fused = self.parameters[0].is_cuda
        self._adam = torch.optim.AdamW(
            rest, lr=1e-3, betas=(0.9, 0.98), weight_decay=0, fused=fused
        )
        self._by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in matrices:
            rows, columns = p.flatten(1).shape
            self._by_shape.setdefault((rows, columns), []).append(p)
        self._momentum = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self._by_shape.items()
        }
        self._gradients = {shape: torch.zeros_like(m) for shape, m in self._momentum.items()}
        self._updates = {shape: torch.zeros_like(m) for shape, m in self._momentum.items()}
        self._captured: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def step(self, rate: float, adam_rate: float | None = None) -> None:
        for group in self._adam.param_groups:
            group["lr"] = rate if adam_rate is None else adam_rate
        self._adam.step()
        for shape, parameters in self._by_shape.items():
            torch.stack([_gradient(p).flatten(1) for p in parameters], out=self._gradients[shape])
        if self._captured is not None:
            self._captured.replay()
        else:
            self._compute_updates()
            if self.parameters[0].is_cuda:
                self._captured = capture(self._compute_updates)
        for shape, parameters in self._by_shape.items():
            scale = -rate * 0.2 * max(shape) ** 0.5
            torch._foreach_add_(
                [p.data for p in parameters],
                [u.reshape(p.shape) for p, u in zip(parameters, self._updates[shape], strict=True)],
                alpha=scale,
            )
        for p in self.parameters:
            p.grad = None

    def _compute_updates(self) -> None:
        for shape, gradients in self._gradients.items():
            momentum = self._momentum[shape].lerp_(gradients, 0.05)
            self._updates[shape].copy_(_orthogonalise(gradients.lerp(momentum, 0.95)))


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class AveragedWeights:
    """Moving average of a network's floating-point state, over about a ninth of the steps so far.

    Over 500 steps it forgot too fast: the mean of two runs' averages erred less than either's.
    """

    def __init__(self, network: nn.Module) -> None:
        self._count = 0
        # Optimisers write in place, so these stay the network's own tensors.
        self._live = {k: v for k, v in network.state_dict().items() if v.is_floating_point()}
        self._average = {k: v.detach().clone().float() for k, v in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        self._count += 1
        decay = (1 + self._count) / (10 + self._count)
        torch._foreach_lerp_(
            list(self._average.values()), [v.float() for v in self._live.values()], 1 - decay
        )

    def copy_to(self, network: nn.Module) -> None:
        network.load_state_dict(self._average, strict=False)


@torch.no_grad()
def blend(network: nn.Module, other: nn.Module, share: float) -> None:
    """Moves a network's weights this share of the way to those of another of its shape."""
    theirs = other.state_dict()
    for name, mine in network.state_dict().items():
        if mine.is_floating_point():
            mine.lerp_(theirs[name], share)


def crop_mouth(frames: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """frames (N, 3, H, W), centre (N, 2) x, y in pixels, scale (N,) -> (N, 3, 48, 64)."""
    rows, columns = MOUTH_CROP
    height, width = frames.shape[-2:]
    device = frames.device
    y = (torch.arange(rows, device=device) - (rows - 1) / 2) * 1.15
    x = (torch.arange(columns, device=device) - (columns - 1) / 2) * 1.15
    ys = y[None, :, None] * scale[:, None, None] + centre[:, 1, None, None]
    xs = x[None, None] * scale[:, None, None] + centre[:, 0, None, None]
    shape = (len(frames), rows, columns)
    place = torch.stack(
        [(xs / width * 2 - 1).expand(shape), (ys / height * 2 - 1).expand(shape)], -1
    )
    return functional.grid_sample(frames.float(), place, align_corners=False)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().float(), b.flatten().float()]))[0, 1])


def mixed_precision(device: torch.device) -> torch.autocast:
    """bf16 where a GPU has it fast."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
