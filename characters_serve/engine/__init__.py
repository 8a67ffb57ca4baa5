"""The group's compute. Importing it sets what must be set before torch starts its threads.

Spinning OpenMP threads slowed the tiny model tenfold on two busy cores. And glibc gives a chunk's
large buffers back to the kernel at each free: page faults then cost a quarter of the decoding time
(70 to 80 ms a chunk; 54 to 57 with these settings, in one alternating run).
"""

import ctypes
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 1 << 20

_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
if _mallopt is not None:  # glibc only
    _mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # the largest that glibc takes
    _mallopt(_M_TRIM_THRESHOLD, 1024 * _MIB)
    _mallopt(_M_TOP_PAD, 64 * _MIB)
