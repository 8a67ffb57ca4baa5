"""In: the groups that are wanted. Out: their session hosts, each held by an actor in a Ray cluster.

The actor owns all GPUs of its group, on one node. Ray never restarts it: the pool rebuilds a group
whole. It starts the same host process as fleet/local.py does and passes its control messages on, a
few a second; media goes from the host straight to the browser, and nothing of a chunk goes through
Ray. Ray knows nodes and no NVLink: where a machine has several NVLink domains, run a node for each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from characters_serve.config import Config
from characters_serve.fleet.base import Fleet
from characters_serve.fleet.group import Launch
from characters_serve.fleet.layout import CannotPlace, GroupShape, Layout, uniform_host
from characters_serve.fleet.local import LocalHost, RunFolder
from characters_serve.messages import Failed, Message, Ready, decode, encode
from characters_serve.processes import ChildFailed, is_permanent

log = logging.getLogger(__name__)

PLACEMENT_POLL_S: Final = 0.5
CLEAN_S: Final = 2.0
# Set it for `ray start` on a node that clients reach at another address than its own.
PUBLIC_ADDRESS_ENV: Final = "CHARACTERS_PUBLIC_ADDRESS"

# A message of the host as it goes over the wire, or why the host is gone.
Letter = tuple[Literal["message"], list[bytes]] | tuple[Literal["gone"], str]


class HostActor:
    """On the group's node: one session host process. Its methods are called over Ray."""

    def __init__(self, group_id: str, config_json: str, host_module: str) -> None:
        self._group_id = group_id
        self._config = Config.model_validate_json(config_json)
        self._host_module = host_module
        self._letters: asyncio.Queue[Letter] = asyncio.Queue()
        self._run: RunFolder | None = None
        self._host: LocalHost | None = None

    async def start(self, timeout_s: float) -> list[bytes]:
        """Ready or Failed, encoded."""
        self._run = RunFolder(None)
        try:
            self._host = LocalHost(
                self._group_id,
                on_this_node(self._config),
                self._run.path,
                self._message,
                self._gone,
                host_module=self._host_module,
            )
            ready = await self._host.start(timeout_s)
        except (ChildFailed, OSError, ValueError) as error:
            self._clean()
            return encode(Failed("host", str(error), is_permanent(error)))
        node = {"node": ray.util.get_node_ip_address()}
        return encode(Ready(ready.process, ready.pid, {**ready.details, **node}))

    async def send(self, frames: list[bytes]) -> None:
        if self._host is not None:
            await self._host.send(decode(frames))

    async def receive(self, wait_s: float) -> list[Letter]:
        """What has come since the last call; waits for the first, but not longer than wait_s."""
        try:
            letters = [await asyncio.wait_for(self._letters.get(), wait_s)]
        except TimeoutError:
            return []
        while not self._letters.empty():
            letters.append(self._letters.get_nowait())
        return letters

    async def stop(self, reason: str, timeout_s: float) -> None:
        if self._host is not None:
            await self._host.stop(reason, timeout_s)
        self._clean()

    async def kill(self) -> None:
        if self._host is not None:
            await self._host.kill()
        self._clean()

    def _clean(self) -> None:
        if self._run is not None:
            self._run.close()

    async def _message(self, message: Message) -> None:
        self._letters.put_nowait(("message", encode(message)))

    async def _gone(self, reason: str) -> None:
        self._letters.put_nowait(("gone", reason))


