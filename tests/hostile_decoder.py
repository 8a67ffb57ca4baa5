"""A picture's process whose decoder does what a hostile file might make it do."""

from __future__ import annotations

import ctypes
import os
import socket
import sys

from characters_serve.gateway.image_process import main


def attempt(data: bytes, width: int, height: int) -> bytes:
    match data:
        case b"crash":
            ctypes.string_at(0)
        case b"bomb":
            bytearray(4 * 1024**3)
        case b"loop":
            while True:
                pass
        case b"read":
            open("/etc/hostname").close()
        case b"connect":
            socket.socket().close()
        case b"secret":
            return os.environ["CHARACTERS_API_KEY"].encode()
    return bytes(width * height * 3)


if __name__ == "__main__":
    sys.exit(main(attempt))
