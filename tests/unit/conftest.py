"""A Ray cluster on this machine, for the tests that need one; without Ray they are skipped."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A head without GPUs, and nodes with four and two invented ones."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: the extra `ray`")
    from ray.cluster_utils import Cluster

    # Its workers inherit these: short, for the names of sockets.
    temporary = Path(tempfile.mkdtemp(prefix="rf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.chdir(ROOT)
        cluster = Cluster()
        for cpus, gpus in ((1, 0), (4, 4), (4, 2)):
            cluster.add_node(num_cpus=cpus, num_gpus=gpus, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(temporary)
