"""Stage 2: the transformer, on latents of stage 1, in the context it will be served with.

The audio encoder first learns to name the mouth's shape by itself, which pictures alone teach it
slowly, and a small network learns to read that shape from latents. Then the whole: first with true
context, then with context from its own rollouts, served by the server's own Denoiser (self-rollout:
what keeps it from drifting). Rendered truth is known for any controls and speech, so both parts
regress it; every denoised latent is read for the mouth's shape, a share of each step's chunks is
decoded, and the picture's loss trains transformer and decoder together, which the latent loss alone
leaves soft around the eyes. Beside them the decoder is shown true latents of real pictures, so that
it does not forget their textures.

Letters: B clips, K chunks, S tokens of a chunk, V video tokens, C channels, H heads, D dims.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from characters_serve.config import ModelConfig, Optimizations
from characters_serve.engine.denoiser import Denoiser
from characters_serve.model.attention import attention
from characters_serve.model.dit import Block, CharacterDiT, StepCondition
from characters_serve.model.idle_controls import NUM_CONTROLS
from characters_serve.model.rope import RotaryPositions, rotary_positions, rotate
from scripts.train_tiny.data import (
    Clips,
    ClipSource,
    augment_mel,
    render_clips,
    render_with_references,
)
from scripts.train_tiny.networks import (
    CONTROLS,
    MOUTH_CONTROLS,
    AveragedWeights,
    LatentReader,
    MuonAdamW,
    correlation,
    mixed_precision,
    unread,
)
from scripts.train_tiny.profiler import StepProfiler
from scripts.train_tiny.real_clips import RealClips, RealPictures
from scripts.train_tiny.renderer import Renderer
from scripts.train_tiny.replayed import ReplayedGradients
from scripts.train_tiny.train_autoencoder import (
    COMPILE_STEPS,
    LATENT_NOISE,
    Autoencoder,
    picture_loss,
    region_weights,
    say,
)

PICTURE_WEIGHT = 4.0
MOUTH_WEIGHT = 2.0
REFRESH_STEPS, REFRESHED, RENEWED = 80, 1024, 256
"""Every 80 steps so many of the pool's clips are rolled anew, and of these so many are other clips.

Of 6,144 clips kept for a whole run some were learned by heart: an error of 0.036 in the context of
their rollouts, of 0.07 on others.
"""
READ_WEIGHT = 0.3
PAINTER_RATE = 3e-4
ADAM_ONLY = ("latent_in", "final.out", "noise_in.0", "control_encoder.0", "place", "layers.1.")
AUDIO_SHARE = 0.03
"""Of the stage's seconds: for the audio encoder alone."""
AUDIO_RATE = 3e-3
AUDIO_ADAM_ONLY = ("encoder.conv_in", "read")
LATENT_READER_STEPS = 1500
REAL_CLIPS = 2
"""Beside the clips that each step decodes."""


class Pool(NamedTuple):
    """Encoded clips: references uint8 (N, 3, H, W), latents bf16 (N, K, V, C)."""

    clips: Clips
    references: Tensor
    latents: Tensor

    def replace(self, first: int, others: Pool) -> None:
        """These clips give way to others."""
        rows = slice(first, first + len(others.latents))
        mine = (*self.clips, self.references, self.latents)
        theirs = (*others.clips, others.references, others.latents)
        for field, other in zip(mine, theirs, strict=True):
            field[rows] = other


@torch.no_grad()
def encode_pool(
    autoencoder: Autoencoder,
    source: ClipSource,
    renderer: Renderer,
    count: int,
    chunks: int,
    generator: torch.Generator,
    *,
    held_out: bool = False,
    group: int = 32,
) -> Pool:
    frames = chunks * autoencoder.model.frames_per_chunk
    clips = source.sample(count, frames, generator, held_out=held_out)
    references, latents = [], []
    for i in range(0, count, group):
        part = Clips(*(field[i : i + group] for field in clips))
        frames_shown, reference = render_with_references(renderer, part)
        with mixed_precision(source.device):
            latent = autoencoder.encode(frames_shown, reference)
        references.append((reference * 255).round().byte())
        latents.append(latent.to(torch.bfloat16))
    return Pool(clips, torch.cat(references), torch.cat(latents))


