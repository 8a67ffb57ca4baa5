"""In: an uploaded file's bytes. Out: RGB rows of the model's size, decoded in a process of its own.

Decoders are C code that reads what strangers send. Here they run in a child that lives for one
picture, with little memory and time, no file or socket to open, and none of the server's secrets in
its environment: a bomb or a crash ends the child, and the upload is refused. Knows no session.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Final

from characters_serve.gateway.images import ImageError, load_reference

MODULE: Final = __name__
# The largest picture that is accepted takes 300 MB and 1.5 s.
MEMORY_BYTES: Final = 1024**3
CPU_S: Final = 10
WALL_S: Final = 20.0
REFUSED: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_STANDARD_STREAMS: Final = 3
_PASSED_ON: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


async def decode(data: bytes, width: int, height: int, *, module: str = MODULE) -> bytes:
    """Packed RGB, height x width x 3; raises ImageError with words for the picture's owner."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, str(width), str(height)),
        env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(WALL_S):
            rgb, _ = await process.communicate(data)
    except TimeoutError:
        raise ImageError("the image takes too long to decode") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == REFUSED:
        raise ImageError(rgb.decode())
    if process.returncode == -signal.SIGXCPU:
        raise ImageError("the image takes too long to decode")
    if process.returncode != 0 or len(rgb) != width * height * 3:
        raise ImageError("the image is damaged: no decoder survives it")
    return rgb


def confine() -> None:
    """What this process may use from now on; nothing lifts it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for limit, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_NOFILE, _STANDARD_STREAMS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


def main(load: Callable[[bytes, int, int], bytes] = load_reference) -> int:
    """The child: a picture on standard input, its rows or a reason on standard output."""
    width, height = int(sys.argv[1]), int(sys.argv[2])
    data = sys.stdin.buffer.read()
    confine()
    try:
        answer, code = load(data, width, height), 0
    except ImageError as error:
        answer, code = str(error).encode(), REFUSED
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
