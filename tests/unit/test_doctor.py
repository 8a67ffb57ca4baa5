"""What the doctor says of GPUs that are not here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from characters_serve import doctor
from characters_serve.config import Config, load_config
from characters_serve.doctor import placement, rank_memory

CONFIGS = Path(__file__).parents[2] / "configs"


def shape(name: str) -> Config:
    return load_config([CONFIGS / name])


@pytest.mark.parametrize(
    ("name", "gpus", "gib", "groups"),
    [
        ("57b-4plus1.yaml", 5, 80.0, 1),
        ("57b-3plus1.yaml", 4, 80.0, 1),
        ("57b-two-groups.yaml", 8, 80.0, 2),
        ("57b-3-large.yaml", 3, 180.0, 1),
    ],
)
def test_each_layout_fits_the_gpus_that_it_is_for(
    name: str, gpus: int, gib: float, groups: int
) -> None:
    config = shape(name)
    assert config.fleet.gpus == gpus and config.fleet.groups == groups
    assert groups * config.group_shape.gpus == gpus
    found = placement(config, [gib] * gpus)
    assert found.good
    text = (CONFIGS / name).read_text()
    assert name in text, "it says how it is started"
    weights, _, cache = re.findall(r"(\d+\.\d) (?:GiB|while)", found.words)
    assert f"A rank holds {float(weights):.0f} GiB of weights" in text
    assert f"{float(cache):.0f} GiB of cache" in text


def test_what_would_be_given_up_is_said() -> None:
    config = shape("57b-4plus1.yaml")
    four = placement(config, [80.0] * 4).words
    kept = "with engine.tensor_parallel=3 it fits, at the price of longer steps"
    given_up = (
        "with engine.tensor_parallel=4 optimizations.dedicated_decoder=false it fits, at the price "
        "of decoding after each step"
    )
    assert four.endswith(f"here is 4 x 80 GiB: {kept}; {given_up}")
    # 72 heads are dealt to seven as well.
    assert "engine.tensor_parallel=7 it fits, at the price of more GPUs" in (
        placement(config, [30.0] * 8).words
    )
    assert placement(config, [80.0]).words.endswith("1 x 80 GiB: no split of it fits")
    nothing = placement(config, [])
    assert nothing.words.endswith("no GPU: no split of it fits") and not nothing.good


def test_an_open_models_memory_is_its_own() -> None:
    config = load_config([CONFIGS / "live-avatar-14b.yaml"], ["model.weights=/somewhere"])
    memory, rank = doctor._model_memory(config), rank_memory(config, 1)
    assert f"{rank.weights / 1e9:.0f} GB of weights" in memory.words
    assert f"{rank.weights / 1024**3:.1f} GiB of weights" in placement(config, [80.0] * 2).words


def test_gpus_without_fp8_are_told_what_to_turn_off() -> None:
    config = shape("57b-3-large.yaml")
    (finding,) = doctor.without_fp8(config, (8, 0))
    assert "optimizations.fp8_gemm=false it runs" in finding.words and not finding.good
    assert doctor.without_fp8(config, (8, 9)) == doctor.without_fp8(load_config(), (8, 0)) == []


def test_a_group_on_a_cpu_asks_for_no_gpu() -> None:
    assert doctor._placement(load_config(overrides=["engine.device=cpu"])) == []
