"""docker/: the files parse, and every path, port, flag and metric that they name exists.

No image is built and no cluster is asked. Prometheus' own tool and Kubernetes' own schemas are
asked where they are installed: `apt install prometheus`, `pip install kubernetes-validate`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from characters_serve import cli
from characters_serve.config import Config, load_config
from characters_serve.gateway.app import create_app
from characters_serve.messages import GpuMemory
from characters_serve.metrics import Metrics
from characters_serve.session.counters import Counters
from scripts import dockerfile_in_chroot as dockerfile
from tests.unit.test_gateway_serve import connect, reach, server

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
_METRIC = re.compile(r"\bcharacters_[a-z0-9_]+")
_REGISTRY = re.compile(r"^[^/]+\.[^/]+/|^localhost[:/]|^[^/]+:\d+/")


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((DOCKER / name).read_text()) if document]


def kubernetes(kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents("kubernetes.yaml") if document["kind"] == kind)
    return found


def container() -> dict[str, Any]:
    (only,) = kubernetes("Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(only)


def routes() -> set[str]:
    return {getattr(route, "path", "") for route in create_app(Config()).routes}


def config_of(arguments: list[str]) -> Config:
    """What the command line of an image or a container means; the image's paths are the tree's."""
    options = cli._parser().parse_args(arguments)
    assert options.command is cli.serve
    paths = [ROOT / path.relative_to("/app") for path in options.config]
    return load_config(paths, options.set)


# ---------------------------------------------------------------- metrics


def expressions() -> dict[str, str]:
    dashboard = json.loads((DOCKER / "grafana-dashboard.json").read_text())
    found = {
        f"dashboard {panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    for group in documents("alerts.yaml")[0]["groups"]:
        found |= {f"alert {rule['alert']}": rule["expr"] for rule in group["rules"]}
    return found


def test_every_expression_is_balanced_and_names_a_metric() -> None:
    for where, expression in expressions().items():
        assert _METRIC.search(expression), where
        for pair in ("()", "{}", "[]"):
            assert expression.count(pair[0]) == expression.count(pair[1]), where
        assert expression.count('"') % 2 == 0, where


def test_alerts_say_what_to_look_at() -> None:
    (group,) = documents("alerts.yaml")[0]["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    assert set(rules) == {
        *("NoReadyGroup", "ChunkWatchdog", "SlowSessions", "LateChunks", "RebuildLoop"),
        *("SlowGroup", "DeclinedSteps", "ClampedValues", "GpuMemoryGrows"),
    }
    for rule in rules.values():
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]


async def test_every_metric_that_they_name_is_exported_by_a_live_server(tmp_path: Path) -> None:
    async with server(tmp_path) as running, httpx.AsyncClient(base_url=running.url) as http:
        session, peer = await connect(http)
        await reach(http, session, "live")
        text = ""
        async with asyncio.timeout(20):
            while "characters_video_kbps{" not in text or "characters_rtt_ms{" not in text:
                await asyncio.sleep(0.1)
                text = (await http.get("/metrics")).text
        await peer.close()
    # A group on GPUs reports one thing more.
    on_gpu, counters = Metrics(sessions_by_state=dict, groups_by_state=dict, tasks=int), Counters()
    counters.engine(GpuMemory("rank0", 80 * 10**9))
    on_gpu.absorb("g0", counters.take())
    text += on_gpu.render().decode()
    exported = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            exported |= {name, *(f"{name}_{end}" for end in ("bucket", "count", "sum"))}
            assert kind in ("counter", "gauge", "histogram")
    named = {name for expr in expressions().values() for name in _METRIC.findall(expr)}
    assert len(named) > 20 and named - exported == set()


def promtool(kind: str, path: Path, content: dict[str, Any]) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    path.write_text(yaml.safe_dump(content))
    done = subprocess.run([program, *kind.split(), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"expression:{number}", "expr": expression}
        for number, expression in enumerate(expressions().values())
    ]
    content = {"groups": [{"name": "all", "rules": rules}]}
    promtool("check rules", tmp_path / "rules.yaml", content)


@pytest.mark.parametrize(
    ("alert", "series", "fires"),
    [
        ("DeclinedSteps", {"rank_steps_total": "0+360x60", "eager_steps_total": "0+180x60"}, True),
        ("DeclinedSteps", {"rank_steps_total": "0+360x60", "eager_steps_total": "0+18x60"}, False),
        (
            "ClampedValues",
            {"rank_steps_total": "0+360x60", "fp8_saturated_total": "0+9e3x60"},
            True,
        ),
        ("ClampedValues", {"rank_steps_total": "0+360x60", "fp8_saturated_total": "0x60"}, False),
        ("GpuMemoryGrows", {"gpu_memory_bytes": "90e9x20 92e9x40"}, True),
        ("GpuMemoryGrows", {"gpu_memory_bytes": "92e9x20 90e9x40"}, False),
    ],
)
def test_an_alert_about_ranks_fires_when_it_should(
    tmp_path: Path, alert: str, series: dict[str, str], fires: bool
) -> None:
    """In Prometheus' own test of rules: a value a minute, asked after 50 minutes."""
    labels = '{group="g0-a1b2c3",instance="server:8080",process="rank1"}'
    given = [
        {"series": f"characters_{name}{labels}", "values": values}
        for name, values in series.items()
    ]
    expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    expected = [{"labels": "{}", "value": 1}] if fires else []
    asked = {"expr": expression, "eval_time": "50m", "exp_samples": expected}
    test = {"interval": "1m", "input_series": given, "promql_expr_test": [asked]}
    content = {"rule_files": [str(DOCKER / "alerts.yaml")], "tests": [test]}
    promtool("test rules", tmp_path / "test.yaml", content)