def training_block(
    block: Block,
    prefix: Tensor,
    x: Tensor,
    prefix_embedding: Tensor,
    noise_embedding: Tensor,
    prefix_angles: Tensor,
    chunk_angles: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    """One block over the prefix and two streams of all chunks at once.

    prefix: (B, P, D). x: (2B, K, S, D): the context stream, then the stream being denoised; each
    chunk of either sees the prefix, the context stream's last window - 1 chunks, and itself.
    """
    kept: list[Tensor] = []

    def attend_prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rotated = rotate(k, prefix_angles)
        kept.extend((rotated, v))
        return attention(rotate(q, prefix_angles), rotated, v)

    def attend_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return windowed_attention(
            rotate(q, chunk_angles), rotate(k, chunk_angles), v, kept[0], kept[1], window
        )

    prefix = block(prefix, block.modulate(prefix_embedding), attend_prefix)
    x = block(x, block.modulate(noise_embedding), attend_chunks)
    return prefix, x


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor, prefix_v: Tensor, window: int
) -> Tensor:
    """q, k, v: (2B, K, S, H, D); prefix: (B, P, H, D) -> (2B, K, S, H x D)."""
    half, chunks = len(q) // 2, q.shape[1]
    context_k, context_v = k[:half].repeat(2, 1, 1, 1, 1), v[:half].repeat(2, 1, 1, 1, 1)
    prefix_k, prefix_v = prefix_k.repeat(2, 1, 1, 1), prefix_v.repeat(2, 1, 1, 1)

    def seen(prefix: Tensor, context: Tensor, own: Tensor, chunk: int) -> Tensor:
        return torch.cat([prefix, context[:, :chunk].flatten(1, 2), own[:, chunk]], dim=1)

    early = [
        attention(q[:, i], seen(prefix_k, context_k, k, i), seen(prefix_v, context_v, v, i))
        for i in range(window - 1)
    ]
    steady = chunks - window + 1

    def windows(prefix: Tensor, context: Tensor, own: Tensor) -> Tensor:
        past = [context[:, i : i + steady] for i in range(window - 1)]
        first = prefix[:, None].expand(-1, steady, -1, -1, -1)
        return torch.cat([first, *past, own[:, window - 1 :]], dim=2).flatten(0, 1)

    late = attention(
        q[:, window - 1 :].flatten(0, 1),
        windows(prefix_k, context_k, k),
        windows(prefix_v, context_v, v),
    )
    late = torch.unflatten(late, 0, (-1, steady))
    return torch.cat([torch.stack(early, dim=1), late], dim=1)


class TrainingPass:
    """The transformer over whole clips, computing what the cached steps would."""

    def __init__(self, dit: CharacterDiT, *, compiled: bool) -> None:
        self.dit = dit
        self.positions: RotaryPositions = rotary_positions(dit.config, dit.place.device)
        self._block = torch.compile(training_block, dynamic=False) if compiled else training_block

    def __call__(
        self,
        images: Tensor,
        noisy: Tensor,
        levels: Tensor,
        mel: Tensor,
        controls: Tensor,
        offset: Tensor,
    ) -> Tensor:
        """images (B, 3, H, W); noisy (2B, K, V, C) and levels (2B, K): context, then denoised;
        mel (B, K, ...), controls (B, K, frames, 7), offset (B,) steps -> x0 (2B, K, V, C)."""
        dit, chunks = self.dit, noisy.shape[1]
        condition = dit.condition_on_mel(mel.flatten(0, 1), controls.flatten(0, 1))
        tokens, bias = (
            torch.unflatten(part, 0, (-1, chunks)).repeat(2, 1, 1, 1) for part in condition
        )
        x = dit.embed_chunk(noisy, StepCondition(tokens, bias))
        prefix = dit.embed_prefix(images)
        times = offset[:, None] + 1 + torch.arange(chunks, device=offset.device)
        angles = self.positions.chunk(times).repeat(2, 1, 1, 1)
        embedding = dit.noise_embedding(levels)[..., None, :]
        for block in dit.blocks:
            prefix, x = self._block(
                block,
                prefix,
                x,
                dit.prefix_embedding,
                embedding,
                self.positions.prefix(),
                angles,
                dit.config.window_chunks,
            )
        video = x[..., : dit.config.video_tokens, :]
        result: Tensor = dit.final(video, *dit.final.modulate(embedding))
        return result.float()


