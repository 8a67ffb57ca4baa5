"""In: a process. Out: what it takes of the machine, with all that it started."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds so far, of the processes and of everything else; and resident bytes."""

    cpu_s: float
    others_s: float
    resident: int


def usage(root: psutil.Process) -> Usage:
    """The time of what has ended is nobody's: ask while all of it still runs."""
    spent = psutil.cpu_times()
    busy_s = sum(spent) - spent.idle - spent.iowait - spent.guest - spent.guest_nice
    cpu_s, resident = 0.0, 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            cpu_s += used.user + used.system
            resident += process.memory_info().rss
    return Usage(cpu_s, busy_s - cpu_s, resident)
