"""Chunk decoder that moves the reference image: flow fields, masks and a little paint.

In: one chunk's latent, the previous one and features of the reference, encoded once a session.
Out: the chunk's frames. The person's texture comes from the image itself: each frame is the
reference warped at full resolution, where a mask lets painted pixels (mouth, eyelids, what was
hidden) show instead. A decoder that painted whole frames from 96 latent tokens learned four
copies of their mean (frame-to-frame error as large as the motion); this one learns the motion.

Letters: B batch, C channels, H, W in the picture's pixels, F frames of a chunk. Features come at
two scales: /4 (fine) and /8 (coarse), and at the latent's own grid (pose).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig
from characters_serve.model.image_encoder import ResidualBlock

_FINE, _COARSE, _POSE = 16, 40, 64
_TRUNK = (224, 144, 96)
_FRAME_CHANNELS = 20
_FUSED_COARSE, _FUSED_FINE = 48, 32
# A flow of 1 is half the picture; heads move by less than a tenth of it.
_FLOW_SCALE = 0.1
_TRUNK_STRIDE = 8
_STEP_PIXELS = 2.0


class ReferenceFeatures(NamedTuple):
    """What the decoder keeps of the reference: the picture itself and three feature maps."""

    image: Tensor
    fine: Tensor
    coarse: Tensor
    pose: Tensor


class DecoderState(NamedTuple):
    """All that streams from chunk to chunk: the reference, the previous latent (B, C, h, w) and the
    coarse flow of its last frame (B, 2, H / 8, W / 8)."""

    reference: ReferenceFeatures
    previous: Tensor
    flow: Tensor


class ReferencePyramid(nn.Module):
    """image (B, 3, H, W) in [0, 1] -> features. Runs once a session."""

    def __init__(self, latent_stride: int) -> None:
        super().__init__()
        self.fine = nn.Sequential(
            nn.PixelUnshuffle(4), nn.Conv2d(48, _FINE, 3, padding=1), ResidualBlock(_FINE)
        )
        self.coarse = nn.Sequential(
            nn.Conv2d(_FINE, _COARSE, 4, stride=2, padding=1),
            ResidualBlock(_COARSE),
            nn.SiLU(),
            nn.Conv2d(_COARSE, _COARSE, 3, padding=1),
        )
        pose: list[nn.Module] = []
        channels, stride = _COARSE, 8
        while stride < latent_stride:
            pose += [nn.Conv2d(channels, 96, 4, stride=2, padding=1), ResidualBlock(96), nn.SiLU()]
            channels, stride = 96, stride * 2
        self.pose = nn.Sequential(*pose, nn.Conv2d(channels, _POSE, 1))

    def forward(self, image: Tensor) -> ReferenceFeatures:
        fine = self.fine(image * 2 - 1)
        coarse = self.coarse(fine)
        return ReferenceFeatures(image, fine, coarse, self.pose(coarse))


class ReferenceWarpDecoder(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        if model.token_stride != 32 or model.frames_per_chunk < 2:
            raise ValueError("reference_warp decodes latents of stride 32, of two frames or more")
        self.frames = model.frames_per_chunk
        self.grid = (model.grid_rows, model.grid_columns)
        low, middle, high = _TRUNK
        channels = 2 * model.token_channels + _POSE
        self.trunk = nn.Sequential(
            nn.Conv2d(channels, low, 3, padding=1),
            ResidualBlock(low),
            nn.SiLU(),
            nn.Conv2d(low, middle * 4, 1),
            nn.PixelShuffle(2),
            ResidualBlock(middle),
            nn.SiLU(),
            nn.Conv2d(middle, high * 4, 1),
            nn.PixelShuffle(2),
            ResidualBlock(high),
            nn.SiLU(),
        )
        self.motion = nn.Conv2d(high, 3 * self.frames, 3, padding=1)
        self.shared = nn.Conv2d(high, _FRAME_CHANNELS, 1)
        self.per_frame = nn.Conv2d(high, _FRAME_CHANNELS * self.frames, 1)
        self.fuse_coarse = nn.Sequential(
            nn.Conv2d(_COARSE + 2 * _FRAME_CHANNELS, _FUSED_COARSE, 3, padding=1),
            ResidualBlock(_FUSED_COARSE),
            nn.SiLU(),
            nn.Conv2d(_FUSED_COARSE, 24 * 4, 1),
            nn.PixelShuffle(2),
        )
        self.fuse_fine = nn.Sequential(
            nn.Conv2d(24 + _FINE, _FUSED_FINE, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(_FUSED_FINE, _FUSED_FINE, 3, padding=1),
            nn.SiLU(),
        )
        # A finer flow (2, at /4), and paint (3) and its mask (1) at half resolution: painted at
        # full resolution from /4 features, mouths came out in visible blocks.
        self.fine_flow = nn.Conv2d(_FUSED_FINE, 2, 1)
        self.paint = nn.Conv2d(_FUSED_FINE, 4 * 4, 3, padding=1)
        for layer in (self.motion, self.fine_flow):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        assert self.paint.bias is not None
        nn.init.constant_(self.paint.bias[: 3 * 4], 0.5)  # grey

    def forward(self, latent: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """latent: (B, tokens, C) -> frames (B, F, 3, H, W) in [0, 1], and the next state."""
        z = self.on_grid(latent)
        hidden, motion = self.move(z, state.previous, state.reference)
        flow = continued(motion[:, :, :2], state.flow)
        frames = self.draw(hidden, flow, motion[:, :, 2:], state.reference)
        return frames, DecoderState(state.reference, z, flow[:, -1])

    def on_grid(self, latent: Tensor) -> Tensor:
        """(B, tokens, C) -> (B, C, h, w)."""
        return torch.unflatten(latent.transpose(-1, -2), -1, self.grid)

    def move(
        self, z: Tensor, previous: Tensor, reference: ReferenceFeatures
    ) -> tuple[Tensor, Tensor]:
        """Two latents (B, C, h, w) -> hidden (B, C, H / 8, W / 8), and for each frame its flow and
        how much of the warped coarse features to keep, (B, F, 3, H / 8, W / 8)."""
        hidden = self.trunk(torch.cat([z, previous, reference.pose], dim=1))
        return hidden, torch.unflatten(self.motion(hidden).float(), 1, (self.frames, 3))

    def draw(
        self, hidden: Tensor, flow: Tensor, keep: Tensor, reference: ReferenceFeatures
    ) -> Tensor:
        """What `move` returns, its flow continued -> frames (B, F, 3, H, W)."""
        flow, keep = flow.flatten(0, 1), keep.flatten(0, 1)
        place = _pixel_places(flow) + flow * _FLOW_SCALE
        keep = torch.sigmoid(keep + 2).to(hidden.dtype)
        shared = self._per_frame(self.shared(hidden))
        own = torch.unflatten(self.per_frame(hidden), 1, (self.frames, _FRAME_CHANNELS))
        warped = _look_up(self._per_frame(reference.coarse), place) * keep
        fused = self.fuse_coarse(torch.cat([warped, shared, own.flatten(0, 1)], dim=1))

        place, keep = _upsample(place, 2), _upsample(keep, 2)
        warped = _look_up(self._per_frame(reference.fine), place) * keep
        fused = self.fuse_fine(torch.cat([fused, warped], dim=1))

        place = _upsample(place + self.fine_flow(fused).float() * _FLOW_SCALE * 0.1, 4)
        moved = _look_up(self._per_frame(reference.image), place)
        painted = functional.pixel_shuffle(self.paint(fused), 2).to(moved.dtype)
        painted = torch.cat([painted[:, :3], torch.sigmoid(painted[:, 3:])], dim=1)
        painted = _upsample(painted, 2)
        frames = torch.lerp(moved, painted[:, :3], painted[:, 3:])
        return torch.unflatten(frames, 0, (-1, self.frames))

    def _per_frame(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B x F, ...), each repeated for its frames; without a copy where B is 1."""
        return x[:, None].expand(-1, self.frames, *x.shape[1:]).reshape(-1, *x.shape[1:])


