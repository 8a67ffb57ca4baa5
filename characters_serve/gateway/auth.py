"""In: headers. Out: who may do what. Knows no session's state.

A server key creates sessions, and is known here by its hash only. A browser holds tokens that are
good for one session: a client secret, which is short-lived and makes one connection, and then the
resume token that came with that connection. The signing key is drawn anew by each process.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import jwt
from starlette.datastructures import Headers

from characters_serve.config import ApiKey, ConfigError, ServerConfig, secret
from characters_serve.gateway.problems import Problem

_ALGORITHM = "HS256"
_AUDIENCE = "characters-serve"
_HASHED = "sha256:"

Scope = Literal["connect", "resume"]


@dataclass(frozen=True, slots=True)
class Token:
    value: str
    expires_at: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What a caller showed: a server key by its name, or a token by its scope and session."""

    key: str | None = None
    scope: Scope | None = None
    session_id: str = ""

    def covers(self, session_id: str, owner: str | None) -> bool:
        """owner: the name of the key that made the session; a key covers what it made."""
        return self.session_id == session_id if self.scope else self.key == owner


class SteadyClock:
    """Unix seconds that no step of the wall clock moves: what is live stays so."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


class Authority:
    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)
        self._signing_key = secrets.token_bytes(32)

    @classmethod
    def from_config(cls, config: ServerConfig) -> Authority:
        keys = list(config.api_keys)
        if said := secret(config.api_key_env):
            digest = said.removeprefix(_HASHED) if said.startswith(_HASHED) else _digest(said)
            if not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise ConfigError(f"{config.api_key_env}: {_HASHED} is followed by 64 hex digits")
            limit = config.sessions_per_minute
            keys.append(ApiKey(name="environment", sha256=digest, sessions_per_minute=limit))
        for field in ("name", "sha256"):
            if len({getattr(key, field) for key in keys}) < len(keys):
                raise ConfigError(f"server.api_keys: two keys have the same {field}")
        return cls(keys)

    @property
    def key_required(self) -> bool:
        return bool(self._keys)

    def issue(self, session_id: str, scope: Scope, now_unix_s: float, lifetime_s: float) -> Token:
        expires_at = int(now_unix_s + lifetime_s)
        claims = {
            "sub": session_id,
            "aud": _AUDIENCE,
            "scope": scope,
            "iat": int(now_unix_s),
            "exp": expires_at,
            "jti": secrets.token_hex(8),
        }
        return Token(jwt.encode(claims, self._signing_key, _ALGORITHM), expires_at)

    def creator(self, headers: Headers) -> ApiKey | None:
        """The key that may create a session; None where none is needed, else 401."""
        if not self._keys:
            return None
        key = self._key(bearer(headers))
        if key is None:
            raise _unauthorized("creating a session needs the server key")
        return key

    def grant(self, token: str | None, now_unix_s: float) -> Grant:
        """What this token is worth, for whichever session; 401 when it is worth nothing."""
        if token is None:
            raise _unauthorized("the session's client secret is needed")
        key = self._key(token)
        if key is not None:
            return Grant(key=key.name)
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
        if claims["exp"] <= now_unix_s or claims["scope"] not in ("connect", "resume"):
            raise _unauthorized("the client secret has expired")
        return Grant(scope=claims["scope"], session_id=claims["sub"])

    def _key(self, token: str | None) -> ApiKey | None:
        digest = _digest(token or "")
        found = [key for key in self._keys if hmac.compare_digest(digest, key.sha256)]
        return found[0] if found and token else None


def _digest(key: str) -> str:
    """Server keys are random and long: a slow hash would only slow each request down."""
    return hashlib.sha256(key.encode()).hexdigest()


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
    return Problem(401, detail, field="Authorization", headers={"WWW-Authenticate": "Bearer"})
