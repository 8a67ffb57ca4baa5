"""The configuration: the files say what the code says, and every mistake names its field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from characters_serve.config import Config, ConfigError, load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def keys_of(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in tree.items():
        found |= keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return found


def test_tiny_is_the_defaults_written_out() -> None:
    assert load_config([CONFIGS / "tiny.yaml"]) == Config()
    written = yaml.safe_load((CONFIGS / "tiny.yaml").read_text())
    assert keys_of(written) == keys_of(Config().model_dump())


def test_plain_turns_every_optimisation_off() -> None:
    plain = load_config([CONFIGS / "tiny.yaml", CONFIGS / "plain.yaml"])
    assert not any(plain.optimizations.model_dump().values())
    written = yaml.safe_load((CONFIGS / "plain.yaml").read_text())
    assert keys_of(written) == keys_of({"optimizations": Config().optimizations.model_dump()})
    assert plain.model == Config().model


def test_the_57b_geometry_has_the_published_numbers() -> None:
    model = load_config([CONFIGS / "characters-57b.yaml"]).model
    assert (model.grid_rows, model.grid_columns) == (22, 34)
    assert model.video_tokens == 748 and model.tokens_per_chunk == 757
    assert (model.reference_rows, model.reference_columns) == (11, 17)
    assert model.prefix_slots == 489 and model.cache_slots == 5788
    assert model.all_reduces_per_step == 240
    assert model.num_blocks * model.num_caches == 240
    assert model.chunk_period_s == pytest.approx(0.16667, abs=1e-4)
    assert model.voice_samples_per_chunk == 8000
    assert model.weights == "synthetic"


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_file_is_valid_and_survives_a_round_trip(name: str) -> None:
    config = load_config([CONFIGS / name])
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("57b-*.yaml")))
def test_a_layout_is_of_its_model_also_alone(name: str) -> None:
    model = CONFIGS / "characters-57b.yaml"
    alone = load_config([CONFIGS / name])
    assert alone.model == load_config([model]).model
    assert alone == load_config([model, CONFIGS / name])


def test_a_file_goes_over_what_it_extends(tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text("server: {port: 1, host: 127.0.0.2}")
    (tmp_path / "mid.yaml").write_text("extends: low.yaml\nserver: {port: 2}")
    (tmp_path / "top.yaml").write_text("extends: mid.yaml\nfleet: {groups: 3}")
    config = load_config([tmp_path / "top.yaml"], ["fleet.groups=4"])
    assert (config.server.host, config.server.port, config.fleet.groups) == ("127.0.0.2", 2, 4)
    for name, text, says in (
        ("low.yaml", "extends: top.yaml", "extends: expected another file"),
        ("mid.yaml", "extends: none.yaml", "none.yaml"),
        ("mid.yaml", "extends: [low.yaml]", "mid.yaml: extends: expected"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=re.escape(says)):
            load_config([tmp_path / "top.yaml"])


def test_later_files_and_overrides_win() -> None:
    config = load_config(
        [CONFIGS / "tiny.yaml", CONFIGS / "plain.yaml"],
        ["server.port=9000", "optimizations.write_time_rope=true", "model.name=mine"],
    )
    assert config.server.port == 9000 and config.model.name == "mine"
    assert config.optimizations.write_time_rope and not config.optimizations.ring_cache


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("server.prot=1", "server.prot"),
        ("sever.port=1", "sever"),
        ("server.port=70000", "server.port"),
        ("server.port=eighty", "server.port"),
        ("server=1", "server"),
        ("model.width=0", "model.width"),
        ("model.width=390", "width must be a multiple"),
        ("model.height=250", "height must be a multiple"),
        ("model.rope_split=[24,20,21]", "rope_split"),
        ("model.rope_split=[24,20,22]", "rope_split"),
        ("model.audio.hop=333", "audio.hop"),
        ("model.fps=7", "audio.hop"),
        ("model.noise_levels=[0.5,1.0]", "noise_levels"),
        ("model.noise_levels=[1.0,0.0]", "noise_levels"),
        ("model.noise_levels=[]", "noise_levels"),
        ("model.prompt_slots=4", "prompt_slots and prompt_dim"),
        ("model.cache_policy=none", "model.cache_policy"),
        ("optimizations.write_time_rope=false", "ring_cache needs write_time_rope"),
        ("engine.passes=5", "engine.passes must lie between 2 and 4"),
        ("engine.passes=1", "engine.passes"),
        ("engine={passes: 2, degraded_passes: 3}", "engine.degraded_passes must lie between 2"),
        ("engine={passes: 2, idle_passes: 3}", "engine.idle_passes must lie between 2 and 2"),
        ("engine.degraded_passes=5", "engine.degraded_passes"),
        ("engine.degraded_passes=1", "engine.degraded_passes"),
        ("engine.idle_passes=5", "engine.idle_passes"),
        ("model.cache_policy=per_pass", "engine.degraded_passes must be 4"),
        ("engine.device=tpu", "engine.device"),
        ("delivery={video_min_kbps: 2000, video_start_kbps: 1200}", "video_min_kbps"),
        ("delivery.playout_chunks=5", "delivery.playout_chunks"),
        ("session.max_duration_s=-1", "session.max_duration_s"),
        ("fleet.groups=0", "fleet.groups"),
        ("fleet={gpus: 1, groups: 1}", "a group of 1 rank and a decoder needs 2 GPUs"),
        ("fleet={gpus: 8, groups: 5}", "4 of 5 groups have room"),
        ("fleet={gpus: 8, groups: 4, nvlink_gpus: 3}", "3 of 4 groups have room"),
        ("fleet={engine: ray, gpus: 8}", "Ray deals out the GPUs"),
        ("decoder.shared_by=0", "decoder.shared_by"),
        ("server.queue_size=-1", "server.queue_size"),
        ("server.allowed_origins=everyone", "server.allowed_origins"),
        ("server.port", "expected a.b=value"),
        ("=1", "expected a.b=value"),
        ("server.port=[", "--set server.port=["),
        ("server={port: 1, port: 2}", "port is given twice"),
        ("session.max_duration_s=.inf", "session.max_duration_s"),
        ("model.audio.f_min=.nan", "model.audio.f_min"),
        ("server.drain_s=1e999", "server.drain_s"),
    ],
)
def test_a_mistake_names_its_field(override: str, says: str) -> None:
    four_levels = "model.noise_levels=[1.0,0.75,0.5,0.25]"
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[four_levels, override])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["agent.kind=external"], "its sound would go through Ray"),
        (["decoder.shared_by=2"], "under fleet.engine=ray a group owns its GPUs"),
    ],
)
def test_what_ray_cannot_carry_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(overrides=["fleet.engine=ray", *overrides])


def test_a_captured_step_has_all_passes() -> None:
    captured = ["engine.device=cuda", "optimizations.fused_pre_attention=true"]
    captured.append("model.noise_levels=[1.0,0.75,0.5,0.25]")
    load_config(overrides=[*captured, "optimizations.cuda_graphs=true"])
    with pytest.raises(ConfigError, match=r"cuda_graphs captures 4 passes: engine\.passes is not"):
        load_config(overrides=[*captured, "optimizations.cuda_graphs=true", "engine.passes=2"])


def test_a_shared_decoder_must_be_one() -> None:
    with pytest.raises(ConfigError, match=r"decoder\.shared_by needs"):
        load_config(overrides=["decoder.shared_by=2", "optimizations.dedicated_decoder=false"])


def test_the_groups_of_a_machine_fit_its_gpus() -> None:
    wanted = ["engine.tensor_parallel=3", "fleet.groups=2"]
    load_config(overrides=[*wanted, "fleet.gpus=8"])
    load_config(overrides=[*wanted, "fleet.gpus=7", "decoder.shared_by=2"])
    with pytest.raises(ConfigError, match="1 of 2 groups have room"):
        load_config(overrides=[*wanted, "fleet.gpus=7"])


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config([tmp_path / "nowhere.yaml"])
    broken = tmp_path / "broken.yaml"
    for content, says in (
        (b"a: [", "line 1"),
        (b"- a list", "expected a mapping"),
        (b"just words", "expected a mapping"),
        (b"# nothing", "expected a mapping"),
        (b"\xff\xfe\x00", "codec"),
        (b"server:\n\tport: 1", "line 2"),
        (b"server: {}\nfleet: {}\nserver: {}", "server is given twice"),
        (b"server: {port: 1}\n---\nserver: {}", "another document"),
        (b"server: {? [a, b] : 1}", "unhashable key"),
        (b"server: !!python/name:os.system", "python/name"),
    ):
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"broken\.yaml: (?s:.*){says}"):
            load_config([broken])


def test_a_config_cannot_be_edited() -> None:
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.server.port = 1  # type: ignore[misc]
