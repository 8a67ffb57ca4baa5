"""What the doctor says of GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from characters_serve import doctor
from characters_serve.config import Config, load_config
from characters_serve.doctor import placement

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = CONFIGS / "characters-57b.yaml"
GIB = (106.7, 47.7)  # weights and cache of the production shape


@pytest.fixture(autouse=True)
def _no_meta_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_geometry counts the parameters; here their sum is enough."""
    monkeypatch.setattr(doctor, "rank_gib", lambda _config, ranks: (GIB[0] / ranks, GIB[1] / ranks))


def shape(name: str) -> Config:
    return load_config([MODEL, CONFIGS / name])


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
    assert placement(config, [gib] * gpus).good
    assert not placement(config, [gib] * (config.group_shape.gpus - 1)).good
    assert name in (CONFIGS / name).read_text(), "it says how it is started"


def test_what_would_be_given_up_is_said() -> None:
    config = shape("57b-4plus1.yaml")
    found = placement(config, [80.0] * 4)
    assert "engine.tensor_parallel=4 optimizations.dedicated_decoder=false" in found.words
    assert "decoding after each" in found.words
    assert "engine.tensor_parallel=2" in placement(config, [141.0] * 2).words
    assert "no split of it fits" in placement(config, [80.0]).words
    assert "here is no GPU" in placement(config, []).words


def test_a_group_on_a_cpu_asks_for_no_gpu() -> None:
    assert doctor._placement(load_config(overrides=["engine.device=cpu"])) == []
