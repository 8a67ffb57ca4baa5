"""Every optimisation of the open families against the plain path, on CPU through the kernels'
references: whole streams, with LiveAvatar's positions moved back and causal Wan's ring wrapped."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from characters_kernels.fp8 import E4M3
from characters_serve.config import ConfigError, ModelConfig, Optimizations, load_config
from characters_serve.engine import denoiser as denoiser_module
from characters_serve.engine.denoiser import Denoiser
from characters_serve.engine.step_graph import tensors_of, zeros_like
from characters_serve.model.fp8 import Fp8Linear
from characters_serve.model.kv_cache import FusedCache, make_cache
from characters_serve.model.open.live_avatar import LiveAvatar
from tests.unit import small_causal_wan, small_live_avatar
from tests.unit.small_causal_wan import Noise, model_of, text_of
from tests.unit.small_live_avatar import drawn
from tests.unit.test_causal_wan import CONFIGS
from tests.unit.test_kv_cache import NothingOnTheHost

PLAIN = Optimizations(write_time_rope=False, ring_cache=False, precomputed_modulation=False)
FUSED = ("fused_pre_attention", "fused_norm_quant")
FP8 = ("fp8_gemm", "fp8_kv_cache")
TALKER = small_live_avatar.SMALL.model_copy(update={"position_reset_steps": 3})
CHUNKS = 9
# Values of e4m3 lie 1/8 to 1/16 of themselves apart, so that rounding one errs by at most a
# sixteenth of it, evenly: by a sixteenth / sqrt(3) in the mean square. A product has two of them.
ROUNDING = 2**0.5 * 2**-4 / 3**0.5


class TalkerStream:
    """LiveAvatar, from invented conditions: what a session gives to the denoiser."""

    def __init__(self) -> None:
        self.config = TALKER
        self.network = small_live_avatar.network(TALKER)
        size = (1, TALKER.latent_channels, 1, TALKER.height // 8, TALKER.width // 8)
        self._still = drawn(size, 101)

    def write_prefix(self, image: Tensor, cache: Any, prompt: Tensor | None) -> Any:
        text = self.network.read_text(drawn((1, 5, 24), 100))
        motion = self._still.expand(-1, -1, 19, -1, -1)
        self.network.write_conditions(self._still, motion, text, cache)
        return text

    def condition(self, window: Tensor, controls: Tensor, text: Any) -> Any:
        """The window's first sample numbers the chunk."""
        return self.network.condition(drawn((1, 5, 20, 12), 200 + int(window[0, 0])), text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def __call__(self, *inputs: Any) -> Tensor:
        clean: Tensor = self.network(*inputs)
        return clean


def generator(name: str) -> tuple[Any, ModelConfig]:
    if name == "talker":
        return TalkerStream(), TALKER
    model = model_of(name)
    encode = (lambda _: small_causal_wan.first_latent()) if name == "from an image" else None
    return small_causal_wan.network(model, encode), model


def denoiser(name: str, optimizations: Optimizations) -> Denoiser:
    model, config = generator(name)
    return Denoiser(model, config, optimizations)


def stream(made_by: Denoiser, chunks: int = CHUNKS) -> Tensor:
    """Latents (chunks, V, C) of one session; its noise is the same whatever the flags."""
    config = made_by._config
    made_by._draw = Noise(config)  # type: ignore[method-assign]
    made_by.start(torch.zeros(1, 3, config.height, config.width), 0, text_of())
    controls = torch.zeros(config.frames_per_chunk, config.num_controls)
    passes = len(config.noise_levels)
    found = [made_by.step(torch.full((1,), float(n)), controls, passes) for n in range(chunks)]
    return torch.stack([latent.clone() for latent in found])


@functools.cache
def plain(name: str) -> Tensor:
    return stream(denoiser(name, PLAIN))


def error(found: Tensor, name: str) -> float:
    """Root mean square difference from the plain path, relative to it, over the chunks found."""
    expected = plain(name)[: len(found)]
    return float((found - expected).norm() / expected.norm())


def flags(*names: str) -> Optimizations:
    return Optimizations(**dict.fromkeys(names, True))


STREAMS = pytest.mark.parametrize("name", ["talker", "chunks", "single latents", "from an image"])


@STREAMS
def test_fused_paths_in_float_are_the_plain_path(name: str) -> None:
    for names in (FUSED, FUSED[:1], FUSED[1:]):
        found = stream(denoiser(name, flags(*names)))
        assert 0 < error(found, name) < 1e-5, names


@STREAMS
def test_an_fp8_cache_errs_by_its_rounding_in_every_kind_of_cache(name: str) -> None:
    for kind in (
        {"write_time_rope": False, "ring_cache": False},
        {"ring_cache": False},
        {},
        {"fused_pre_attention": True},
    ):
        made_by = denoiser(name, Optimizations(fp8_kv_cache=True, **kind))
        assert 1e-4 < error(stream(made_by), name) < ROUNDING, kind
        assert made_by.saturated == 0


@STREAMS
def test_fp8_matmuls_err_by_their_rounding_and_fused_kernels_add_none(name: str) -> None:
    unfused = error(stream(denoiser(name, flags("fp8_gemm"))), name)
    assert 1e-3 < unfused < ROUNDING
    for names in (FUSED, (*FUSED, "fp8_kv_cache")):
        made_by = denoiser(name, flags("fp8_gemm", *names))
        found = stream(made_by)
        assert error(found, name) < 1.2 * unfused + 5e-3
        assert made_by.saturated == 0
        last, first = ((found - plain(name)).flatten(1).norm(dim=1)[i] for i in (-1, 0))
        assert last < 2 * first, "the error must not grow"


@pytest.mark.parametrize("name", ["talker", "from an image"])
def test_compiled_pieces_are_the_plain_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole, as they are for a GPU; what runs here is torch itself."""
    traced: list[str] = []

    def compiled(call: Any, **options: Any) -> Any:
        traced.append(call.__name__)
        return real_compile(call, backend="eager", **options)

    real_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compiled)
    assert error(stream(denoiser(name, flags("compile")), 3), name) < 1e-5
    assert traced == ["_norm_modulate", "add_branch", "_gelu", "add_branch"]


class TracedStep:
    """A captured step, on CPUs: the operations of one run and the tensors that they touched, as a
    CUDA graph keeps them. Whatever Python knew at the capture is as it was then."""

    def __init__(self, run: Callable[..., Tensor], noises: list[Tensor], condition: Any) -> None:
        self._run = run
        self._given = zeros_like(noises), zeros_like(condition)
        self._trace: Any = None
        self.replays = 0

    def capture(self, shape: object, steady: AbstractContextManager[None]) -> None:
        if self._trace is not None:
            return
        with steady:
            self._run(*self._given)
            self._trace = make_fx(lambda: self._run(*self._given))()

    def __call__(self, noises: list[Tensor], condition: Any) -> Tensor:
        mine, given = tensors_of(self._given), tensors_of((noises, condition))
        torch._foreach_copy_(list(mine), list(given))
        self.replays += 1
        clean: Tensor = self._trace()
        return clean


@pytest.mark.parametrize(
    ("name", "numbers", "chunks"), [("talker", FP8, 6), ("single latents", (), 8)]
)
def test_a_captured_step_serves_every_steady_step(
    name: str, numbers: tuple[str, ...], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot, positions, noise, text and speech are all read from the device, in two sessions."""
    eager = stream(denoiser(name, flags(*FUSED, *numbers)), chunks)
    monkeypatch.setattr(denoiser_module, "StepGraph", TracedStep)
    made_by = denoiser(name, flags(*FUSED, *numbers, "cuda_graphs"))
    for _ in range(2):
        found = stream(made_by, chunks)
        torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)
    graph: Any = made_by._graph
    assert graph.replays == 2 * (chunks - made_by.eager_steps) > 0


