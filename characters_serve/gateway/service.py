"""In: validated requests. Out: what the routes work with: sessions, limits, pictures, counts.

Holds the one fleet, session manager and registry of an app. Knows no HTTP but its refusals.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable

from characters_serve.config import ApiKey, Config, ConfigError
from characters_serve.fleet.base import Fleet
from characters_serve.fleet.local import LocalFleet
from characters_serve.fleet.queue import WaitingQueue
from characters_serve.gateway.auth import Authority, Origins, SteadyClock, Token
from characters_serve.gateway.bodies import CreateBody, speakable
from characters_serve.gateway.characters import (
    Character,
    image_bytes,
    load_characters,
    visitor_persona,
)
from characters_serve.gateway.image_process import decode
from characters_serve.gateway.images import ImageError
from characters_serve.gateway.limits import RateLimiter, address_key
from characters_serve.gateway.problems import Problem, busy
from characters_serve.gateway.sessions import OVER, NoGroupFree, Session, SessionRequest, Sessions
from characters_serve.gateway.turn import Turn
from characters_serve.messages import HostMetrics
from characters_serve.metrics import Metrics

log = logging.getLogger(__name__)

LEAVING = "the server is shutting down"
OFFERS_PER_MINUTE = 30
COMMANDS_PER_MINUTE = 120
MAX_WAITING_IMAGES = 8


class Gateway:
    """What the routes work with."""

    def __init__(
        self,
        config: Config,
        host_module: str,
        on_ready: Callable[[dict[str, str]], None],
        on_misconfigured: Callable[[str], None],
    ) -> None:
        self.config = config
        self.authority = Authority.from_config(config.server)
        self.turn = Turn.from_config(config.server)
        self.origins = Origins(config.server, self.authority.key_required)
        self.characters = load_characters()
        self.now_unix_s = SteadyClock()
        self.requests = RateLimiter(config.server.requests_per_minute)
        self.creations = RateLimiter(config.server.sessions_per_minute)
        self._creating: Counter[str | None] = Counter()
        self.creations_by_key: dict[str, RateLimiter] = {}
        self.offers = RateLimiter(OFFERS_PER_MINUTE)
        self.commands = RateLimiter(COMMANDS_PER_MINUTE)
        self._decoder = asyncio.Lock()
        self._decoding = 0
        self._presets_rgb: dict[str, bytes] = {}
        self.fleet: Fleet = fleet_class(config)(
            config,
            on_state=lambda lease, state: self.sessions.on_state(lease, state),
            on_lost=lambda lease, reason: self.sessions.on_lost(lease, reason),
            on_gone=self._group_gone,
            on_metrics=self._host_metrics,
            on_ready=lambda _group_id, details: on_ready(details),
            on_misconfigured=on_misconfigured,
            on_free=lambda: self.sessions.admit(),
            host_module=host_module,
        )
        self.metrics = Metrics(
            sessions_by_state=lambda: self.sessions.counts(),
            groups_by_state=lambda: {str(s): n for s, n in self.fleet.pool.counts().items()},
            tasks=lambda: len(asyncio.all_tasks()),
        )
        queue = WaitingQueue(config.server.queue_size, config.server.queue_timeout_s)
        self.sessions = Sessions(config.session, self.fleet, self.metrics, queue)

    def _group_gone(self, group_id: str, _reason: str) -> None:
        self.metrics.groups_lost.inc()
        self.metrics.forget(group_id)

    def _host_metrics(self, group_id: str, report: HostMetrics) -> None:
        self.metrics.absorb(group_id, report)

    async def drain(self) -> None:
        """Not ready and no new session from now on; returns when those that live are over."""
        self.fleet.pool.drain()
        within_s = self.config.server.drain_s
        counts = self.sessions.counts()
        living = sum(n for state, n in counts.items() if state not in OVER)
        if living:
            log.warning(
                "leaving: %d sessions may go on for %g s; a second signal ends them now",
                living,
                within_s,
            )
            await self.sessions.drain(LEAVING, within_s)

    def check_capacity(self) -> None:
        """Turns a request away before its picture is decoded; `create` is what counts."""
        counts = self.fleet.pool.counts()
        if self.fleet.pool.draining:
            raise busy(503, "the server is shutting down", 30)
        if counts["ready"] or counts["resetting"]:
            return
        coming = any(counts[state] for state in ("reserved", "live", "starting", "warming"))
        if coming and self.sessions.queue_has_room:
            return
        self.metrics.sessions_refused.labels("full").inc()
        if counts["reserved"] or counts["live"]:
            raise _all_taken()
        if counts["starting"] or counts["warming"]:
            raise busy(503, "the server is still starting", 2)
        raise busy(503, "the server cannot run a character now; /healthz/ready says why", 10)

    def check_rate(self, key: ApiKey | None, host: str | None) -> None:
        """How often sessions may be asked for: by each key, and by each address without one."""
        limiter, caller = self.creations, address_key(host)
        if key is not None:
            fresh = RateLimiter(key.sessions_per_minute)
            limiter, caller = self.creations_by_key.setdefault(key.name, fresh), key.name
        wait_s = limiter.retry_after_s(caller, time.monotonic())
        if wait_s is not None:
            self.metrics.sessions_refused.labels("rate").inc()
            raise busy(429, "too many sessions from this address or key", wait_s)

    def check_quota(self, key: ApiKey | None) -> None:
        if key is None or key.max_sessions is None:
            return
        if self.sessions.open_of(key.name) + self._creating[key.name] >= key.max_sessions:
            self.metrics.sessions_refused.labels("quota").inc()
            raise busy(429, f"this key's {key.max_sessions} sessions are all open", 5)

    async def create(self, wanted: SessionRequest, key: ApiKey | None) -> Session:
        """Counted before anything is waited for, so that no burst passes a quota."""
        self.check_quota(key)
        self._creating[wanted.owner] += 1
        try:
            return await self.sessions.create(wanted)
        except NoGroupFree:
            self.metrics.sessions_refused.labels("full").inc()
            raise _all_taken() from None
        finally:
            self._creating[wanted.owner] -= 1

    def session(self, session_id: str, token: str | None) -> Session:
        """The session, when the caller holds its token or the key that made it; else 404."""
        grant = self.authority.grant(token, self.now_unix_s())
        session = self.sessions.get(session_id)
        if session is None or not grant.covers(session_id, session.owner):
            raise Problem(404, "no such session")
        return session

    def session_to_connect(self, session_id: str, token: str | None) -> Session:
        """As `session`; a client secret that has made its connection makes no other."""
        session = self.session(session_id, token)
        wait_s = self.offers.retry_after_s(session_id, time.monotonic())
        if wait_s is not None:
            raise busy(429, "too many offers for this session", wait_s)
        scope = self.authority.grant(token, self.now_unix_s()).scope
        if scope == "connect" and session.connected and not session.over:
            raise Problem(
                403, "this secret has connected; the answer to its offer had a resume token"
            )
        return session

    def session_to_command(self, session_id: str, token: str | None) -> Session:
        session = self.session(session_id, token)
        wait_s = self.commands.retry_after_s(session_id, time.monotonic())
        if wait_s is not None:
            raise busy(429, "too many commands for this session", wait_s)
        return session

    def end(self, session_id: str, token: str | None) -> None:
        """However often it is asked, also once the session is forgotten."""
        session = self.sessions.get(session_id)
        grant = self.authority.grant(token, self.now_unix_s())
        if not grant.covers(session_id, grant.key if session is None else session.owner):
            raise Problem(404, "no such session")
        if session is not None:
            self.sessions.end(session, "ended by the user")

    def client_secret(self, session: Session) -> Token:
        lifetime_s = self.config.server.client_secret_ttl_s + self._waits_s(session)
        return self.authority.issue(session.session_id, "connect", self.now_unix_s(), lifetime_s)

    def resume_token(self, session: Session) -> Token:
        lifetime_s = self.lifetime_s(session)
        return self.authority.issue(session.session_id, "resume", self.now_unix_s(), lifetime_s)

    def lifetime_s(self, session: Session) -> float:
        """How long what a session's client is given must last."""
        connects_s = self.config.server.client_secret_ttl_s
        return session.max_duration_s + connects_s + self._waits_s(session)

    def _waits_s(self, session: Session) -> float:
        return self.config.server.queue_timeout_s if session.state == "queued" else 0.0

    async def decode_image(self, data: bytes) -> bytes:
        """One at a time: a picture takes up to 300 MB and 1.5 s."""
        if self._decoding >= MAX_WAITING_IMAGES:
            raise busy(503, "too many pictures are being looked at; try again soon", 5)
        model = self.config.model
        self._decoding += 1
        try:
            async with self._decoder:
                return await decode(data, model.width, model.height)
        except ImageError as error:
            raise Problem(422, str(error), field=ImageError.field) from None
        finally:
            self._decoding -= 1

    async def preset_image(self, character: Character) -> bytes:
        """Decoded once; later visitors do not wait behind strangers' pictures."""
        if character.character_id not in self._presets_rgb:
            data = image_bytes(character.image_path)
            self._presets_rgb[character.character_id] = await self.decode_image(data)
        return self._presets_rgb[character.character_id]

    async def requested(
        self, body: CreateBody, image: bytes | None, key: ApiKey | None, trace_id: str
    ) -> SessionRequest:
        """What a visitor asked for, checked and decoded; holds no group yet."""
        longest_s = self.config.session.max_duration_s
        if body.max_duration_s is not None and body.max_duration_s > longest_s:
            raise Problem(422, f"at most {longest_s:g} seconds", field="max_duration_s")
        if image is not None:
            if body.character is not None:
                raise Problem(422, "send an image or name a character, not both", field="character")
            persona = visitor_persona(body.name and speakable(body.name), body.persona)
            self.check_quota(key)
            self.check_capacity()
            image_rgb = await self.decode_image(image)
        else:
            character = self._preset(body)
            persona = character.persona
            self.check_capacity()
            image_rgb = await self.preset_image(character)
        return SessionRequest(
            image_rgb=image_rgb,
            persona=persona,
            character=body.character,
            seed=secrets.randbits(31) if body.seed is None else body.seed,
            max_duration_s=body.max_duration_s or longest_s,
            owner=None if key is None else key.name,
            trace_id=trace_id,
        )

    def _preset(self, body: CreateBody) -> Character:
        if body.character is None:
            raise Problem(422, "name a preset character, or send an image", field="character")
        for field in ("name", "persona"):
            if getattr(body, field) is not None:
                raise Problem(422, "a preset has its own; send it with an image", field=field)
        if body.character not in self.characters:
            raise Problem(422, "no such character; see /v1/characters", field="character")
        return self.characters[body.character]


def _all_taken() -> Problem:
    return busy(503, "every character is in a conversation; try again soon", 5)


def fleet_class(config: Config) -> type[Fleet]:
    """Where the groups run. Ray is loaded only where it is asked for."""
    if config.fleet.engine == "local":
        return LocalFleet
    try:
        from characters_serve.fleet.ray import RayFleet
    except ImportError as error:
        raise ConfigError(
            f"fleet.engine=ray needs Ray: pip install 'characters-serve[ray]' ({error})"
        ) from None
    return RayFleet