def load_with_new_audio_encoder(
    model: ModelConfig, folder: Path, device: torch.device
) -> CharacterDiT:
    """A transformer whose audio encoder is untrained, where the folder's has another shape.

    Raises RuntimeError if anything else does not fit.
    """
    dit = CharacterDiT(model).to(device)
    state = load_file(folder / "dit.safetensors")
    heard = "audio_encoder."
    kept = {key: value for key, value in state.items() if not key.startswith(heard)}
    new = {key: value for key, value in dit.state_dict().items() if key.startswith(heard)}
    dit.load_state_dict(kept | new)
    return dit


class MouthProbe(nn.Module):
    """Reads the five mouth controls of each frame from what the audio encoder gives the blocks.

    Through pictures alone the encoder learns slowly: a probe read 0.85 of the opening from one.
    """

    def __init__(self, dit: CharacterDiT) -> None:
        super().__init__()
        model = dit.config
        self.frames = model.frames_per_chunk
        self.encoder = dit.audio_encoder
        self.read = nn.Linear((1 + model.audio_tokens) * model.dim, self.frames * MOUTH_CONTROLS)

    def forward(self, mel: Tensor) -> Tensor:
        """(N, mel frames, mels) -> (N, frames, 5)."""
        read: Tensor = self.read(self.encoder(mel).flatten(-2))
        return torch.unflatten(read, -1, (self.frames, -1))


def train_audio_encoder(
    probe: MouthProbe,
    source: ClipSource,
    generator: torch.Generator,
    seconds: float,
    batch: int,
) -> float:
    """Returns the correlation of the mouth's opening on held-out voices."""
    optimizer = MuonAdamW([probe], AUDIO_ADAM_ONLY)
    started = time.monotonic()
    step = 0
    while (elapsed := time.monotonic() - started) < seconds:
        clips = source.sample(batch, probe.frames, generator)
        mel = augment_mel(clips.mel, generator)[:, 0]
        loss = functional.mse_loss(probe(mel), clips.controls[..., NUM_CONTROLS:])
        loss.backward()  # type: ignore[no-untyped-call]
        step += 1
        fall = 0.5 + 0.5 * math.cos(math.pi * elapsed / seconds)
        optimizer.step(AUDIO_RATE * min(1.0, step / 50) * fall)
    with torch.no_grad():
        clips = source.sample(4096, probe.frames, generator, held_out=True)
        read = probe(clips.mel[:, 0])
    found = correlation(read[..., 0], clips.controls[..., NUM_CONTROLS])
    say(f"audio encoder {step} steps, held-out mouth opening {found:.3f}")
    return found