def test_a_step_whose_slot_python_knew_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where a slot is not read from the device."""
    eager = stream(denoiser("single latents", flags(*FUSED)), 8)
    monkeypatch.setattr(denoiser_module, "StepGraph", TracedStep)
    made_by = denoiser("single latents", flags(*FUSED, "cuda_graphs"))
    cache: Any = made_by._cache
    cache._writer.slot.fill_ = lambda _slot: None
    assert (stream(made_by, 8) - eager).abs().max() > 1e-2


def test_scales_belong_to_the_session() -> None:
    one = denoiser("chunks", flags(*FP8, *FUSED))
    first = stream(one, 3)
    for module in one._network.modules():
        if isinstance(module, Fp8Linear):
            module.largest_input.mul_(50)  # as after a loud session
    assert torch.equal(stream(one, 3), first)


def test_all_matrices_of_a_step_are_e4m3_and_text_is_not() -> None:
    dit: Any = copy.deepcopy(small_live_avatar.network(TALKER))
    for _ in range(2):
        Denoiser(dit, TALKER, flags("fp8_gemm"))
    converted = {name for name, module in dit.named_modules() if isinstance(module, Fp8Linear)}
    block = {"self_attn.qkv", "self_attn.o", "cross_attn.q", "cross_attn.o", "ffn.0", "ffn.2"}
    injector = {"attn.q", "attn.o"}
    assert converted == {f"blocks.{i}.{name}" for i in range(3) for name in block} | {
        f"injectors.{i}.{name}" for i in range(2) for name in injector
    }
    assert isinstance(dit, LiveAvatar)
    plain_dit = small_live_avatar.network(TALKER)
    for name in converted:
        fast: Any = dit.get_submodule(name)
        exact: Any = plain_dit.get_submodule(name)
        assert fast.weight.dtype == E4M3 and torch.equal(fast.bias, exact.bias)


@pytest.mark.parametrize("distance", ["growing", "constant"])
@pytest.mark.parametrize("kind", [PLAIN, Optimizations(ring_cache=False), flags(), flags(*FUSED)])
def test_a_stream_makes_no_tensor_on_the_host(kind: Optimizations, distance: str) -> None:
    model = small_causal_wan.causal_wan(
        causal_wan={"window_latents": 9, "sink_latents": 3, "sink_distance": distance}
    )
    cache = make_cache(model, kind, device="meta")
    shape = (1, model.video_tokens, model.num_heads, model.head_dim)
    q, k, v = (torch.zeros(shape, device="meta") for _ in range(3))
    with NothingOnTheHost():
        for _ in range(8):
            cache.begin_step()
            cache.attend(0, 0, q, k, v)
    assert not isinstance(cache, FusedCache) or cache.is_full


def test_a_chunk_that_wraps_is_refused_where_one_kernel_writes_it() -> None:
    uneven = ["optimizations.fused_pre_attention=true", "model.causal_wan.window_latents=20"]
    with pytest.raises(ConfigError, match="multiples of latents_per_chunk, 3"):
        load_config([CONFIGS / "self-forcing-1.3b.yaml"], uneven)
    with pytest.raises(ConfigError, match="less one that an image is"):
        load_config(
            [CONFIGS / "self-forcing-1.3b.yaml"], [uneven[0], "model.causal_wan.start=image"]
        )
    with pytest.raises(ValueError, match="slots in one run"):
        stream(denoiser("odd window", flags(*FUSED)), 3)


def test_sums_of_the_characters_own_block_are_refused() -> None:
    for flag in ("fused_gemm_all_reduce", "two_shot_all_reduce"):
        two = ["engine.tensor_parallel=2", f"optimizations.{flag}=true"]
        with pytest.raises(ConfigError, match=f"{flag}: not for family live_avatar"):
            load_config([CONFIGS / "live-avatar-14b.yaml"], two)


@pytest.mark.parametrize(
    "name", ["live-avatar-14b", "self-forcing-1.3b", "causal-forcing-1.3b", "longlive-5b"]
)
def test_the_shipped_files_take_every_flag(name: str) -> None:
    every = [f"optimizations.{flag}=true" for flag in (*FUSED, *FP8, "compile", "cuda_graphs")]
    config = load_config([CONFIGS / f"{name}.yaml"], every)
    assert config.optimizations.cuda_graphs
