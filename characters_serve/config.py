"""The one configuration tree: frozen, validated when built, never edited afterwards.

In: YAML files and `--set a.b=c` overrides. Out: `Config`. The defaults are `configs/tiny.yaml`,
the embedded character; a test holds the two together. A flag is read once, where its object is
built.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from characters_serve.fleet.layout import CannotPlace, GroupShape, place_all, uniform_host
from characters_serve.model.shard import deal

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


Decoder = Literal["reference_warp", "wan22", "wan21", "taehv", "taehv_super"]
# (stride, channels) of the latents that each public video decoder reads.
_WAN21_LATENTS, _WAN22_LATENTS = (8, 16), (16, 48)
_DECODED_LATENTS: dict[Decoder, tuple[tuple[int, int], ...]] = {
    "wan21": (_WAN21_LATENTS,),
    "wan22": (_WAN22_LATENTS,),
    "taehv": (_WAN21_LATENTS, _WAN22_LATENTS),
    "taehv_super": (_WAN22_LATENTS,),
}


def secret(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """A secret of the environment, without the newline that files of secrets end in; or ""."""
    return environment.get(name, "").strip()


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AudioConfig(Frozen):
    """Log-mel front end. The hop divides a video frame, so that audio and video indices agree."""

    sample_rate: Positive = 24_000
    hop: Positive = 250
    win: Positive = 600
    n_fft: Positive = 1024
    num_mels: Positive = 48
    f_min: float = 60.0
    f_max: float = 7600.0
    past_frames: int = Field(8, ge=0)
    future_frames: int = Field(4, ge=0)


class WanConfig(Frozen):
    """What the models of the Wan line add to the common geometry."""

    freq_dim: Positive = Field(256, description="sines and cosines of the noise level")
    text_dim: Positive = 4096
    text_len: Positive = Field(512, description="rows that shorter prompts are filled up to")
    text_embedding: str | None = Field(
        None, description="safetensors file with `text` (n, dim); else text.safetensors in weights"
    )


class LiveAvatarConfig(Frozen):
    """Audio and the conditions of a LiveAvatar (Wan2.2-S2V) model."""

    wav2vec2: str | None = Field(
        None, description="folder of the speech model; else wav2vec2 in weights"
    )
    audio_layers: Positive = Field(25, description="hidden states of the speech model, all mixed")
    audio_dim: Positive = 1024
    audio_tokens: Positive = Field(4, description="per latent; one learned token is added")
    audio_after_blocks: tuple[int, ...] = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)
    motion_latents: tuple[int, int, int] = Field((1, 2, 16), description="packed at 1x, 2x, 4x")
    reference_distance: Positive = Field(30, description="latents from the chunk's first")


class CausalWanConfig(Frozen):
    """What a causal Wan model remembers, in latents; the sink is the stream's own beginning."""

    start: Literal["text", "image"] = Field(
        "text", description="image: the reference is the first latent, where a checkpoint allows it"
    )
    window_latents: Positive = Field(description="in the cache: sink and current chunk included")
    sink_latents: int = Field(0, ge=0, description="the first ones, which are never dropped")
    sink_distance: Literal["growing", "constant"] = Field(
        "growing", description="constant: the sink keeps its place in the window"
    )