def train_latent_reader(
    model: ModelConfig, pool: Pool, generator: torch.Generator, steps: int
) -> tuple[LatentReader, list[float]]:
    """Returns it and the correlations of all controls on clips of the pool kept back."""
    device = pool.latents.device
    reader = LatentReader(model).to(device)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=2e-3, weight_decay=0.05)
    told = torch.unflatten(pool.clips.change(), 1, (-1, reader.frames))
    kept_back = max(1, len(told) // 16)
    for step in range(steps):
        rows = torch.randint(kept_back, len(told), (256,), generator=generator, device=device)
        at = torch.randint(0, told.shape[1], (256,), generator=generator, device=device)
        latent = pool.latents[rows, at].float()
        latent = latent + LATENT_NOISE * torch.randn(
            latent.shape, generator=generator, device=device
        )
        loss = functional.mse_loss(reader(latent), told[rows, at])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / steps)
    reader.eval().requires_grad_(False)
    read = reader(pool.latents[:kept_back].float())
    found = [round(correlation(read[..., i], told[:kept_back, ..., i]), 3) for i in range(CONTROLS)]
    say(f"latent reader {steps} steps, kept back controls {found}")
    return reader, found


def sample_levels(
    model: ModelConfig, count: int, chunks: int, generator: torch.Generator
) -> Tensor:
    """(2B, K): context near the last pass's level, denoised chunks over the served levels."""
    device = generator.device

    def uniform(low: float, high: float) -> Tensor:
        drawn = torch.rand(count, chunks, generator=generator, device=device)
        return low + (high - low) * drawn

    last = model.noise_levels[-1]
    context = torch.where(uniform(0, 1) < 0.7, last, uniform(0.05, last + 0.2))
    served = torch.tensor(model.noise_levels[:-1], device=device)
    which = torch.randint(0, len(served), (count, chunks), generator=generator, device=device)
    denoised = torch.where(uniform(0, 1) < 0.25, uniform(last, 1.0), served[which])
    return torch.cat([context, denoised])


class RolloutContext:
    """Latents that stand in for the true context: the model's own, refreshed group by group.

    group: how many clips; the last group is what is left of the pool.
    encode: so many clips never seen before, which take the place of a part of each group in turn.
    """

    def __init__(
        self, dit: CharacterDiT, pool: Pool, encode: Callable[[int], Pool], group: int, seed: int
    ) -> None:
        self.latents = pool.latents.clone()
        self._dit, self._pool, self._encode = dit, pool, encode
        self._group, self._seed = group, seed
        self._turn = 0

    @torch.no_grad()
    def refresh(self) -> None:
        groups = torch.split(torch.arange(len(self.latents)), self._group)
        turns, group = divmod(self._turn, len(groups))
        rows = groups[group]
        parts = torch.split(rows, RENEWED)
        part = parts[turns % len(parts)]
        self._pool.replace(int(part[0]), self._encode(len(part)))
        clips = Clips(*(field[rows] for field in self._pool.clips))
        self._dit.eval()
        rolled = roll_out(self._dit, clips, self._pool.references[rows], self._seed + self._turn)
        for chunk, latent in enumerate(rolled):
            self.latents[rows, chunk] = latent.to(self.latents.dtype)
        self._dit.train()
        self._turn += 1


@torch.no_grad()
def roll_out(dit: CharacterDiT, clips: Clips, references: Tensor, seed: int) -> Iterator[Tensor]:
    """Serves all clips in step with each other; yields (N, V, C) for each chunk."""
    denoiser = Denoiser(dit, dit.config, Optimizations(), batch=len(references))
    controls = clips.idle_by_chunk(dit.config.frames_per_chunk)
    with mixed_precision(references.device):
        denoiser.start(references.float() / 255, seed)
        for chunk in range(controls.shape[1]):
            condition = dit.condition_on_mel(clips.mel[:, chunk], controls[:, chunk])
            yield denoiser.denoise(condition, len(dit.config.noise_levels))


