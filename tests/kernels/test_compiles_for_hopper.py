"""The kernels compile for the GPUs they are for, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from characters_kernels.triton_jit import INSTALLED

# Of one thread block on sm_90.
SHARED_MEMORY_LIMIT = 227 * 1024
KERNELS = 13


@pytest.mark.skipif(not INSTALLED, reason="needs Triton")
def test_every_kernel_compiles_for_sm_90_and_fits_its_shared_memory(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_for_hopper.py")
    ran = subprocess.run(
        [sys.executable, script],
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": str(Path(__file__).parents[2] / "kernels"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    shared = {name: int(size) for name, size, _ in lines}
    assert len(shared) == KERNELS
    assert max(shared.values()) <= SHARED_MEMORY_LIMIT, shared
    # What runs by default never touches NVLink's multicast.
    in_switch = [name for name, _, multicast in lines if int(multicast)]
    assert in_switch == ["_gemm_all_reduce_kernel.in_switch"]
