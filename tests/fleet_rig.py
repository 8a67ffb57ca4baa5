"""What the tests of fleets share: one that runs on fake hosts, and what it has told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from characters_serve.config import Config, load_config
from characters_serve.fleet.base import Fleet
from characters_serve.fleet.pool import Lease
from characters_serve.gateway.service import fleet_class
from characters_serve.messages import HostMetrics, Persona, SessionState
from tests.waiting import until

FAKE_HOST = "tests.fake_host"


def fleet_config(run_dir: Path, *overrides: str) -> Config:
    return load_config(
        overrides=[
            f"server.run_dir={run_dir}",
            "engine.ready_timeout_s=20",
            "fleet.stop_timeout_s=2",
            "fleet.ping_interval_s=0.1",
            "fleet.ping_timeout_s=1",
            "model.width=96",
            "model.height=64",
            *overrides,
        ]
    )


def persona(instructions: str = "") -> Persona:
    return Persona("Ada", "Hi", {}, [], instructions)


IMAGE = bytes(96 * 64 * 3)


class Heard:
    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.lost: list[str] = []
        self.gone: list[str] = []
        self.ready: list[dict[str, str]] = []
        self.metrics = 0
        self.mistakes: list[str] = []

    def on_state(self, _lease: Lease, state: SessionState) -> None:
        self.states.append((state.session_id, state.state))

    def on_lost(self, lease: Lease, _reason: str) -> None:
        self.lost.append(lease.session_id)

    def on_gone(self, group_id: str, _reason: str) -> None:
        self.gone.append(group_id)

    def on_metrics(self, _group: str, _report: HostMetrics) -> None:
        self.metrics += 1

    def on_ready(self, _group: str, details: dict[str, str]) -> None:
        self.ready.append(details)


@asynccontextmanager
async def running(
    config: Config, host_module: str = FAKE_HOST
) -> AsyncIterator[tuple[Fleet, Heard]]:
    heard = Heard()
    fleet = fleet_class(config)(
        config,
        on_state=heard.on_state,
        on_lost=heard.on_lost,
        on_gone=heard.on_gone,
        on_metrics=heard.on_metrics,
        on_ready=heard.on_ready,
        on_misconfigured=heard.mistakes.append,
        host_module=host_module,
    )
    fleet.start()
    try:
        yield fleet, heard
    finally:
        await fleet.stop("test over")


async def leased(fleet: Fleet, session_id: str = "s1", instructions: str = "") -> Lease:
    await until(lambda: fleet.pool.counts()["ready"])
    lease = await fleet.reserve(session_id, 0)
    assert lease is not None
    await fleet.group(lease).open_session(session_id, IMAGE, persona(instructions), 1, 60)
    assert fleet.pool.attach(lease)
    return lease


def environment_of(pid: int | None) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def is_alive(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()