# ---------------------------------------------------------------- the image


def instructions() -> list[tuple[str, str]]:
    return dockerfile.instructions((DOCKER / "Dockerfile").read_text())


def test_the_image_is_built_from_what_is_here() -> None:
    copied = [
        source
        for word, rest in instructions()
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert {"pyproject.toml", "characters_serve", "kernels", "configs"} <= set(copied)
    let_in = (ROOT / ".dockerignore").read_text().splitlines()
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in let_in, f"{source} is not let into the build"


def test_the_image_has_pinned_bases_a_plain_user_and_a_probe() -> None:
    words = {word for word, _ in instructions()}
    assert words == {
        *("ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE"),
        *("HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"),
    }
    settings = [rest for word, rest in instructions() if word == "ARG" and "=" in rest]
    arguments = dict(setting.split("=", 1) for setting in settings)
    for word, rest in instructions():
        if word == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], rest.split()[0])
            assert not _REGISTRY.match(image), "no registry"
            assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[\w.-]*", image), image
    user = [rest for word, rest in instructions() if word == "USER"][-1]
    assert user.split(":")[0].isdigit() and user.split(":")[0] != "0"
    probe = next(rest for word, rest in instructions() if word == "HEALTHCHECK")
    (path,) = re.findall(r"127\.0\.0\.1:8080(/[a-z/]+)", probe)
    assert path in routes()
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH := {arguments['TORCH']}" in makefile, "one torch, said twice"


def test_the_image_starts_with_settings_that_exist() -> None:
    last = {word: rest for word, rest in instructions()}
    assert json.loads(last["ENTRYPOINT"])[-1] == "characters"
    config = config_of(json.loads(last["CMD"]))
    assert config.server.host == "0.0.0.0" and not config.server.allow_keyless
    assert last["EXPOSE"] == f"{config.server.port}/tcp"


def test_shell_steps_are_whole() -> None:
    for word, rest in instructions():
        if word == "RUN":
            assert shlex.split(rest), rest


# ---------------------------------------------------------------- compose


