"""The ranks of one group as each of them sees it: sums over all, and what rank 0 orders.

In: partial sums, and rank 0's packed steps. Out: their sum on every rank, and the steps on the
others. torch.distributed carries them: NCCL between GPUs, gloo between CPUs and for the orders, so
that a rank reads an order without waiting for its GPU. The ranks find each other through a file in
the group's folder, on one machine. Knows nothing of models, sessions or sockets of the project.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from characters_serve.config import ConfigError, EngineConfig

# Whoever supervises the group sees the rank that died at once, and its word names the culprit;
# the ranks that only miss it keep theirs back for that long.
PEER_LOST_S: Final = 2.0

_NO_MULTICAST: Final = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class PeerLost(RuntimeError):
    """A rank of the group is gone, or did not come in time."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A piece of this rank's GPU that the others read and write, and theirs, mapped here.

    region: (bytes,) uint8, zeros at first. addresses: of all ranks' regions, in their order, as
    this process sees them. multicast: the address of all of them at once, or 0. handle: keeps the
    others' mapped.
    """

    region: Tensor
    addresses: list[int]
    multicast: int
    handle: object


class Order(IntEnum):
    """What all ranks do next. Rank 0 decides; the others would not agree on which came first, a
    step or a message of the host.

    IDLE: nothing, but rank 0 lives. STEP: the step in the packed tensor. MESSAGE: the next message
    that the host has sent to each.
    """

    IDLE = 0
    STEP = 1
    MESSAGE = 2


class Ranks:
    """One rank's end of the group. A group of one talks to nobody.

    On CPUs a rank that is missed raises PeerLost; on GPUs NCCL's watchdog ends the process.
    """

    def __init__(self, engine: EngineConfig, folder: Path, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.size = engine.tensor_parallel
        self._path = folder / "ranks.store"
        self._device = device
        self._ready_timeout = timedelta(seconds=engine.ready_timeout_s)
        self.timeout_s = engine.rank_timeout_s

    @property
    def group_name(self) -> str:
        """What torch's own collectives on shared memory know the joined group by."""
        return _all_ranks().group_name

    def join(self) -> None:
        """Waits until every rank has come here. Loading takes minutes, and not the same on each;
        only after it does the short timeout hold."""
        if self.size == 1:
            return
        store = FileStore(str(self._path), self.size)
        store.set(f"here-{self.rank}", "yes")
        # Without it gloo looks up the machine's name, which a container may not know.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        on_gpu = self._device.type == "cuda"
        with peers():
            store.wait([f"here-{rank}" for rank in range(self.size)], self._ready_timeout)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.timeout_s),
                device_id=self._device if on_gpu else None,
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, made in place, with the same bits on each."""
        if self.size > 1:
            with peers():
                dist.all_reduce(x)
        return x

    def share(self, size: int, *, multicast: bool = False) -> SharedMemory:
        """Memory of `size` bytes on each rank's GPU, for all of them; every rank calls this, after
        `join`. RuntimeError where multicast is wanted and cannot be had; else none is set up."""
        # torch's symmetric memory is for GPUs; ranks on CPUs do not load it.
        from torch.distributed import _symmetric_memory as symmetric_memory

        if multicast:
            _refuse_forbidden_multicast()
        else:
            os.environ[_NO_MULTICAST] = "1"
        with peers():
            region = symmetric_memory.empty(size, dtype=torch.uint8, device=self._device)
            handle = symmetric_memory.rendezvous(region, _all_ranks())
            region.zero_()
            torch.cuda.synchronize(self._device)
            dist.all_reduce(torch.zeros(1))  # over gloo: every region is zeros now
        if multicast and not handle.multicast_ptr:
            raise ConfigError(
                "optimizations.in_switch_reduction needs multicast, which these GPUs do not have"
            )
        return SharedMemory(region, list(handle.buffer_ptrs), handle.multicast_ptr, handle)

    def give(self, order: Order, packed: Tensor) -> None:
        """Rank 0: the order, with all of `packed` (on the host), to every other rank."""
        if self.size > 1:
            packed[0] = order
            with peers():
                dist.broadcast(packed, src=0)

    def take(self, packed: Tensor) -> Order:
        """Any other rank: waits for rank 0's next order, and receives its `packed`."""
        with peers():
            dist.broadcast(packed, src=0)
        return Order(int(packed[0]))

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def _all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("the ranks have not joined")
    return group


def _refuse_forbidden_multicast() -> None:
    switches = {_NO_MULTICAST: "1", "NCCL_NVLS_ENABLE": "0"}
    off = [f"{name}={value}" for name, value in switches.items() if os.environ.get(name) == value]
    if off:
        raise ConfigError(
            f"optimizations.in_switch_reduction needs multicast, and it is forbidden: {off[0]}"
        )


@contextmanager
def peers() -> Iterator[None]:
    """What fails within has missed a rank: PeerLost."""
    try:
        yield
    except RuntimeError as error:
        time.sleep(PEER_LOST_S)
        raise PeerLost(f"another rank of the group is gone or late: {error}") from error