class Batch(NamedTuple):
    """What one step trains on: K chunks of B clips, as TrainingPass takes them, and their truth.

    truth: (B, K, V, C). told and change: (B, K, frames, 12), the true controls, and how they differ
    from the reference's. Of D of the clips the chunks
    `pair` (2,) are decoded, and R clips of real pictures beside them, from their latents
    real (R, 2, V, C) and their references real_images (R, 3, H, W): before (D + R, V, C), the true
    latent before them; shown and its weights (D + R, T, 3 and 1, H, W).
    """

    images: Tensor
    noisy: Tensor
    levels: Tensor
    mel: Tensor
    controls: Tensor
    offset: Tensor
    truth: Tensor
    told: Tensor
    change: Tensor
    pair: Tensor
    real: Tensor
    real_images: Tensor
    before: Tensor
    shown: Tensor
    weights: Tensor


class Losses(NamedTuple):
    """Of one step, each (); context and denoised are the transformer's mean squared errors."""

    total: Tensor
    latent: Tensor
    context: Tensor
    denoised: Tensor
    picture: Tensor
    mouth: Tensor
    read: Tensor


def painted_loss(
    painter: Autoencoder,
    latent: Tensor,
    images: Tensor,
    before: Tensor,
    shown: Tensor,
    weights: Tensor,
) -> Tensor:
    return picture_loss(painter.decode(latent, images, before), shown, weights)


