"""Without a GPU the Triton kernels run in Triton's interpreter, which must be told at import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small layers are slower on two threads, and far slower when another process runs."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
