"""How tests start `characters serve`, and where it says that it listens."""

from __future__ import annotations

import re
import sys


def serve_command(*settings: str, module: str = "characters_serve.cli") -> list[str]:
    given = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", module, "serve", *given]


def address_in(said: str) -> str:
    found = re.search(r"http://\S+:\d+", said)
    assert found is not None, said
    return found[0]