class JointTraining:
    """The transformer and the decoder that learns with it. A step: draw, losses, update."""

    def __init__(
        self,
        dit: CharacterDiT,
        autoencoder: Autoencoder,
        probe: MouthProbe,
        latent_reader: LatentReader,
        pool: Pool,
        encode: Callable[[int], Pool],
        renderer: Renderer,
        real: RealPictures | None,
        generator: torch.Generator,
        *,
        batch: int,
        chunks: int,
        decoded: int,
        seed: int,
    ) -> None:
        compiled = generator.device.type == "cuda"
        self.dit = dit
        self.painter = copy.deepcopy(autoencoder).train()
        self.painter.encoder.requires_grad_(False)
        self.painter.decoder.requires_grad_(True)
        self.context = RolloutContext(dit, pool, encode, REFRESHED, seed)
        self._model, self._device = dit.config, generator.device
        self._frames = dit.config.frames_per_chunk
        self._pool, self._renderer, self._generator = pool, renderer, generator
        self._real, self._encode = real, autoencoder.encode
        self._batch, self._chunks, self._decoded = batch, chunks, decoded
        self._probe, self._latent_reader = probe, latent_reader
        self._pass = TrainingPass(dit, compiled=compiled)
        self._painted_loss = (
            torch.compile(painted_loss, dynamic=False) if compiled else painted_loss
        )
        self._gradients = ReplayedGradients(
            self._losses,
            [*dit.parameters(), *self.painter.decoder.parameters(), *probe.read.parameters()],
        )
        self._optimizer = MuonAdamW([dit], ADAM_ONLY)
        self._painter_optimizer = torch.optim.Adam(
            self.painter.decoder.parameters(), lr=PAINTER_RATE, betas=(0.9, 0.98)
        )
        self._probe_optimizer = torch.optim.Adam(probe.read.parameters(), lr=1e-3)
        self._averages = (AveragedWeights(dit), AveragedWeights(self.painter.decoder))

    def draw(self, *, rolling: bool) -> Batch:
        """rolling: its context is of rollouts, not true."""
        pool, generator, chunks, frames = self._pool, self._generator, self._chunks, self._frames
        rows = self._integers(len(pool.latents))
        first = self._integers(pool.latents.shape[1] - chunks + 1)
        at_start = torch.rand(self._batch, generator=generator, device=self._device) < 0.3
        first = torch.where(at_start, 0, first)
        at = first[:, None] + torch.arange(chunks, device=self._device)
        truth = pool.latents[rows[:, None], at].float()
        known = self.context.latents[rows[:, None], at].float() if rolling else truth
        mel = augment_mel(pool.clips.mel[rows[:, None], at], generator)
        told = torch.unflatten(pool.clips.controls, 1, (-1, frames))[rows[:, None], at]
        levels = sample_levels(self._model, self._batch, chunks, generator)
        mix, known = levels[..., None, None], known.repeat(2, 1, 1, 1)
        noise = torch.randn(known.shape, generator=generator, device=self._device)
        noisy = (1 - mix) * known + mix * noise
        offset = torch.where(first == 0, 0, self._integers(36)).float()
        images = pool.references[rows].float() / 255

        decoded = slice(0, self._decoded)
        second = int(torch.randint(1, chunks, ()))
        before = truth[decoded, second - 2] if second > 1 else torch.zeros_like(truth[decoded, 0])
        of = Clips(*(field[rows[decoded]] for field in pool.clips))
        of = of._replace(controls=told[decoded, second - 1 : second + 1].flatten(1, 2))
        shown, weights = render_clips(self._renderer, of), region_weights(of)
        moved, real = RealClips(shown[:0], images[:0], weights[:0]), truth[:0, :2]
        if self._real is not None:
            moved, real = self._real_clips(self._real, of)
        return Batch(
            images=images,
            noisy=noisy,
            levels=levels,
            mel=mel,
            controls=told[..., :NUM_CONTROLS],
            offset=offset,
            truth=truth,
            told=told,
            change=told - pool.clips.reference_controls[rows][:, None, None],
            pair=torch.tensor([second - 1, second], device=self._device),
            real=real,
            real_images=moved.reference,
            before=torch.cat([before, torch.zeros_like(real[:, 0])]),
            shown=torch.cat([shown, moved.frames]),
            weights=torch.cat([weights, moved.weights]),
        )

    @torch.no_grad()
    def _real_clips(self, real: RealPictures, rendered: Clips) -> tuple[RealClips, Tensor]:
        """Real pictures moved as the first of these clips are, and their latents (R, 2, V, C)."""
        few = slice(0, REAL_CLIPS)
        controls, at_rest = rendered.controls[few], rendered.reference_controls[few]
        clips = real.sample(controls, at_rest, self._generator)
        with mixed_precision(self._device):
            return clips, self._encode(clips.frames, clips.reference)

    def _integers(self, high: int) -> Tensor:
        size = (self._batch,)
        return torch.randint(0, high, size, generator=self._generator, device=self._device)

    def losses(self, batch: Batch, step: int) -> Losses:
        """With the gradients of the total left in the parameters."""
        ramp = torch.tensor(min(1.0, step / 300), device=self._device)
        return Losses(*self._gradients(*batch, ramp))

    def _losses(self, *given: Tensor) -> Losses:
        batch, ramp = Batch(*given[:-1]), given[-1]
        with mixed_precision(self._device):
            clean = self._pass(
                batch.images, batch.noisy, batch.levels, batch.mel, batch.controls, batch.offset
            )
            mouth = self._probe(batch.mel.flatten(0, 1)).float()
        errors = (clean - batch.truth.repeat(2, 1, 1, 1)).square().mean((2, 3))
        latent = (errors / batch.levels.clamp(min=0.25)).mean()
        context, denoised = errors.detach().chunk(2)
        told = batch.told[..., NUM_CONTROLS:]
        mouth = functional.mse_loss(mouth, told.reshape(mouth.shape))
        made = clean[self._batch :]
        read = unread(self._latent_reader(made), batch.change)
        with mixed_precision(self._device):
            picture = self._painted_loss(
                self.painter,
                torch.cat([made[: self._decoded].index_select(1, batch.pair), batch.real]),
                torch.cat([batch.images[: self._decoded], batch.real_images]),
                batch.before,
                batch.shown,
                batch.weights,
            )
        total = latent + PICTURE_WEIGHT * ramp * picture + MOUTH_WEIGHT * mouth + READ_WEIGHT * read
        return Losses(total, latent, context.mean(), denoised.mean(), picture, mouth, read)

    def update(self, rate: float, pace: float) -> None:
        """pace: 0 to 1, the share of the peak rates; rate: the transformer's peak."""
        nn.utils.clip_grad_norm_(self.dit.parameters(), 1.0)
        nn.utils.clip_grad_norm_(self.painter.decoder.parameters(), 1.0)
        self._optimizer.step(rate * pace)
        for group in self._painter_optimizer.param_groups:
            group["lr"] = PAINTER_RATE * pace
        for optimizer in (self._painter_optimizer, self._probe_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for average in self._averages:
            average.update()

    def finish(self) -> None:
        """Both networks as they were on average."""
        for average, network in zip(self._averages, (self.dit, self.painter.decoder), strict=True):
            average.copy_to(network)
        self.dit.eval().requires_grad_(False)
        self.painter.eval().requires_grad_(False)


def train_dit(
    model: ModelConfig,
    autoencoder: Autoencoder,
    source: ClipSource,
    renderer: Renderer,
    *,
    start: CharacterDiT | None,
    profiler: StepProfiler,
    real: RealPictures | None,
    seconds_left: Callable[[], float],
    pool_size: int,
    pool_chunks: int,
    batch: int,
    chunks: int,
    decoded: int,
    rate: float,
    teacher_share: float,
    seed: int,
) -> tuple[CharacterDiT, Autoencoder, dict[str, Any]]:
    """teacher_share: of the seconds, those in true context, before its own rollouts'.

    Returns averaged weights of the transformer and of the decoder that was trained on, and
    the record of the run."""
    device = source.device
    cuda = device.type == "cuda"
    generator = torch.Generator(device=device).manual_seed(seed)
    started = time.monotonic()

    def encode(count: int) -> Pool:
        return encode_pool(autoencoder, source, renderer, count, pool_chunks, generator)

    pool = encode(pool_size)
    say(
        f"dit pool of {pool_size} clips in {time.monotonic() - started:.1f} s, latent deviation "
        f"{pool.latents.float().std():.3f}, change {pool.latents.diff(dim=1).float().std():.3f}"
    )
    torch.manual_seed(seed)
    dit = (start or CharacterDiT(model).to(device)).train().requires_grad_(True)
    probe = MouthProbe(dit).to(device)
    audio_score = train_audio_encoder(
        probe, source, generator, AUDIO_SHARE * seconds_left(), 512 if cuda else 16
    )
    latent_reader, latent_score = train_latent_reader(
        model, pool, generator, LATENT_READER_STEPS if cuda else 20
    )
    training = JointTraining(
        dit,
        autoencoder,
        probe,
        latent_reader,
        pool,
        encode,
        renderer,
        real,
        generator,
        batch=batch,
        chunks=chunks,
        decoded=decoded,
        seed=seed,
    )
    log: list[dict[str, float]] = []
    total = seconds_left()
    step = logged = 0
    since = torch.zeros(len(Losses._fields), device=device)
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < total:
        if step == COMPILE_STEPS:
            say(f"dit compiled in {elapsed:.1f} s")
            started, total = time.monotonic(), seconds_left()
        rolling = elapsed >= teacher_share * total
        if rolling and step % REFRESH_STEPS == 0:
            training.context.refresh()
        losses = training.losses(training.draw(rolling=rolling), step)
        fall = 0.5 + 0.5 * math.cos(math.pi * min(1.0, elapsed / total))
        pace = min(1.0, (step + 1) / 150) * max(0.02, fall)
        training.update(rate, pace)
        step += 1
        since += torch.stack(losses).detach()
        profiler.tick("transformer", step)
        if step % 200 == 0 or step in (1, 20, 60):
            figures = dict(zip(Losses._fields, (since / (step - logged)).tolist(), strict=True))
            logged = step
            since.zero_()
            log.append({"step": step, "seconds": elapsed, **figures})
            say("dit " + " ".join(f"{k} {v:.4g}" for k, v in log[-1].items()))
    training.finish()
    record = {
        "log": log,
        "steps": step,
        "audio_encoder_correlation": audio_score,
        "latent_reader_correlation": latent_score,
    }
    return dit, training.painter, record
