"""In: headers. Out: who may do what. Knows no session's state.

The server key creates sessions; a browser only ever holds a client secret, a token that is good
for one session and ends with it. The signing key is drawn anew by each process.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
from dataclasses import dataclass
from urllib.parse import urlsplit

import jwt
from starlette.datastructures import Headers

from characters_serve.config import ConfigError, ServerConfig
from characters_serve.gateway.problems import Problem

_ALGORITHM = "HS256"
_AUDIENCE = "characters-serve"
_SCOPE = "session"


@dataclass(frozen=True, slots=True)
class ClientSecret:
    value: str
    expires_at: int


class Authority:
    def __init__(self, server_key: str | None) -> None:
        self._server_key = server_key
        self._signing_key = secrets.token_bytes(32)

    @classmethod
    def from_config(cls, config: ServerConfig) -> Authority:
        return cls(os.environ.get(config.api_key_env) or None)

    @property
    def key_required(self) -> bool:
        return self._server_key is not None

    def issue(self, session_id: str, now_unix_s: float, lifetime_s: float) -> ClientSecret:
        expires_at = int(now_unix_s + lifetime_s)
        claims = {
            "sub": session_id,
            "aud": _AUDIENCE,
            "scope": _SCOPE,
            "iat": int(now_unix_s),
            "exp": expires_at,
            "jti": secrets.token_hex(8),
        }
        return ClientSecret(jwt.encode(claims, self._signing_key, _ALGORITHM), expires_at)

    def check_may_create(self, headers: Headers) -> None:
        if self._server_key is None:
            return
        if not self._is_server_key(bearer(headers)):
            raise _unauthorized("creating a session needs the server key")

    def check_may_use(self, session_id: str, token: str | None, now_unix_s: float) -> None:
        """The secret of this very session, or the server key; another session's reads as 404."""
        if token is None:
            raise _unauthorized("the session's client secret is needed")
        if self._is_server_key(token):
            return
        try:
            claims = jwt.decode(
                token,
                self._signing_key,
                [_ALGORITHM],
                audience=_AUDIENCE,
                options={
                    "require": ["sub", "exp", "aud", "scope"],
                    "verify_exp": False,  # against the caller's clock, below
                    "verify_iat": False,
                },
            )
        except jwt.InvalidTokenError:
            raise _unauthorized("the client secret is not valid") from None
        if claims["exp"] <= now_unix_s or claims["scope"] != _SCOPE:
            raise _unauthorized("the client secret has expired")
        if claims["sub"] != session_id:
            raise Problem(404, "no such session")

    def _is_server_key(self, token: str | None) -> bool:
        return (
            self._server_key is not None
            and token is not None
            and hmac.compare_digest(token.encode(), self._server_key.encode())
        )


def bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


class Origins:
    """Which pages may speak to this server: its own, and those listed."""

    def __init__(self, config: ServerConfig, key_required: bool) -> None:
        self._allowed = frozenset(_origin(entry) for entry in config.allowed_origins)
        self._allowed_hosts = frozenset(urlsplit(origin).netloc for origin in self._allowed)
        # A page of another site can point its own name at a loopback address and so become
        # "same-origin" here; without a server key nothing else would stop it.
        self._only_local_names = _is_loopback(config.host) and not key_required

    def check(self, headers: Headers) -> str | None:
        """The origin to allow in CORS, None when there is none to speak of; else 403."""
        host = headers.get("host", "").lower()
        if (
            self._only_local_names
            and not _is_loopback(urlsplit(f"//{host}").hostname or "")
            and host not in self._allowed_hosts
        ):
            raise Problem(403, "this host name is not in server.allowed_origins", field="Host")
        origin = headers.get("origin")
        if origin is None:
            return None
        if origin.lower() in self._allowed:
            return origin
        if origin != "null" and urlsplit(origin).netloc.lower() == host:
            return None
        raise Problem(403, "this origin is not in server.allowed_origins", field="Origin")


def _origin(entry: str) -> str:
    parts = urlsplit(entry.rstrip("/").lower())
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or "*" in entry:
        raise ConfigError(
            f"server.allowed_origins: {entry!r} is no origin; write each as https://name or "
            "https://name:port"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _unauthorized(detail: str) -> Problem:
    return Problem(401, detail, headers={"WWW-Authenticate": "Bearer"})
