"""In: the number of groups wanted. Out: groups that run, and leases of them.

Starts them, rebuilds a dead one with back-off, cleans one between sessions, stops them all; on
which machine their processes run is a subclass's business. Knows nothing of HTTP; what a session
is to its user is the session manager's business.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine

from characters_serve.config import Config
from characters_serve.fleet.group import HOST_MODULE, Group, GroupGone, Launch, RequestRefused
from characters_serve.fleet.pool import Lease, Pool
from characters_serve.messages import HostMetrics, SessionState
from characters_serve.processes import ChildFailed, is_permanent

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 1.0


class LeaseLost(RuntimeError):
    """The group of this lease is gone or has moved on."""


class Fleet(ABC):
    def __init__(
        self,
        config: Config,
        *,
        on_state: Callable[[Lease, SessionState], None],
        on_lost: Callable[[Lease, str], None],
        on_gone: Callable[[str, str], None],
        on_metrics: Callable[[str, HostMetrics], None],
        on_ready: Callable[[str, dict[str, str]], None],
        on_misconfigured: Callable[[str], None],
        on_free: Callable[[], None] = lambda: None,
        host_module: str = HOST_MODULE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = Pool(config.fleet.reserve_ttl_s)
        self._config = config
        self._on_state = on_state
        self._on_lost = on_lost
        self._on_gone = on_gone
        self._on_metrics = on_metrics
        self._on_ready = on_ready
        self._on_misconfigured = on_misconfigured
        self._on_free = on_free
        self._host_module = host_module
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._has_served = False
        self._keepers: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._check()

    @abstractmethod
    def _launcher(self, group_id: str, index: int) -> Launch:
        """How the host process of the index-th group is started."""

    @abstractmethod
    def _check(self) -> None:
        """Raises ConfigError for a configuration that cannot be run."""

    @abstractmethod
    def _open(self) -> None:
        """Before the first group starts; raises when none can."""

    @abstractmethod
    def _close(self) -> None:
        """After the last group is gone."""

    def start(self) -> None:
        """Begins to start the groups; the pool tells when they are ready."""
        self._open()
        for index in range(self._config.fleet.groups):
            group_id = f"g{index}-{secrets.token_hex(3)}"
            self.pool.add(group_id, self._clock())
            self._keepers.append(asyncio.create_task(self._keep(group_id, index), name=group_id))
        self._spawn(self._sweep())

    async def stop(self, reason: str) -> None:
        self.pool.drain()
        tasks = [*self._keepers, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(group.stop(reason) for group in self._groups.values()))
        self._groups.clear()
        self._close()

    # ------------------------------------------------------------ leases

    async def reserve(self, session_id: str, wait_s: float) -> Lease | None:
        """A free group at once; one that is being cleaned is waited for, a held one is not."""
        deadline_s = self._clock() + wait_s
        while True:
            lease = self.pool.reserve(session_id, self._clock())
            left_s = deadline_s - self._clock()
            if lease is not None or left_s <= 0 or not self.pool.counts()["resetting"]:
                return lease
            try:
                async with asyncio.timeout(left_s), self._changed:
                    await self._changed.wait()
            except TimeoutError:
                continue

    def group(self, lease: Lease) -> Group:
        if not self.pool.holds(lease) or lease.group_id not in self._groups:
            raise LeaseLost(f"{lease.group_id} no longer holds this session")
        return self._groups[lease.group_id]

    def release(
        self, lease: Lease, reason: str, after: asyncio.Event | None = None
    ) -> asyncio.Task[None] | None:
        """Ends the session on its host and makes the group free again; harmless when repeated."""
        if not self.pool.release(lease):
            return None
        return self._spawn(self._reset(lease, reason, after))

    async def _reset(self, lease: Lease, reason: str, after: asyncio.Event | None) -> None:
        if after is not None:
            await after.wait()
        group = self._groups.get(lease.group_id)
        if group is None:
            return  # it died in the meantime: pool.fail has taken the lease
        try:
            await group.close_session(lease.session_id, reason)
        except RequestRefused as error:
            if error.status != 404:  # 404: the host had already ended it by itself
                await group.discard(f"{group.group_id} cannot be cleaned: {error.reason}")
                return
        except GroupGone as error:
            await group.discard(str(error))
            return
        self.pool.reset_done(lease)
        await self._announce()
        self._on_free()

    async def discard(self, lease: Lease, reason: str) -> None:
        """A group that cannot be trusted goes, with its session; its keeper rebuilds it."""
        if self.pool.holds(lease) and lease.group_id in self._groups:
            await self._groups[lease.group_id].discard(reason)

    # ------------------------------------------------------------ groups

    async def _keep(self, group_id: str, index: int) -> None:
        """Keeps one group running for as long as the fleet runs.

        Unless the configuration is wrong. What has served was right once, so it is tried again:
        files that are gone may come back, and other groups still serve.
        """
        while True:
            try:
                await self._run_once(group_id, index)
            except (ChildFailed, OSError) as error:
                self._lose(group_id, str(error))
                if is_permanent(error) and not self._has_served:
                    self._on_misconfigured(str(error))
                    return
                log.error("group %s: %s", group_id, error)
            except Exception as error:  # a bug must cost one group one life, not its keeper
                log.exception("group %s", group_id)
                self._lose(group_id, f"{type(error).__name__}: {error}")
            backoff_s = self.pool.backoff_s(group_id)
            log.info("group %s is rebuilt in %.1f s", group_id, backoff_s)
            await asyncio.sleep(backoff_s)
            self.pool.add(group_id, self._clock())

    async def _run_once(self, group_id: str, index: int) -> None:
        ended = asyncio.Event()

        async def on_exit(reason: str) -> None:
            self._lose(group_id, reason)
            ended.set()

        group = Group(
            group_id,
            self._config,
            self._launcher(group_id, index),
            on_state=lambda state: self._state(group_id, state),
            on_metrics=lambda metrics: self._on_metrics(group_id, metrics),
            on_exit=on_exit,
            on_warming=lambda: self.pool.warming(group_id),
        )
        details = await group.start()
        self._groups[group_id] = group
        try:
            self._has_served = True
            degraded = details.get("degraded", "")
            self.pool.started(group_id, degraded)
            log.info("group %s is ready (pid %s)", group_id, group.pid)
            if degraded:
                log.warning("group %s serves, but cannot keep its rate: %s", group_id, degraded)
            self._on_ready(group_id, details)
            await self._announce()
            self._on_free()
            await ended.wait()
        except Exception:
            await group.kill("a mistake of the gateway")
            raise
        await group.kill(self.pool.reasons().get(group_id, "gone"))
        self._groups.pop(group_id, None)

    def _lose(self, group_id: str, reason: str) -> None:
        lease = self.pool.fail(group_id, reason, self._clock())
        self._on_gone(group_id, reason)
        if lease is not None:
            self._on_lost(lease, reason)
        self._spawn(self._announce())

    def _state(self, group_id: str, state: SessionState) -> None:
        """Passes on what a host says about the session it holds; about any other it is ignored."""
        lease = self.pool.lease_of(group_id)
        if lease is not None and lease.session_id == state.session_id:
            self._on_state(lease, state)

    async def _sweep(self) -> None:
        """Takes back reservations that nothing came of."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            for lease in self.pool.expired(self._clock()):
                log.warning("reservation of group %s expired", lease.group_id)
                self._on_lost(lease, "the reservation expired")
                self.release(lease, "the reservation expired")

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
