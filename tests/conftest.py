"""Without a GPU the Triton kernels run in Triton's interpreter, which must be told at import."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
