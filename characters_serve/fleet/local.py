"""In: the groups that are wanted. Out: their session hosts, as processes of this machine.

Each runs in a folder of its own that ends with it. Knows nothing of leases and sessions.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from characters_serve.channels import endpoint
from characters_serve.config import Config, ConfigError
from characters_serve.fleet.base import Fleet
from characters_serve.fleet.group import HOST_MODULE, Launch
from characters_serve.fleet.layout import place_all, uniform_host
from characters_serve.fleet.leftovers import RUN_PREFIX, FolderHold, sweep
from characters_serve.messages import Message, Ready
from characters_serve.processes import ChildFailed, ChildProcess


class LocalHost:
    """A session host process and its folder."""

    def __init__(
        self,
        group_id: str,
        config: Config,
        run_dir: Path,
        on_message: Callable[[Message], Awaitable[None]],
        on_exit: Callable[[str], Awaitable[None]],
        *,
        host_module: str = HOST_MODULE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = run_dir / group_id
        # An earlier attempt, without a descriptor left to lock it, may have made it already.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hold = FolderHold(self._folder)
        try:
            (self._folder / "config.json").write_text(config.model_dump_json(indent=1))
            self._child = ChildProcess(
                "host",
                host_module,
                self._folder,
                environment=environment,
                on_message=on_message,
                on_exit=on_exit,
                ping_interval_s=config.fleet.ping_interval_s,
                ping_timeout_s=config.fleet.ping_timeout_s,
            )
        except Exception:  # a full disk
            self._clean()
            raise

    @property
    def pid(self) -> int | None:
        return self._child.pid

    async def start(self, timeout_s: float) -> Ready:
        try:
            return await self._child.start(timeout_s)
        except ChildFailed:
            self._clean()
            raise

    async def send(self, message: Message) -> None:
        await self._child.send(message)

    async def stop(self, reason: str, timeout_s: float) -> None:
        await self._child.stop(reason, timeout_s)
        self._clean()

    async def kill(self) -> None:
        await self._child.kill()
        self._clean()

    def _clean(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._hold.release()


class RunFolder:
    """Where the groups of this process have their folders; what dead ones left there goes."""

    def __init__(self, wanted: str | None) -> None:
        sweep(Path(wanted).resolve() if wanted else None)
        self.path = Path(wanted or tempfile.mkdtemp(prefix=RUN_PREFIX)).resolve()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._hold = None if wanted else FolderHold(self.path)

    def close(self) -> None:
        """A temporary one is removed."""
        if self._hold is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._hold.release()


def check_run_dir(run_dir: Path) -> None:
    """Can be written, and leaves sockets room for their short names; better told before anything
    starts than by a group."""
    try:
        endpoint(run_dir.resolve() / "g00-000000", "control-decoder")
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir).close()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"server.run_dir: {run_dir}: {error.strerror}") from None


class LocalFleet(Fleet):
    _run: RunFolder | None = None

    def _check(self) -> None:
        if self._config.decoder.shared_by > 1 and not self._config.fleet.gpus:
            raise ConfigError("decoder.shared_by: fleet.gpus must say what there is to share")
        if self._config.server.run_dir is not None:
            check_run_dir(Path(self._config.server.run_dir))

    def _open(self) -> None:
        self._run = RunFolder(self._config.server.run_dir)

    def _close(self) -> None:
        if self._run is not None:
            self._run.close()

    def _launcher(self, group_id: str, index: int) -> Launch:
        assert self._run is not None
        server = self._config.server
        # No group needs the server's own secrets.
        hidden = dict.fromkeys((server.api_key_env, server.turn_secret_env), "")
        run_dir, environment = self._run.path, {**hidden, **self._gpus_of(index)}
        return lambda on_message, on_exit: LocalHost(
            group_id,
            self._config,
            run_dir,
            on_message,
            on_exit,
            host_module=self._host_module,
            environment=environment,
        )

    def _gpus_of(self, index: int) -> dict[str, str]:
        """What the index-th group sees: its ranks' GPUs, then its decoder's."""
        fleet = self._config.fleet
        if not fleet.gpus:
            return {}
        host = uniform_host("this machine", fleet.gpus, fleet.nvlink_gpus)
        placement = place_all([host], self._config.group_shape, fleet.groups)[index]
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, placement.gpus))}
