"""`characters serve` whose hosts send media as aiortc does by itself: its sender reports, rates,
encoders and history. What the delivery's own are compared with; everything else is the same.

    python -m scripts.measurements.stock_server serve --set engine.kind=pattern

Started with --group-dir it is the host of one group.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def serve() -> int:
    from characters_serve import cli
    from characters_serve.gateway import app

    host_module = "scripts.measurements.stock_server"
    app.create_app = functools.partial(app.create_app, host_module=host_module)
    return cli.main()


def host() -> int:
    from characters_serve.session import host, peer

    def as_it_is(sender: Any, **_ours: Any) -> Any:
        sender.want_keyframe = sender._send_keyframe
        return sender

    def unchanged(*_parts: Any) -> None:
        pass

    ours = ("ask_for_arrivals", "hear_arrivals", "harden_transport", "shorten_jitter_buffer")
    vars(peer).update(dict.fromkeys(ours, unchanged), adopt_sender=as_it_is)
    return host.main()


if __name__ == "__main__":
    raise SystemExit(host() if "--group-dir" in sys.argv else serve())
