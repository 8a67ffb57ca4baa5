"""TURN credentials: what coturn with a shared secret accepts, for as long as a session may last."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from characters_serve.config import ConfigError, ServerConfig, load_config
from characters_serve.gateway.turn import Turn

URLS = ("turn:relay.example:3478", "turns:relay.example:5349")


def test_without_relays_there_is_nothing_to_hand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHARACTERS_TURN_SECRET", raising=False)
    assert Turn.from_config(ServerConfig()).ice_servers(1000.0, 60.0) == []


def test_credentials_expire_with_the_session_and_are_signed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHARACTERS_TURN_SECRET", "shared\n")  # as files of secrets end
    (entry,) = Turn.from_config(ServerConfig(turn_urls=URLS)).ice_servers(1000.5, 1020.0)
    assert entry["urls"] == list(URLS) and entry["username"] == "2020:characters"
    expected = hmac.new(b"shared", b"2020:characters", hashlib.sha1).digest()
    assert base64.b64decode(entry["credential"]) == expected


def test_relays_without_their_secret_are_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHARACTERS_TURN_SECRET", raising=False)
    with pytest.raises(ConfigError, match=r"server\.turn_urls: CHARACTERS_TURN_SECRET"):
        Turn.from_config(ServerConfig(turn_urls=URLS))


@pytest.mark.parametrize("url", ["relay.example", "stun:relay.example", "turn:", "turn://x"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="turn_urls"):
        load_config(overrides=[f"server.turn_urls=['{url}']"])