class RayHost:
    """The gateway's end of one HostActor; lost with its node, it reports the group as gone."""

    def __init__(
        self,
        group_id: str,
        config: Config,
        host_module: str,
        on_message: Callable[[Message], Awaitable[None]],
        on_exit: Callable[[str], Awaitable[None]],
    ) -> None:
        self._group_id = group_id
        self._config = config
        self._host_module = host_module
        self._on_message = on_message
        self._on_exit = on_exit
        self._placement: Any = None
        self._actor: Any = None
        self._listener: asyncio.Task[None] | None = None
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        return self._pid

    async def start(self, timeout_s: float) -> Ready:
        deadline_s = time.monotonic() + timeout_s
        try:
            await self._place(deadline_s)
            self._actor = _actor_class(self._placement, gpus_of(self._config)).remote(
                self._group_id, self._config.model_dump_json(), self._host_module
            )
            async with asyncio.timeout(deadline_s - time.monotonic()):
                left_s = deadline_s - time.monotonic()
                answer = decode(await self._actor.start.remote(left_s))
        except TimeoutError:
            await self.kill()
            raise ChildFailed(f"host: not ready after {timeout_s:g} s") from None
        except RayError as error:
            await self.kill()
            raise ChildFailed(f"host: {_words(error)}") from error
        if not isinstance(answer, Ready):
            await self.kill()
            if isinstance(answer, Failed):
                raise ChildFailed(answer.reason, permanent=answer.permanent)
            raise ChildFailed(type(answer).__name__)
        self._pid = answer.pid
        self._listener = asyncio.create_task(self._listen(), name=f"{self._group_id}-listen")
        return answer

    async def send(self, message: Message) -> None:
        # Not awaited: Ray keeps the order, and a dead actor is noticed by the listener.
        self._actor.send.remote(encode(message))

    async def stop(self, reason: str, timeout_s: float) -> None:
        await self._silence()
        try:
            async with asyncio.timeout(2 * timeout_s + CLEAN_S):
                await self._actor.stop.remote(reason, timeout_s)
        except (TimeoutError, RayError) as error:
            log.warning("group %s did not stop: %s", self._group_id, _words(error))
        await self.kill()

    async def kill(self) -> None:
        await self._silence()
        actor, self._actor = self._actor, None
        if actor is not None:
            try:
                async with asyncio.timeout(CLEAN_S):
                    await actor.kill.remote()
            except (TimeoutError, RayError):
                log.info("the node of group %s is left as it is", self._group_id)
            await asyncio.to_thread(ray.kill, actor)
        placement, self._placement = self._placement, None
        if placement is not None:
            await asyncio.to_thread(remove_placement_group, placement)

    async def _place(self, deadline_s: float) -> None:
        """Reserves everything that the group needs, on one node."""
        gpus = gpus_of(self._config)
        bundle = {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 1.0}
        self._placement = placement_group([bundle], strategy="STRICT_PACK")
        while not await asyncio.to_thread(self._placement.wait, PLACEMENT_POLL_S):
            if time.monotonic() >= deadline_s:
                await self.kill()
                raise ChildFailed(f"host: {why_no_room(self._config.group_shape, gpus)}")

    async def _listen(self) -> None:
        """Asks for what the host says, and by that whether its node is still there."""
        fleet = self._config.fleet
        while True:
            try:
                async with asyncio.timeout(fleet.ping_interval_s + fleet.ping_timeout_s):
                    letters: list[Letter] = await self._actor.receive.remote(fleet.ping_interval_s)
            except TimeoutError:
                await self._on_exit(f"the node was silent for {fleet.ping_timeout_s:g} s")
                return
            except RayError as error:
                await self._on_exit(_words(error))
                return
            for letter in letters:
                if letter[0] == "gone":
                    await self._on_exit(letter[1])
                    return
                await self._on_message(decode(letter[1]))

    async def _silence(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None and listener is not asyncio.current_task():
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)


class RayFleet(Fleet):
    _ours = False

    def _check(self) -> None:
        """Which nodes there are is known once the cluster is joined; a group that has no room
        says so in its reason."""

    def _open(self) -> None:
        if not ray.is_initialized():
            # Else each client would report its use over the network.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                address=self._config.fleet.ray_address or "local",
                include_dashboard=False if self._config.fleet.ray_address is None else None,
                log_to_driver=False,
                configure_logging=False,
            )
            self._ours = True

    def _close(self) -> None:
        if self._ours:
            ray.shutdown()

    def _launcher(self, group_id: str, index: int) -> Launch:
        return lambda on_message, on_exit: RayHost(
            group_id, self._config, self._host_module, on_message, on_exit
        )


def gpus_of(config: Config) -> int:
    """What a group asks Ray for: its ranks and its decoder, or nothing where it runs on a CPU."""
    return config.group_shape.gpus if config.engine.device == "cuda" else 0


def on_this_node(config: Config) -> Config:
    """One configuration serves all nodes; what clients reach is each node's own.

    Raises ValueError when that is no address.
    """
    address = os.environ.get(PUBLIC_ADDRESS_ENV)
    if not address:
        return config
    settings = config.model_dump()
    settings["delivery"]["public_address"] = address
    return Config.model_validate(settings)


def why_no_room(shape: GroupShape, gpus: int) -> str:
    """In words, from the nodes that there are."""
    if not gpus:
        return "no node has a free processor"
    alive = [node for node in ray.nodes() if node["Alive"]]
    hosts = [
        uniform_host(node["NodeManagerAddress"], count, count)
        for node in alive
        if (count := int(node["Resources"].get("GPU", 0)))
    ]
    try:
        Layout(hosts).place(shape)
    except CannotPlace as error:
        return str(error)
    return f"a group of {shape} needs {gpus} GPUs of one node, and all such nodes are taken"


def _actor_class(placement: Any, gpus: int) -> Any:
    return ray.remote(HostActor).options(
        num_cpus=1,
        num_gpus=gpus,
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement, 0),
    )


def _words(error: BaseException) -> str:
    """Ray's messages run over many lines."""
    first = str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
    return f"{type(error).__name__}: {first}"
