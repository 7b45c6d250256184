"""Dialers for relays without a network: refused arguments, delays."""

from __future__ import annotations

import asyncio

import pytest

from exec_server.client.engine.relay import FIRST_SECONDS, PlainRelayDialer, RelayDialer
from exec_server.client.engine.session import Closing
from exec_server.errors import ExecServerError, RegistryUnavailable, StartupError
from exec_server.registry.api import ConnectionBundle
from exec_server.relay.noise import PublicKey


@pytest.mark.parametrize("url", ["http://example.net", "example.net", "ws://", "ws://user:pw@host"])
def test_a_useless_url_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="invalid exec-server URL: ") as raised:
        PlainRelayDialer(url)
    assert "pw" not in str(raised.value)


def test_a_registry_gets_no_token_over_plain_http() -> None:
    with pytest.raises(StartupError, match="requires https for non-loopback"):
        RelayDialer("http://example.net", "env-1", token="secret")
    RelayDialer("http://example.net", "env-1", token="secret", allow_insecure_token=True)
    RelayDialer("http://127.0.0.1:1", "env-1", token="secret")
    RelayDialer("https://example.net", "env-1", token="secret")


def test_an_environment_needs_an_id() -> None:
    with pytest.raises(StartupError, match="environment id is required"):
        RelayDialer("https://example.net", " ", token="secret")


def test_a_fingerprint_is_of_both_halves() -> None:
    key = PublicKey(b"a" * 32, b"b" * 1184)
    others = [PublicKey(b"c" * 32, key.mlkem768), PublicKey(key.x25519, b"c" * 1184)]
    assert len(key.fingerprint) == len("sha256:") + 64
    assert all(other.fingerprint != key.fingerprint for other in others)


@pytest.mark.parametrize("written", ["", "abc", "g" * 64, "a" * 63])
def test_a_useless_fingerprint_is_refused(written: str) -> None:
    # An empty one must not mean that anything goes.
    with pytest.raises(StartupError, match="64 hexadecimal digits"):
        RelayDialer("https://x.net", "env-1", token="t", executor_key_fingerprint=written)


def test_fingerprints_may_be_written_as_people_do() -> None:
    for written in ("ab" * 32, "AB:" * 31 + "AB", f" sha256:{'ab' * 32}\n"):
        RelayDialer("https://x.net", "env-1", token="t", executor_key_fingerprint=written)


def test_a_relay_is_tried_again_slower_each_time() -> None:
    dialer = RelayDialer("https://x.net", "env-1", token="t")
    for attempt, base in enumerate([0.5, 1, 2, 4, 5, 5]):
        assert base <= dialer.retry_delay(attempt) <= 1.5 * base


def test_the_first_connection_tells_that_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[ExecServerError, float]] = []
    dialer = RelayDialer(
        "https://x.net", "env-1", token="t", on_retry=lambda *each: told.append(each)
    )
    failures = [RegistryUnavailable(f"attempt {number}") for number in range(5)]
    asked = iter(failures)

    async def refuse(_: object) -> ConnectionBundle:
        raise next(asked)

    monkeypatch.setattr(dialer._registry, "connect", refuse)
    monkeypatch.setattr(dialer, "retry_delay", lambda attempt: 0.0)

    async def scene() -> None:
        with pytest.raises(RegistryUnavailable, match="attempt 4"):
            await dialer._request_connection()
        await dialer.close(Closing.ORDERLY)

    asyncio.run(scene())
    assert told == [(failures[0], FIRST_SECONDS)]