def test_compose_has_the_four_and_what_they_mount() -> None:
    services = documents("compose.yaml")[0]["services"]
    assert set(services) == {"server", "coturn", "prometheus", "grafana"}
    for name, service in services.items():
        image = service["image"]
        assert re.search(r":v?\d+\.\d+\.\d+", image) and not _REGISTRY.match(image), name
        for volume in service.get("volumes", []):
            assert (DOCKER / volume.split(":")[0]).is_file(), volume
    build = services["server"]["build"]
    assert (DOCKER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_compose_starts_the_server_with_settings_that_exist() -> None:
    services = documents("compose.yaml")[0]["services"]
    command = [
        re.sub(r"\$\{TURN_HOST[^}]*\}", "192.0.2.1", a) for a in services["server"]["command"]
    ]
    config = config_of(command)
    assert config.server.turn_urls == ("turn:192.0.2.1:3478",)
    assert "3478:3478/udp" in services["coturn"]["ports"]
    assert {config.server.api_key_env, config.server.turn_secret_env} == set(
        services["server"]["environment"]
    )
    grace_s = int(services["server"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.server.drain_s + config.fleet.stop_timeout_s
    scrape = documents("prometheus.yaml")[0]["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == [f"server:{config.server.port}"]
    assert scrape["metrics_path"] in routes()
    assert documents("prometheus.yaml")[0]["rule_files"] == ["alerts.yaml"]
    provider = documents("grafana-folder.yaml")[0]["providers"][0]["options"]["path"]
    assert any(f":{provider}/" in volume for volume in services["grafana"]["volumes"])
    source = documents("grafana-datasource.yaml")[0]["datasources"][0]
    dashboard = json.loads((DOCKER / "grafana-dashboard.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}


def test_the_relay_reaches_the_server_alone_and_has_quotas() -> None:
    compose = documents("compose.yaml")[0]
    address = compose["services"]["server"]["networks"]["default"]["ipv4_address"]
    (subnet,) = compose["networks"]["default"]["ipam"]["config"]
    assert ipaddress.ip_address(address) in ipaddress.ip_network(subnet["subnet"])
    command = compose["services"]["coturn"]["command"]
    denied = [word.split("=", 1)[1] for word in command if word.startswith("--denied-peer-ip=")]
    for version, ends in ((4, denied[0]), (6, denied[1])):
        first, last = (ipaddress.ip_address(end) for end in ends.split("-"))
        assert first.version == version and int(first) == 0
        assert int(last) == 2**first.max_prefixlen - 1
    allowed = [word for word in command if word.startswith("--allowed-peer-ip=")]
    assert allowed == [f"--allowed-peer-ip={address}"]
    assert "--use-auth-secret" in command and "--no-multicast-peers" in command
    for quota in ("user-quota", "total-quota", "max-bps"):
        assert any(re.fullmatch(rf"--{quota}=[1-9]\d*", word) for word in command), quota


# ---------------------------------------------------------------- Kubernetes


def test_kubernetes_has_what_it_needs() -> None:
    kinds = [document["kind"] for document in documents("kubernetes.yaml")]
    assert sorted(kinds) == ["Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"]
    for document in documents("kubernetes.yaml"):
        assert document["apiVersion"] and document["metadata"]["name"] == "characters"
    labels = kubernetes("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert kubernetes("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert kubernetes("Service")["spec"]["selector"] == labels
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert kubernetes(kind)["spec"][key]["matchLabels"] == labels
    assert not _REGISTRY.match(container()["image"])


def test_a_pod_has_one_group_and_time_for_its_conversation() -> None:
    config = config_of(container()["args"])
    assert config.fleet.groups == 1
    pod = kubernetes("Deployment")["spec"]["template"]["spec"]
    longest_s = config.session.max_duration_s + config.server.drain_s
    assert pod["terminationGracePeriodSeconds"] >= longest_s
    assert config.server.drain_s >= config.session.max_duration_s
    assert container()["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]


def test_probes_ports_and_secrets_exist() -> None:
    config = config_of(container()["args"])
    (port,) = container()["ports"]
    assert port["containerPort"] == config.server.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container()[probe]["httpGet"]
        assert get["path"] in routes() and get["port"] == port["name"]
    assert container()["livenessProbe"]["httpGet"]["path"] == "/healthz/live", (
        "draining is no fault"
    )
    startup = container()["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= config.engine.ready_timeout_s
    assert [entry["name"] for entry in container()["env"]] == [config.server.api_key_env]
    service_port = kubernetes("Service")["spec"]["ports"][0]
    assert service_port["targetPort"] == port["name"]
    annotations = kubernetes("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in routes()
    assert annotations["prometheus.io/port"] == str(config.server.port)


def test_pods_run_as_nobody_in_particular() -> None:
    pod = kubernetes("Deployment")["spec"]["template"]["spec"]
    user = [rest for word, rest in instructions() if word == "USER"][-1].split(":")[0]
    assert pod["securityContext"]["runAsNonRoot"]
    assert str(pod["securityContext"]["runAsUser"]) == user
    security = container()["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["name"] for mount in container()["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_network_policy_lets_the_api_and_media_in() -> None:
    rules = [
        port for rule in kubernetes("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]
    ]
    assert {"protocol": "TCP", "port": container()["ports"][0]["containerPort"]} in rules
    assert any(rule["protocol"] == "UDP" and rule["endPort"] == 65535 for rule in rules)


def test_the_manifests_fit_the_published_schemas() -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    job, service = documents("kuberay.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    for document in (*documents("kubernetes.yaml"), service, *pods):
        schemas.validate(document, schemas.latest_version(), strict=True)


def test_a_ray_worker_has_the_gpus_of_one_group() -> None:
    job, service = documents("kuberay.yaml")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[0] == "characters"
    config = config_of(words[1:])
    assert config.fleet.engine == "ray" and config.fleet.ray_address == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == config.fleet.groups
    longest_s = config.session.max_duration_s + config.server.drain_s
    user = [rest for word, rest in instructions() if word == "USER"][-1].split(":")[0]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= longest_s
        assert str(pod["securityContext"]["runAsUser"]) == user
    (worker,) = workers["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == config.group_shape.gpus
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["ports"][0]["containerPort"] == config.server.port
    assert head["readinessProbe"]["httpGet"]["path"] in routes()
    assert service["spec"]["selector"]["app"] == job["metadata"]["labels"]["app"]
    extras = re.findall(r"EXTRAS=(\w+)", (DOCKER / "kuberay.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras == ["ray"] and "ray" in project["optional-dependencies"]


def test_the_guide_names_what_exists() -> None:
    guide = (DOCKER / "README.md").read_text()
    for name in re.findall(r"`([\w-]+\.(?:yaml|json))`", guide):
        assert (DOCKER / name).is_file(), name
    for setting in re.findall(r"--set ([a-z_.]+=[\w/]+)", guide):
        load_config(overrides=[setting])
    alerts = {rule["alert"] for rule in documents("alerts.yaml")[0]["groups"][0]["rules"]}
    assert {"ChunkWatchdog", "RebuildLoop"} <= alerts
    named = set(_METRIC.findall(guide))
    drawn = {name for expression in expressions().values() for name in _METRIC.findall(expression)}
    assert named and named <= drawn


@pytest.mark.parametrize("name", sorted(path.name for path in DOCKER.iterdir()))
def test_no_file_names_a_registry(name: str) -> None:
    text = (DOCKER / name).read_text()
    for line in re.findall(r"(?:image|FROM|index-url)[:= ]+(\S+)", text):
        assert not _REGISTRY.match(line), line
