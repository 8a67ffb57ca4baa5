"""In: the TURN servers' addresses and a shared secret. Out: what a browser needs to use them.

Credentials are made as coturn's `use-auth-secret` reads them: they name when they expire and are
good for one session's length, so nothing has to be stored or renewed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from characters_serve.config import ConfigError, ServerConfig, secret


class Turn:
    def __init__(self, urls: tuple[str, ...], secret: str) -> None:
        self._urls = urls
        self._secret = secret.encode()

    @classmethod
    def from_config(cls, config: ServerConfig) -> Turn:
        shared = secret(config.turn_secret_env)
        if config.turn_urls and not shared:
            raise ConfigError(
                f"server.turn_urls: {config.turn_secret_env} must hold the secret that the TURN "
                "servers share"
            )
        return cls(config.turn_urls, shared)

    def ice_servers(self, now_unix_s: float, lifetime_s: float) -> list[dict[str, Any]]:
        """RTCIceServer entries; lifetime_s: a credential that expires ends its relay."""
        if not self._urls:
            return []
        username = f"{int(now_unix_s + lifetime_s)}:characters"
        # SHA-1 is what TURN servers check; it signs, it hides nothing.
        digest = hmac.new(self._secret, username.encode(), hashlib.sha1).digest()
        credential = base64.b64encode(digest).decode()
        return [{"urls": list(self._urls), "username": username, "credential": credential}]