def continued(flow: Tensor, last: Tensor) -> Tensor:
    """A chunk's flows (B, F, 2, h, w) without the step from the last one before (B, 2, h, w).

    Each chunk's flows are found from its own latents, so all of them are off by what those are off
    by: pictures that stood nearly still changed 1.4 times as much between chunks as within. What
    remains beside the chunk's own velocity of a step of some pixels fades until its last frame,
    so that nothing adds up over chunks; a larger one is a motion, and stays.
    """
    step = last - expected_before(flow)
    height, width = flow.shape[-2:]
    half = step.new_tensor([width, height]) * (_TRUNK_STRIDE / 2)
    pixels = (step * _FLOW_SCALE * half[:, None, None]).square().sum(1, keepdim=True)
    step = step * torch.exp(-pixels / _STEP_PIXELS**2)
    fade = 1 - torch.arange(1, flow.shape[1] + 1, device=flow.device) / flow.shape[1]
    return flow + fade[:, None, None, None] * step[:, None]


def expected_before(flow: Tensor) -> Tensor:
    """The flow before a chunk's first by its own velocity, (B, F, 2, h, w) -> (B, 2, h, w)."""
    return 2 * flow[:, 0] - flow[:, 1]


def _pixel_places(like: Tensor) -> Tensor:
    """Where each pixel is: (1, 2, H, W), x then y, from -1 to 1 between the corner pixels' centres.

    Places, not flows, are interpolated to finer scales: linear ones stay exact.
    """
    height, width = like.shape[-2:]
    rows = torch.linspace(-1, 1, height, device=like.device)
    columns = torch.linspace(-1, 1, width, device=like.device)
    grid_y, grid_x = torch.meshgrid(rows, columns, indexing="ij")
    return torch.stack([grid_x, grid_y])[None]


