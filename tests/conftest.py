"""What must be set before torch and Triton are imported."""

from __future__ import annotations

import os
from pathlib import Path

# The tests' small layers are slower on two threads, and 20 times slower beside another process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # Without a GPU the Triton kernels run in Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
