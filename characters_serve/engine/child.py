"""In: a group's folder. Out: one computing process of it, served until told to leave.

What rank, decoder and pattern do alike: read the resolved configuration, connect to the parent,
and say Failed with a reason instead of dying silently. Knows nothing of models or media.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path

import zmq

from characters_serve import logs
from characters_serve.config import Config, ConfigError
from characters_serve.processes import ControlLink, read_config

log = logging.getLogger(__name__)

# The last word (ShutdownAck, Failed) must reach the parent before the process is gone. Data sockets
# linger for nobody: a decoder that died must not hold up its rank.
_LINGER_MS = 2000


def run_child(
    name: str, group_dir: Path, serve: Callable[[Config, Path, ControlLink], None]
) -> int:
    """Runs serve(config, group_dir, link) and returns the process's exit code.

    Closes every socket of the process; serve must leave the control channel open for a last word.
    """
    # Ctrl-C in a terminal reaches every process at once; the parent says when its children leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = ControlLink(group_dir, name)
    link.channel.socket.setsockopt(zmq.LINGER, _LINGER_MS)
    try:
        config = read_config(group_dir)
        logs.configure(config.server.log_format, process=f"{group_dir.name}/{name}")
        serve(config, group_dir, link)
        return 0
    except ConfigError as error:
        link.failed(str(error), permanent=True)
        return 1
    except Exception as error:
        log.exception("leaving")
        link.failed(f"{type(error).__name__}: {error}")
        return 1
    finally:
        zmq.Context.instance().destroy()
