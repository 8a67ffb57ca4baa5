"""The decoders of the public video latents, against what their authors' own code computes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from characters_serve.model.decoders.stream import StreamState
from characters_serve.model.decoders.taehv import TAEHV, PixelShuffle2x
from characters_serve.model.decoders.wan21 import wan21_vae
from characters_serve.model.decoders.wan22 import wan22_vae
from characters_serve.model.decoders.wan_fused import fuse
from characters_serve.model.decoders.wan_layers import WanVAE, norm_silu_after_past
from tests.parity import FOLDER, Recording, inputs

# Some times what float32 and float64 differ by in the authors' code; values reach 3.

ATOL = 2e-5

PUBLISHED: dict[str, Callable[[], WanVAE | TAEHV]] = {
    "wan21_vae": wan21_vae,
    "wan22_vae": wan22_vae,
    "taew2_1": lambda: TAEHV("taew2_1"),
    "taew2_2": lambda: TAEHV("taew2_2"),
    "taew2_2_super": lambda: TAEHV("taew2_2_super"),
}
# The Wan networks were recorded at a smaller width, TAEHV's at the published one.
RECORDED = PUBLISHED | {"wan21_vae": lambda: wan21_vae(4), "wan22_vae": lambda: wan22_vae(4, 4)}
KEPT_FRAMES = {"wan21_vae": range(9), "taew2_1": range(9), "wan22_vae": (0, 1, 4, 5, 8)}
NAMES = list(PUBLISHED)
WAN = ["wan21_vae", "wan22_vae"]
# One of each kind, where the others would say the same.
KINDS = [*WAN, "taew2_1"]


@functools.cache
def recording(name: str) -> Recording:
    return Recording(name)


@functools.cache
def network(name: str) -> WanVAE | TAEHV:
    made = RECORDED[name]().eval().requires_grad_(False)
    recording(name).fill(made)
    return made


def latents_of(name: str) -> Tensor:
    """Three latents."""
    match name:
        case "wan21_vae":
            return 2 * inputs((1, 3, 3, 2, 16), seed=121)
        case "wan22_vae":
            return 2 * inputs((1, 3, 2, 2, 48), seed=122)
    return recording(name)["latents"]


def video_of(name: str) -> Tensor:
    match name:
        case "wan21_vae":
            return inputs((1, 9, 24, 16, 3), seed=221)
        case "wan22_vae":
            return inputs((1, 9, 32, 32, 3), seed=222)
    return recording(name)["input"]


def close(got: Tensor, expected: Tensor, atol: float = ATOL) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("chunks", [[3], [1, 1, 1], [1, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_frames_are_the_authors(name: str, chunks: list[int]) -> None:
    state = StreamState()
    latents = torch.split(latents_of(name), chunks, dim=1)
    parts = [network(name).decode(part, state) for part in latents]
    assert [part.shape[1] for part in parts] == [4 * chunks[0] - 3, *(4 * n for n in chunks[1:])]
    frames = torch.cat(parts, dim=1)
    close(frames[:, list(KEPT_FRAMES.get(name, (0, 1, 4, 8)))], recording(name)["frames"])


@pytest.mark.parametrize("name", KINDS)
def test_latents_are_the_authors(name: str) -> None:
    close(network(name).encode(video_of(name), StreamState()), recording(name)["encoded"])


@pytest.mark.parametrize("name", WAN)
def test_encoding_may_be_streamed(name: str) -> None:
    state = StreamState()
    video = torch.split(video_of(name), [5, 4], dim=1)
    parts = [network(name).encode(part, state) for part in video]
    close(torch.cat(parts, dim=1), recording(name)["encoded"])


@pytest.mark.parametrize("name", WAN)
@pytest.mark.parametrize(("frames", "started"), [(4, False), (5, True), (0, False)])
def test_other_numbers_of_frames_are_refused(name: str, frames: int, started: bool) -> None:
    state = StreamState()
    if started:
        network(name).encode(video_of(name)[:, :1], state)
    with pytest.raises(ValueError, match=f"^{frames} frames are not"):
        network(name).encode(video_of(name)[:, :frames], state)


@pytest.mark.parametrize("name", KINDS)
def test_a_cleared_state_remembers_nothing(name: str) -> None:
    vae, latents, state = network(name), latents_of(name), StreamState()
    first = vae.decode(latents, state)
    on = vae.decode(latents, state)
    assert on.shape[1] == 12 and (on[:, 3:] - first).abs().max() > 1e-2
    state.clear()
    assert torch.equal(vae.decode(latents, state), first)


@pytest.mark.parametrize("name", KINDS)
def test_streams_do_not_meet(name: str) -> None:
    vae, one = network(name), latents_of(name)
    other = one.flip(1)
    states = StreamState(), StreamState()
    for index in range(3):
        together = [
            vae.decode(latents[:, index : index + 1], state)
            for latents, state in zip((one, other), states, strict=True)
        ]
    alone = vae.decode(other, StreamState())
    close(together[1], alone[:, -4:])
    assert (together[0] - together[1]).abs().max() > 1e-2


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_is_its_streams(name: str) -> None:
    vae, latents = network(name), latents_of(name)
    both = vae.decode(torch.cat([latents, latents.flip(1)]), StreamState())
    close(both[:1], vae.decode(latents, StreamState()))
    close(both[1:], vae.decode(latents.flip(1), StreamState()))


@pytest.mark.parametrize("name", KINDS)
def test_the_state_stays_where_it_is(name: str) -> None:
    """A captured decode reads and writes the same addresses for ever."""
    vae, latents, state = network(name), latents_of(name), StreamState()
    vae.decode(latents[:, :2], state)
    places = {layer: past.data_ptr() for layer, past in state._past.items()}
    size = state.num_bytes
    vae.decode(latents[:, 2:], state)
    state.clear()
    vae.decode(latents, state)
    assert {layer: past.data_ptr() for layer, past in state._past.items()} == places
    assert state.num_bytes == size


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_the_published_files(name: str) -> None:
    with torch.device("meta"):
        state = PUBLISHED[name]().state_dict()
    published = json.loads((FOLDER / "checkpoint_keys.json").read_text())[name]
    assert {key: list(value.shape) for key, value in state.items()} == published


@pytest.mark.parametrize(
    ("name", "latent", "frame", "values"),
    [
        ("wan21_vae", (60, 104, 16), (480, 832), 944e6),
        ("wan22_vae", (44, 68, 48), (704, 1088), 1367e6),
        ("taew2_2", (44, 68, 48), (704, 1088), 16.1e6),
    ],
)
def test_published_sizes(
    name: str, latent: tuple[int, ...], frame: tuple[int, ...], values: float
) -> None:
    """On the meta device: what a stream remembers at full size, and the size of its frames."""
    state = StreamState()
    with torch.device("meta"):
        vae = PUBLISHED[name]().bfloat16()
        frames = vae.decode(torch.zeros(1, 2, *latent, dtype=torch.bfloat16), state)
    assert frames.shape == (1, 5, *frame, 3)
    assert state.num_bytes / 2 == pytest.approx(values, rel=5e-3)


@pytest.mark.parametrize("name", KINDS)
def test_bf16_stays_near_float32(name: str) -> None:
    half = RECORDED[name]().eval().requires_grad_(False)
    recording(name).fill(half)
    frames = half.bfloat16().decode(latents_of(name).bfloat16(), StreamState())
    assert frames.dtype == torch.bfloat16
    exact = network(name).decode(latents_of(name), StreamState())
    error, spread = (frames.float() - exact).abs(), exact.std()
    # The authors' code: 0.013 to 0.015 of the frames' spread on average, 0.14 at most.
    assert error.mean() < 0.03 * spread and error.max() < 0.3 * spread


def test_norm_and_silu_after_the_past() -> None:
    """The function that a fused kernel stands for, against its plain words."""
    x, past, gamma = inputs((2, 3, 4, 5, 6), 1), inputs((2, 2, 4, 5, 6), 2), inputs((6, 1, 1, 1), 3)
    expected = functional.silu(functional.normalize(x, dim=-1) * 6**0.5 * gamma.flatten())
    before = past.clone()
    padded = norm_silu_after_past(past, x, gamma)
    close(padded, torch.cat([before, expected], dim=1), atol=1e-6)
    assert torch.equal(past, padded[:, -2:])
    one_frame = norm_silu_after_past(past, x[:, :1], gamma)
    assert torch.equal(past, torch.cat([padded[:, -1:], one_frame[:, -1:]], dim=1))


def test_pixel_shuffle_is_torchs() -> None:
    x = inputs((1, 2, 3, 4, 12), 1)
    expected = functional.pixel_shuffle(x.movedim(-1, 2), 2).movedim(2, -1)
    assert torch.equal(PixelShuffle2x()(x), expected)
    tae, pixels, seen = TAEHV("taew2_2", dim=4), inputs((1, 4, 16, 16, 3), 2), []
    tae.encoder[0].register_forward_pre_hook(lambda _layer, entered: seen.append(entered[0]))
    with torch.no_grad():
        tae.encode(pixels, StreamState())
    assert torch.equal(PixelShuffle2x()(seen[0]), pixels)


@functools.cache
def fused(name: str, dtype: torch.dtype = torch.float32) -> WanVAE:
    made = RECORDED[name]().eval().requires_grad_(False)
    recording(name).fill(made)
    made = made.to(dtype)
    assert isinstance(made, WanVAE)
    fuse(made)
    return made


@pytest.mark.parametrize("chunks", [[3], [1, 1, 1], [1, 2]], ids=str)
@pytest.mark.parametrize("name", WAN)
def test_the_fast_path_gives_the_authors_frames(name: str, chunks: list[int]) -> None:
    state = StreamState()
    parts = [
        fused(name).decode(part, state) for part in torch.split(latents_of(name), chunks, dim=1)
    ]
    frames = torch.cat(parts, dim=1)
    close(frames[:, list(KEPT_FRAMES[name])], recording(name)["frames"])


@pytest.mark.parametrize("name", WAN)
def test_the_fast_path_errs_no_more_than_the_plain_one_in_bf16(name: str) -> None:
    plain = RECORDED[name]().eval().requires_grad_(False)
    recording(name).fill(plain)
    latents = latents_of(name)
    exact = network(name).decode(latents, StreamState())

    def error(vae: WanVAE | TAEHV) -> float:
        found = vae.decode(latents.bfloat16(), StreamState()).float()
        return float((found - exact).norm())

    assert error(fused(name, torch.bfloat16)) <= 1.2 * error(plain.bfloat16())


def test_the_fast_path_reads_and_writes_the_plain_paths_state() -> None:
    name, latents = "wan22_vae", latents_of("wan22_vae")
    plain, fast = StreamState(), StreamState()
    expected = network(name).decode(latents, plain)
    frames = fused(name).decode(latents, fast)
    places = [past.data_ptr() for past in fast._past.values()]
    assert fast.num_bytes == plain.num_bytes
    fast.clear()
    assert torch.equal(fused(name).decode(latents, fast), frames)
    assert [past.data_ptr() for past in fast._past.values()] == places
    close(frames, expected)


def test_the_fast_path_decodes_one_stream() -> None:
    with pytest.raises(ValueError, match="one stream, not 2"):
        fused("wan22_vae").decode(latents_of("wan22_vae").expand(2, -1, -1, -1, -1), StreamState())
