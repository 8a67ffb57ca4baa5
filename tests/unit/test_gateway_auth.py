"""Secrets, rates and overdue sessions, with an invented clock."""

from __future__ import annotations

import hashlib
import time

import jwt
import pytest
from starlette.datastructures import Headers

from characters_serve.config import ApiKey, ConfigError, ServerConfig, SessionConfig
from characters_serve.fleet.pool import Lease
from characters_serve.gateway.auth import Authority, Origins, SteadyClock, bearer
from characters_serve.gateway.limits import MAX_TRACKED, RateLimiter, address_key
from characters_serve.gateway.problems import Problem
from characters_serve.gateway.sessions import HOST_SLACK_S, Session, State, overdue

KEY = ApiKey(name="web", sha256=hashlib.sha256(b"k-123").hexdigest())


def refused(authority: Authority, token: str | None, now_s: float) -> int:
    with pytest.raises(Problem) as caught:
        authority.grant(token, now_s)
    return caught.value.status


def test_a_secret_ends_when_it_said() -> None:
    authority = Authority([])
    secret = authority.issue("a", "connect", 1000.0, 60.0)
    assert secret.expires_at == 1060
    grant = authority.grant(secret.value, 1059.0)
    assert (grant.scope, grant.session_id, grant.key) == ("connect", "a", None)
    assert grant.covers("a", "web") and not grant.covers("b", "web")
    assert refused(authority, secret.value, 1060.0) == 401
    assert refused(authority, None, 1000.0) == 401


def test_a_secret_of_another_process_algorithm_or_purpose_is_worth_nothing() -> None:
    authority, other = Authority([]), Authority([])
    assert refused(authority, other.issue("a", "resume", 0, 60).value, 1) == 401
    claims = {"sub": "a", "aud": "characters-serve", "scope": "resume", "exp": 60}
    unsigned = jwt.encode(claims, None, "none")  # type: ignore[arg-type]
    assert refused(authority, unsigned, 1) == 401
    key = authority._signing_key
    for wrong in ({"aud": "elsewhere"}, {"scope": "admin"}, {"exp": None}):
        body = {k: v for k, v in {**claims, **wrong}.items() if v is not None}
        assert refused(authority, jwt.encode(body, key, "HS256"), 1) == 401
    assert authority.grant(jwt.encode(claims, key, "HS256"), 1).scope == "resume"


def test_a_server_key_is_kept_as_its_hash_and_covers_what_it_made() -> None:
    authority = Authority([KEY])
    assert "k-123" not in repr(vars(authority))
    grant = authority.grant("k-123", 0.0)
    assert grant.covers("a", "web") and not grant.covers("a", "other")
    assert not grant.covers("a", None)
    for wrong in ("k-124", KEY.sha256, f"sha256:{KEY.sha256}"):
        assert refused(authority, wrong, 0.0) == 401
    with pytest.raises(Problem):
        authority.creator(Headers({"authorization": "Bearer "}))
    assert authority.creator(Headers({"authorization": "Bearer k-123"})) is KEY


@pytest.mark.parametrize(
    "said", ["k-123", "k-123\n", f"sha256:{KEY.sha256}", f"sha256:{KEY.sha256}\n"]
)
def test_the_environment_holds_a_key_or_its_hash(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARACTERS_API_KEY", said)
    assert ServerConfig().has_key
    assert Authority.from_config(ServerConfig()).grant("k-123", 0.0).key == "environment"
    with pytest.raises(ConfigError, match="same sha256"):
        Authority.from_config(ServerConfig(api_keys=(KEY,)))
    monkeypatch.setenv("CHARACTERS_API_KEY", " \n")
    assert not ServerConfig().has_key and not Authority.from_config(ServerConfig()).key_required
    monkeypatch.setenv("CHARACTERS_API_KEY", "sha256:short")
    with pytest.raises(ConfigError, match="64 hex digits"):
        Authority.from_config(ServerConfig())


def test_a_step_of_the_wall_clock_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteadyClock()
    before_s = clock()
    real = time.time
    for step_s in (86_400.0, -86_400.0):
        monkeypatch.setattr(time, "time", lambda step_s=step_s: real() + step_s)
        assert 0 <= clock() - before_s < 3600


def test_only_a_bearer_header_holds_a_token() -> None:
    assert bearer(Headers({"authorization": "Bearer abc"})) == "abc"
    assert bearer(Headers({"authorization": "bearer abc"})) == "abc"
    for header in ("", "Bearer", "Bearer  ", "Basic abc"):
        assert bearer(Headers({"authorization": header})) is None


def test_behind_a_public_address_or_a_server_key_the_host_name_is_free() -> None:
    headers = Headers({"host": "talk.example", "origin": "https://talk.example"})
    Origins(ServerConfig(host="0.0.0.0"), key_required=False).check(headers)
    Origins(ServerConfig(), key_required=True).check(headers)
    Origins(ServerConfig(allowed_origins=("https://talk.example",)), False).check(headers)
    with pytest.raises(Problem, match="allowed_origins"):
        Origins(ServerConfig(), key_required=False).check(headers)


@pytest.mark.parametrize("entry", ["*", "https://*.example", "talk.example", "https://a.example/x"])
def test_an_origin_that_can_never_match_is_a_config_error(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.allowed_origins"):
        Origins(ServerConfig(allowed_origins=(entry,)), key_required=False)


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "[::1]:8080", "localhost", "LOCALHOST:1"])
def test_every_loopback_name_is_local(host: str) -> None:
    Origins(ServerConfig(), key_required=False).check(Headers({"host": host}))


def test_a_rate_is_a_burst_and_then_a_pace() -> None:
    limiter = RateLimiter(6)
    assert [limiter.retry_after_s("a", 0.0) for _ in range(6)] == [None] * 6
    assert limiter.retry_after_s("a", 0.0) == pytest.approx(10.0)
    assert limiter.retry_after_s("b", 0.0) is None, "others are not touched"
    assert limiter.retry_after_s("a", 9.0) == pytest.approx(1.0)
    assert limiter.retry_after_s("a", 10.0) is None
    assert limiter.retry_after_s("a", 10.0) is not None


def test_the_limiter_remembers_a_bounded_number_of_addresses() -> None:
    limiter = RateLimiter(1)
    for index in range(MAX_TRACKED + 50):
        limiter.retry_after_s(str(index), 0.0)
    assert len(limiter._buckets) == MAX_TRACKED


def test_an_ipv6_client_is_its_network() -> None:
    assert address_key("2001:db8::1") == address_key("2001:db8::ffff") == "2001:db8::/64"
    assert address_key("::ffff:192.0.2.1") == address_key("192.0.2.1") == "192.0.2.1"
    assert address_key(None) == "unknown"


@pytest.mark.parametrize(
    ("state", "in_state_s", "reason"),
    [
        ("ready", 30 + HOST_SLACK_S, None),
        ("ready", 31 + HOST_SLACK_S, "no client connected in time"),
        ("reconnecting", 21 + HOST_SLACK_S, "the client did not come back"),
        ("ending", 31 + HOST_SLACK_S, "draining"),
        ("queued", 2000, None),
        ("live", 600, None),
        ("live", 901 + 30 + HOST_SLACK_S, "maximum duration"),
    ],
)
def test_a_host_that_forgets_a_deadline_is_reminded(
    state: State, in_state_s: float, reason: str | None
) -> None:
    session = Session("s", None, "Ada", 900.0, 0.0, state, lease=Lease("g0", "s", 1))
    session.reason = "draining" if state == "ending" else ""
    assert overdue(session, SessionConfig(), in_state_s) == reason