def _look_up(features: Tensor, place: Tensor) -> Tensor:
    """Bilinear look-up: features (N, C, H, W) at place (N, 2, h, w) -> (N, C, h, w)."""
    return functional.grid_sample(
        features.float(),
        place.permute(0, 2, 3, 1),
        mode="bilinear",
        padding_mode="border",
        align_corners=True,
    ).to(features.dtype)


def _upsample(x: Tensor, factor: int) -> Tensor:
    return functional.interpolate(
        x, scale_factor=float(factor), mode="bilinear", align_corners=True
    )


class VideoDecoder(nn.Module):
    """The decoder process's model: the reference's pyramid and the chunk decoder."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.pyramid = ReferencePyramid(model.token_stride)
        self.decoder = ReferenceWarpDecoder(model)
        # A session starts at rest: its latents are zero there, and its flow is.
        self.latent_shape = (model.token_channels, model.grid_rows, model.grid_columns)
        self.flow_shape = (2, model.height // _TRUNK_STRIDE, model.width // _TRUNK_STRIDE)

    def start(self, image: Tensor) -> DecoderState:
        """image: uint8 (H, W, 3), or float (B, 3, H, W) in [0, 1]."""
        if image.dtype == torch.uint8:
            image = image.permute(2, 0, 1)[None] / 255
        image = image.to(self.decoder.motion.weight.dtype)
        previous = image.new_zeros(image.shape[0], *self.latent_shape)
        flow = torch.zeros(image.shape[0], *self.flow_shape, device=image.device)
        return DecoderState(self.pyramid(image), previous, flow)

    def decode(self, latent: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """latent: (tokens, C) of one session -> frames (F, 3, H, W) in [0, 1], next state."""
        # The next state holds on to the latent, whose memory its maker may write the next one to.
        latent = latent[None].to(state.previous.dtype, copy=True)
        frames, state = self.decoder(latent, state)
        return frames[0].float().clamp_(0, 1), state
