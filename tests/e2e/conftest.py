"""The servers that the tests share, each checked after its last test; and what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.rig import Measure, Server, running_server

HERE = Path(__file__).parent

_measured: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("e2e")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _measured:
        terminalreporter.section("measured")
        for line in _measured:
            terminalreporter.write_line(line)


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Measure:
    """Keeps a figure for the summary of the run."""

    def keep(name: str, value: object) -> None:
        _measured.append(f"{request.node.name}: {name} = {value}")

    return keep


@pytest.fixture(scope="module")
def pattern_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The test picture and nobody to talk to: all that delivery needs, and little work."""
    with running_server(
        tmp_path_factory.mktemp("p"),
        "engine.kind=pattern",
        "agent.kind=none",
        "session.reconnect_grace_s=3",
    ) as server:
        yield server


@pytest.fixture
def pattern(pattern_server: Server) -> Server:
    return pattern_server.when_free()
