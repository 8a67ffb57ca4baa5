"""In: the number of groups wanted. Out: groups running as processes of this machine, and leases.

Starts them, rebuilds a dead one with back-off, cleans one between sessions, stops them all.
Knows nothing of HTTP; what a session is to its user is the session manager's business.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from characters_serve.channels import endpoint
from characters_serve.config import Config, ConfigError
from characters_serve.fleet.group import HOST_MODULE, Group, GroupGone, RequestRefused
from characters_serve.fleet.leftovers import RUN_PREFIX, FolderHold, sweep
from characters_serve.fleet.pool import Lease, Pool
from characters_serve.messages import HostMetrics, SessionState
from characters_serve.processes import ChildFailed

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
# A group that served this long before it died starts again with the shortest back-off.
STEADY_S = 60.0
SWEEP_INTERVAL_S = 1.0


class LeaseLost(RuntimeError):
    """The group of this lease is gone or has moved on."""


def _check_socket_room(run_dir: Path) -> None:
    """Sockets have short names only; better told before anything starts than by a group."""
    try:
        endpoint(run_dir.resolve() / "g00-000000", "control-decoder")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def next_backoff(backoff_s: float, lived_s: float) -> float:
    if lived_s >= STEADY_S:
        return FIRST_BACKOFF_S
    return min(backoff_s * 2, LONGEST_BACKOFF_S)


class LocalFleet:
    def __init__(
        self,
        config: Config,
        *,
        on_state: Callable[[Lease, SessionState], None],
        on_lost: Callable[[Lease, str], None],
        on_gone: Callable[[str, str], None],
        on_metrics: Callable[[str, HostMetrics], None],
        on_ready: Callable[[str, dict[str, str]], None],
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
        self._host_module = host_module
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._run_dir: Path | None = None
        self._hold: FolderHold | None = None
        if config.server.run_dir is not None:
            _check_socket_room(Path(config.server.run_dir))

    def start(self) -> None:
        """Begins to start the groups; the pool tells when they are ready."""
        wanted = self._config.server.run_dir
        sweep(Path(wanted).resolve() if wanted else None)
        self._run_dir = Path(wanted or tempfile.mkdtemp(prefix=RUN_PREFIX)).resolve()
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not wanted:
            self._hold = FolderHold(self._run_dir)
        for index in range(self._config.fleet.groups):
            group_id = f"g{index}-{secrets.token_hex(3)}"
            self.pool.add(group_id)
            self._keepers.append(asyncio.create_task(self._keep(group_id), name=group_id))
        self._spawn(self._sweep())

    async def stop(self, reason: str) -> None:
        self.pool.drain()
        tasks = [*self._keepers, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(group.stop(reason) for group in self._groups.values()))
        self._groups.clear()
        if self._run_dir is not None and self._config.server.run_dir is None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
        if self._hold is not None:
            self._hold.release()

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

    async def discard(self, lease: Lease, reason: str) -> None:
        """A group that cannot be trusted goes, with its session; its keeper rebuilds it."""
        if self.pool.holds(lease) and lease.group_id in self._groups:
            await self._groups[lease.group_id].discard(reason)

    # ------------------------------------------------------------ groups

    async def _keep(self, group_id: str) -> None:
        """Keeps one group running for as long as the fleet runs."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            ended: asyncio.Event = asyncio.Event()
            started_s = self._clock()
            try:
                await self._run_once(group_id, ended)
            except (ChildFailed, OSError) as error:
                log.error("group %s: %s", group_id, error)
                self._lose(group_id, str(error))
            except Exception as error:  # a bug must cost one group one life, not its keeper
                log.exception("group %s", group_id)
                self._lose(group_id, f"{type(error).__name__}: {error}")
            backoff_s = next_backoff(backoff_s, self._clock() - started_s)
            log.info("group %s is rebuilt in %.1f s", group_id, backoff_s)
            await asyncio.sleep(backoff_s)
            self.pool.add(group_id)

    async def _run_once(self, group_id: str, ended: asyncio.Event) -> None:
        async def on_exit(reason: str) -> None:
            self._lose(group_id, reason)
            ended.set()

        assert self._run_dir is not None
        group = Group(
            group_id,
            self._config,
            self._run_dir,
            on_state=lambda state: self._state(group_id, state),
            on_metrics=lambda metrics: self._on_metrics(group_id, metrics),
            on_exit=on_exit,
            on_warming=lambda: self.pool.warming(group_id),
            host_module=self._host_module,
        )
        details = await group.start()
        self._groups[group_id] = group
        degraded = details.get("degraded", "")
        self.pool.started(group_id, degraded)
        log.info("group %s is ready (pid %s)", group_id, group.pid)
        if degraded:
            log.warning("group %s serves, but cannot keep its rate: %s", group_id, degraded)
        self._on_ready(group_id, details)
        await self._announce()
        await ended.wait()
        await group.kill(self.pool.reasons().get(group_id, "gone"))
        self._groups.pop(group_id, None)

    def _lose(self, group_id: str, reason: str) -> None:
        lease = self.pool.fail(group_id, reason)
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