class ModelConfig(Frozen):
    """Geometry of one character model; every hop takes sizes, rates and counts from here."""

    family: Literal["characters", "live_avatar", "causal_wan"] = "characters"
    name: str = "tiny"
    weights: str = Field("builtin", description="builtin, synthetic, or a safetensors folder")
    decoder: Decoder = "reference_warp"
    decoder_dim: int = Field(0, ge=0, description="its channels at full resolution; 0: published")

    width: Positive = 384
    height: Positive = 256
    fps: Positive = 24
    frames_per_chunk: Positive = 4
    latents_per_chunk: Positive = 1
    latent_stride: Positive = 32
    patch: Positive = 1
    latent_channels: Positive = 64

    audio: AudioConfig = AudioConfig()
    audio_tokens: int = Field(4, ge=0)
    num_controls: Positive = 7
    control_tokens: int = Field(1, ge=0)
    reference_stride: Positive = Field(32, description="pixels of the reference per identity token")
    prompt_slots: int = Field(0, ge=0)
    prompt_dim: int = Field(0, ge=0)

    dim: Positive = 192
    num_blocks: Positive = 8
    num_heads: Positive = 3
    head_dim: Positive = 64
    mlp_dim: Positive = 768
    adaln_rank: Positive = 96
    rope_split: tuple[int, int, int] = Field((24, 20, 20), description="dims for time, row, column")
    rope_theta: tuple[float, float, float] = (1000.0, 50.0, 50.0)

    noise_levels: tuple[float, ...] = Field((1.0, 0.25), description="one pass for each")
    first_noise_levels: tuple[float, ...] = Field((), description="of the first chunk, if others")
    redraw_noise: bool = Field(False, description="new noise for each pass, not the chunk's own")
    cache_policy: Literal["last_pass", "per_pass", "clean_pass"] = "last_pass"
    window_chunks: Positive = Field(5, description="chunks in the cache, the current one included")
    position_reset_steps: Positive = 42

    wan: WanConfig | None = None
    live_avatar: LiveAvatarConfig | None = None
    causal_wan: CausalWanConfig | None = None

    @property
    def token_stride(self) -> int:
        return self.latent_stride * self.patch

    @property
    def grid_rows(self) -> int:
        return self.height // self.token_stride

    @property
    def grid_columns(self) -> int:
        return self.width // self.token_stride

    @property
    def video_tokens(self) -> int:
        return self.latents_per_chunk * self.grid_rows * self.grid_columns

    @property
    def tokens_per_chunk(self) -> int:
        return self.video_tokens + self.audio_tokens + self.control_tokens

    @property
    def token_channels(self) -> int:
        return self.latent_channels * self.patch**2

    @property
    def reference_rows(self) -> int:
        return self.height // self.reference_stride

    @property
    def reference_columns(self) -> int:
        return self.width // self.reference_stride

    @property
    def reference_tokens(self) -> int:
        return self.reference_rows * self.reference_columns

    @property
    def motion_grids(self) -> tuple[tuple[int, int, int], ...]:
        """Tokens of the packed motion latents, (times, rows, columns) at 1x, 2x and 4x: a token
        covers 1, 2, 4 latents in time and 2, 4, 8 in each direction; what is left over is cut."""
        if self.live_avatar is None:
            return ()
        rows, columns = self.height // self.latent_stride, self.width // self.latent_stride
        return tuple(
            (latents // pack, rows // (2 * pack), columns // (2 * pack))
            for latents, pack in zip(self.live_avatar.motion_latents, (1, 2, 4), strict=True)
        )

    @property
    def prefix_slots(self) -> int:
        return self.reference_tokens + self.prompt_slots + sum(map(math.prod, self.motion_grids))

    @property
    def cache_slots(self) -> int:
        return self.prefix_slots + self.window_chunks * self.tokens_per_chunk

    @property
    def num_caches(self) -> int:
        """Caches for each block: one for each pass under `per_pass`, else one."""
        return len(self.noise_levels) if self.cache_policy == "per_pass" else 1

    @property
    def all_reduces_per_step(self) -> int:
        return self.num_blocks * len(self.noise_levels)

    @property
    def chunk_period_s(self) -> float:
        return self.frames_per_chunk / self.fps

    @property
    def mels_per_frame(self) -> int:
        return self.audio.sample_rate // (self.audio.hop * self.fps)

    @property
    def audio_samples_per_chunk(self) -> int:
        """Samples at the model's own audio rate."""
        return self.audio.sample_rate * self.frames_per_chunk // self.fps

    @property
    def audio_window_samples(self) -> int:
        """Samples that a chunk is conditioned on: its mel frames with their margins."""
        own = self.mels_per_frame * self.frames_per_chunk
        frames = self.audio.past_frames + own + self.audio.future_frames
        return (frames - 1) * self.audio.hop + self.audio.n_fft

    @property
    def voice_samples_per_chunk(self) -> int:
        """Samples delivered with each chunk, at 48 kHz."""
        return 48_000 * self.frames_per_chunk // self.fps

    @model_validator(mode="after")
    def _geometry_is_possible(self) -> ModelConfig:
        for side in ("width", "height"):
            if getattr(self, side) % self.token_stride:
                raise ValueError(f"{side} must be a multiple of latent_stride x patch")
            if getattr(self, side) % self.reference_stride:
                raise ValueError(f"{side} must be a multiple of reference_stride")
        if sum(self.rope_split) != self.head_dim or any(part % 2 for part in self.rope_split):
            raise ValueError("rope_split must be three even numbers that add up to head_dim")
        if self.audio.sample_rate % (self.audio.hop * self.fps):
            raise ValueError("audio.hop must divide one video frame's samples without remainder")
        if (48_000 * self.frames_per_chunk) % self.fps:
            raise ValueError("a chunk must hold a whole number of 48 kHz samples")
        levels = list(self.noise_levels)
        if not levels or levels != sorted(levels, reverse=True):
            raise ValueError("noise_levels must fall from pass to pass")
        if levels[-1] <= 0 or levels[0] > 1:
            raise ValueError("noise_levels must lie in (0, 1]")
        latents = _DECODED_LATENTS.get(self.decoder)
        if latents and (self.latent_stride, self.latent_channels) not in latents:
            known = " or ".join(f"{stride} and {channels}" for stride, channels in latents)
            raise ValueError(
                f"decoder {self.decoder} reads latents of latent_stride and latent_channels {known}"
            )
        if latents and self.frames_per_chunk != 4 * self.latents_per_chunk:
            raise ValueError(f"decoder {self.decoder} makes 4 frames of each latent")
        if (self.prompt_slots == 0) != (self.prompt_dim == 0):
            raise ValueError("prompt_slots and prompt_dim are given together")
        return self

    @model_validator(mode="after")
    def _family_has_its_parts(self) -> ModelConfig:
        if self.family == "characters":
            if self.wan or self.live_avatar or self.causal_wan:
                raise ValueError("wan, live_avatar, causal_wan are settings of other families")
            return self
        if self.family == "causal_wan":
            self._check_causal_wan()
            return self
        if self.wan is None or self.live_avatar is None:
            raise ValueError(f"family {self.family} needs wan and live_avatar")
        self._check_wan_line()
        if self.reference_stride != self.token_stride:
            raise ValueError("reference_stride must be one token's pixels")
        if self.cache_policy != "per_pass":
            raise ValueError(f"family {self.family} needs cache_policy per_pass")
        if (
            self.audio.hop * self.fps != self.audio.sample_rate
            or self.audio.n_fft != self.audio.hop
        ):
            raise ValueError("audio.hop and audio.n_fft must be one video frame's samples")
        after = self.live_avatar.audio_after_blocks
        if list(after) != sorted(set(after)) or not all(0 <= i < self.num_blocks for i in after):
            raise ValueError("live_avatar.audio_after_blocks must rise and name blocks")
        return self

    def _check_wan_line(self) -> None:
        if self.num_heads * self.head_dim != self.dim:
            raise ValueError("dim must be num_heads x head_dim")
        if self.audio_tokens or self.control_tokens or self.prompt_slots:
            raise ValueError(
                "audio_tokens, control_tokens and prompt_slots must be 0: voice and text are "
                "cross-attended to, and take no slots"
            )
        if self.patch != 2 or self.frames_per_chunk != 4 * self.latents_per_chunk:
            raise ValueError("patch must be 2, and frames_per_chunk 4 x latents_per_chunk")

    def _check_causal_wan(self) -> None:
        own = self.causal_wan
        if self.wan is None or own is None or self.live_avatar is not None:
            raise ValueError("family causal_wan needs wan and causal_wan alone")
        self._check_wan_line()
        if self.cache_policy != "clean_pass" or not self.redraw_noise:
            raise ValueError("family causal_wan needs cache_policy clean_pass and redraw_noise")
        if self.latents_per_chunk > own.window_latents - own.sink_latents:
            raise ValueError(
                f"a chunk of {self.latents_per_chunk} latents does not fit into causal_wan's "
                f"window_latents less sink_latents"
            )


class Optimizations(Frozen):
    """One flag for each optimisation; each keeps a plain path with the same checkpoint keys."""

    write_time_rope: bool = True
    ring_cache: bool = True
    fp8_gemm: bool = False
    fp8_kv_cache: bool = False
    fused_pre_attention: bool = False
    fused_norm_quant: bool = False
    precomputed_modulation: bool = True
    two_shot_all_reduce: bool = False
    fused_gemm_all_reduce: bool = False
    in_switch_reduction: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    fast_decoder: bool = False
    dedicated_decoder: bool = True

    @model_validator(mode="after")
    def _combinations_are_possible(self) -> Optimizations:
        if self.ring_cache and not self.write_time_rope:
            raise ValueError(
                "ring_cache needs write_time_rope: once the ring wraps, slot order is no longer "
                "time order, so keys rotated by slot at read time get wrong positions"
            )
        if self.fused_pre_attention and not self.ring_cache:
            raise ValueError(
                "fused_pre_attention needs ring_cache: its kernel writes rotated keys straight "
                "into the ring's slots"
            )
        if self.cuda_graphs and not self.fused_pre_attention:
            raise ValueError(
                "cuda_graphs needs fused_pre_attention: only there the ring slot and the positions "
                "live on the device, so that one captured step serves every step"
            )
        if self.fused_gemm_all_reduce and self.two_shot_all_reduce:
            raise ValueError(
                "fused_gemm_all_reduce and two_shot_all_reduce are two ways to sum the steady "
                "shape: choose one"
            )
        for flag in ("fused_gemm_all_reduce", "two_shot_all_reduce"):
            if getattr(self, flag) and not self.fp8_gemm:
                raise ValueError(f"{flag} needs fp8_gemm: what it sums is an FP8 matmul")
        if self.in_switch_reduction and not self.fused_gemm_all_reduce:
            raise ValueError("in_switch_reduction needs fused_gemm_all_reduce: it is a part of it")
        return self


class PatternConfig(Frozen):
    """The engine whose pace the pattern keeps; 0 ms answers at once."""

    step_ms: float = Field(0.0, ge=0, le=5000)
    long_step_ms: float = Field(0.0, ge=0, le=5000, description="of each long_step_every-th step")
    long_step_every: Positive = 42


class EngineConfig(Frozen):
    """The group's compute: a diffusion model, or the flash-and-beep pattern that needs none."""

    kind: Literal["diffusion", "pattern"] = "diffusion"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    tensor_parallel: Positive = Field(1, description="ranks of a group, each on its own GPU")
    rank_timeout_s: Seconds = Field(30.0, description="a rank that waits longer ends the group")
    rank_threads: Positive = 1
    decoder_threads: Positive = 1
    ready_timeout_s: Seconds = 120.0
    stall_timeout_s: Seconds = Field(10.0, description="without a chunk a live group is unhealthy")
    passes: Positive | None = Field(None, description="passes a chunk; null: all noise levels")
    degraded_passes: Positive = Field(2, description="passes a chunk when the engine runs late")
    idle_passes: Positive = Field(2, description="passes of a chunk in which nothing is said")
    pattern: PatternConfig = PatternConfig()


class DecoderConfig(Frozen):
    """Where a group's decoder runs, when `optimizations.dedicated_decoder` gives it a process."""

    shared_by: Positive = Field(1, description="groups that one decoder's GPU serves")


class DeliveryConfig(Frozen):
    """Playout and encoding in the session host."""

    playout_chunks: int = Field(2, ge=1, le=4, description="chunks buffered before they play")
    video_codec: Literal["vp8", "h264"] = "vp8"
    video_start_kbps: Positive | None = Field(None, description="else of the picture's size")
    video_min_kbps: Positive | None = Field(None, description="else of the picture's size")
    video_max_kbps: Positive | None = Field(None, description="else of the picture's size")
    audio_kbps: Positive = 48
    ice_timeout_s: Seconds = 15.0
    public_address: str | None = Field(None, description="what clients reach, behind a 1:1 NAT")
    udp_ports: tuple[int, int] | None = Field(None, description="first and last; else any port")

    @field_validator("public_address")
    @classmethod
    def _is_an_address(cls, address: str | None) -> str | None:
        return None if address is None else str(ipaddress.ip_address(address))

    @field_validator("udp_ports")
    @classmethod
    def _is_a_range(cls, ports: tuple[int, int] | None) -> tuple[int, int] | None:
        if ports is not None and not 1024 <= ports[0] <= ports[1] <= 65_535:
            raise ValueError("the first and last port must lie between 1024 and 65535, in order")
        return ports

    @model_validator(mode="after")
    def _rates_are_ordered(self) -> DeliveryConfig:
        rates = (self.video_min_kbps, self.video_start_kbps, self.video_max_kbps)
        given = [kbps for kbps in rates if kbps is not None]
        if given != sorted(given):
            raise ValueError("video_min_kbps <= video_start_kbps <= video_max_kbps must hold")
        return self


class SessionConfig(Frozen):
    max_duration_s: Seconds = 900.0
    idle_timeout_s: Seconds = Field(300.0, description="ends a session in which nobody speaks")
    connect_timeout_s: Seconds = Field(30.0, description="from creation to the first media")
    reconnect_grace_s: Seconds = 20.0
    ending_notice_s: Seconds = 30.0


class ChatConfig(Frozen):
    """An OpenAI-compatible chat endpoint; without `base_url` the scripted persona answers."""

    base_url: str | None = None
    model: str = "gpt-4o-mini"
    api_key_env: str = "OPENAI_API_KEY"
    timeout_s: Seconds = 10.0
    filler_after_s: float = Field(1.5, ge=0, description="says a word while it waits; 0: never")


class ToolConfig(Frozen):
    """A function that the client runs for the agent. parameters: their JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}


class LinesConfig(Frozen):
    """What is said beside the replies. null: the script's words, or nothing where the language is
    not English."""

    greeting: str | None = None
    filler: str | None = Field(None, description="while a reply takes its time")
    pardon: str | None = Field(None, description="to speech in which no word was recognised")
    apology: str | None = Field(None, description="for a reply that failed")


class RealtimeConfig(Frozen):
    """An endpoint of the OpenAI Realtime event protocol."""

    url: str = "wss://api.openai.com/v1/realtime"
    model: str = "gpt-realtime"
    voice: str = "marin"
    transcription_model: str = "gpt-4o-mini-transcribe"
    api_key_env: str = "OPENAI_API_KEY"
    tools: tuple[ToolConfig, ...] = Field((), description="functions that the client runs")
    connect_timeout_s: Seconds = 10.0
    reconnects: int = Field(6, ge=0, description="attempts in a row before it is given up")


class AgentConfig(Frozen):
    kind: Literal["local", "external", "openai_realtime", "none"] = "local"
    recogniser: Literal["auto", "whisper", "pocketsphinx"] = "auto"
    whisper_model: str | None = Field(None, description="folder of a CTranslate2 whisper model")
    voice: str = Field("heart", description="heart, piper, or a Piper voice file")
    language: str = Field("en", pattern="^[a-z]{2,3}$", description="other than en needs whisper")
    chat: ChatConfig = ChatConfig()
    lines: LinesConfig = LinesConfig()
    realtime: RealtimeConfig = RealtimeConfig()
    end_of_turn: Literal["auto", "words", "melody"] = "auto"
    end_of_turn_silence_s: Seconds = 0.5
    barge_in_speech_s: Seconds = Field(0.12, description="user speech that stops the character")
    greet: bool = True

    @model_validator(mode="after")
    def _languages_are_known(self) -> AgentConfig:
        if self.language != "en" and self.recogniser == "pocketsphinx":
            raise ValueError("recogniser: pocketsphinx knows English only; use whisper")
        return self


class ApiKey(Frozen):
    """A server key by the SHA-256 of its text, so that what is written here opens nothing."""

    name: str = Field(pattern=r"^[a-z0-9-]{1,32}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    sessions_per_minute: Positive = 60
    max_sessions: Positive | None = Field(None, description="at the same time")


class ServerConfig(Frozen):
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65_535)
    api_key_env: str = Field("CHARACTERS_API_KEY", description="a server key, or sha256: and its")
    api_keys: tuple[ApiKey, ...] = ()
    allow_keyless: bool = Field(False, description="listen beyond this machine without a key")
    allowed_origins: tuple[str, ...] = ()
    turn_urls: tuple[str, ...] = Field((), description="relays for browsers that need one")
    turn_secret_env: str = "CHARACTERS_TURN_SECRET"
    client_secret_ttl_s: Seconds = Field(120.0, description="from creation to connection")
    sessions_per_minute: Positive = Field(60, description="for each client address without a key")
    requests_per_minute: Positive = Field(1200, description="for each client address")
    queue_size: int = Field(0, ge=0, description="who may wait while all groups are taken")
    queue_timeout_s: Seconds = Field(300.0, description="the longest that anyone waits in it")
    max_image_bytes: Positive = 10 * 1024 * 1024
    run_dir: str | None = Field(None, description="folder of the groups' sockets; else temporary")
    drain_s: float = Field(30.0, ge=0, description="what live sessions get when the server leaves")
    log_format: Literal["text", "json"] = "text"
    trace_dir: str | None = Field(None, description="folder for a trace of each session's chunks")

    @property
    def has_key(self) -> bool:
        """Whether making sessions needs a server key."""
        return bool(self.api_keys or secret(self.api_key_env))

    @field_validator("turn_urls")
    @classmethod
    def _are_turn_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not re.fullmatch(r"turns?:[^\s/]+", url):
                raise ValueError(f"{url!r} is not like turn:host:3478 or turns:host:5349")
        return urls


class FleetConfig(Frozen):
    engine: Literal["local", "ray"] = "local"
    groups: Positive = 1
    gpus: int = Field(0, ge=0, description="this machine's, dealt out to the groups; 0: none are")
    nvlink_gpus: Positive = Field(8, description="how many of them NVLink joins: 0 to 7, ...")
    ray_address: str | None = Field(None, description="of the Ray cluster; else one of its own")
    reserve_ttl_s: Seconds = 30.0
    ping_interval_s: Seconds = 1.0
    ping_timeout_s: Seconds = 10.0
    stop_timeout_s: Seconds = 5.0


class Config(Frozen):
    model: ModelConfig = ModelConfig()
    optimizations: Optimizations = Optimizations()
    engine: EngineConfig = EngineConfig()
    decoder: DecoderConfig = DecoderConfig()
    delivery: DeliveryConfig = DeliveryConfig()
    session: SessionConfig = SessionConfig()
    agent: AgentConfig = AgentConfig()
    server: ServerConfig = ServerConfig()
    fleet: FleetConfig = FleetConfig()

    @property
    def passes(self) -> int:
        """Denoising passes of a whole chunk."""
        return self.engine.passes or len(self.model.noise_levels)

    @property
    def group_shape(self) -> GroupShape:
        """The GPUs of one group, where it runs on GPUs."""
        dedicated = self.optimizations.dedicated_decoder and self.engine.kind == "diffusion"
        return GroupShape(self.engine.tensor_parallel, dedicated, self.decoder.shared_by)

    @model_validator(mode="after")
    def _groups_have_room(self) -> Config:
        if self.decoder.shared_by > 1 and not self.optimizations.dedicated_decoder:
            raise ValueError("decoder.shared_by needs optimizations.dedicated_decoder")
        fleet = self.fleet
        if fleet.engine == "ray":
            if fleet.gpus:
                raise ValueError("fleet.gpus: under fleet.engine=ray, Ray deals out the GPUs")
            if self.decoder.shared_by > 1:
                raise ValueError("decoder.shared_by: under fleet.engine=ray a group owns its GPUs")
            if self.agent.kind == "external":
                raise ValueError(
                    "agent.kind=external: under fleet.engine=ray its sound would go through Ray"
                )
        elif fleet.gpus:
            host = uniform_host("this machine", fleet.gpus, fleet.nvlink_gpus)
            try:
                place_all([host], self.group_shape, fleet.groups)
            except CannotPlace as error:
                raise ValueError(f"fleet.groups: {error}") from None
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        levels, engine = len(self.model.noise_levels), self.engine
        self._check_passes("passes", self.passes, levels)
        self._check_passes("degraded_passes", engine.degraded_passes, self.passes)
        self._check_passes("idle_passes", engine.idle_passes, self.passes)
        self._check_open_family()
        try:
            deal(self.model, self.engine.tensor_parallel)
        except ValueError as error:
            raise ValueError(f"engine.tensor_parallel: {error}") from error
        for flag in _CUDA_ONLY:
            if getattr(self.optimizations, flag) and self.engine.device != "cuda":
                raise ValueError(f"optimizations.{flag} needs engine.device cuda")
        if self.optimizations.cuda_graphs and self.passes != levels:
            raise ValueError(
                f"optimizations.cuda_graphs captures {levels} passes: engine.passes is not that"
            )
        for flag in ("fused_gemm_all_reduce", "two_shot_all_reduce"):
            if getattr(self.optimizations, flag) and self.engine.dtype == "float32":
                raise ValueError(f"optimizations.{flag} sums in bf16: engine.dtype is float32")
        return self

    def _check_passes(self, field: str, passes: int, most: int) -> None:
        if self.model.cache_policy == "per_pass" and passes != most:
            raise ValueError(
                f"engine.{field} must be {most} under cache_policy per_pass: each pass "
                "owns a cache that every chunk must be written to"
            )
        if not min(2, most) <= passes <= most:
            raise ValueError(
                f"engine.{field} must lie between {min(2, most)} and {most}: a chunk "
                "begins at the first noise level and is remembered at the last"
            )

    def _check_open_family(self) -> None:
        own, model = self.model.causal_wan, self.model
        if model.family != "characters":
            for flag in ("fused_gemm_all_reduce", "two_shot_all_reduce"):
                if getattr(self.optimizations, flag):
                    raise ValueError(f"optimizations.{flag}: not for family {model.family} so far")
        if own is None or not self.optimizations.fused_pre_attention:
            return
        before = 1 if own.start == "image" else 0
        turning = own.window_latents - own.sink_latents
        if turning % model.latents_per_chunk or (before - own.sink_latents) % (
            model.latents_per_chunk
        ):
            raise ValueError(
                "optimizations.fused_pre_attention: its kernel writes a chunk in one run, so "
                "causal_wan's sink_latents (less one that an image is) and window_latents must be "
                f"multiples of latents_per_chunk, {model.latents_per_chunk}"
            )


_CUDA_ONLY = ("cuda_graphs", "fused_gemm_all_reduce", "two_shot_all_reduce")


class ConfigError(ValueError):
    """A configuration that cannot be; the message names the file or override and the field."""


class _Loader(yaml.SafeLoader):
    """Refuses a setting that is given twice: YAML's own loader keeps the last without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is given twice", problem_mark=key.start_mark
                )
            seen.append(key.value)
        return node


def load_config(paths: list[Path] | None = None, overrides: list[str] | None = None) -> Config:
    """Merge YAML files from left to right, then `a.b=c` overrides (values are YAML).

    A file's `extends` names the file that it is laid over, in its own folder.
    """
    tree: dict[str, Any] = {}
    for path in paths or []:
        _merge(tree, _read(path))
    for override in overrides or []:
        dotted, equals, text = override.partition("=")
        if not equals or not dotted:
            raise ConfigError(f"--set {override}: expected a.b=value")
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override}: {error}") from error
        for key in reversed(dotted.split(".")):
            value = {key: value}
        _merge(tree, value)
    try:
        return Config.model_validate(tree)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text("utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected a mapping of settings")
    beneath = loaded.pop("extends", None)
    if beneath is None:
        return loaded
    if not isinstance(beneath, str) or path in above:
        raise ConfigError(f"{path}: extends: expected another file of its folder")
    tree = _read(path.parent / beneath, (*above, path))
    _merge(tree, loaded)
    return tree


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
