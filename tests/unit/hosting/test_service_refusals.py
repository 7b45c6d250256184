"""Requests that a node refuses: their answers, lines in the log and counters."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.memory_site import TENANT, VALIDATION, Site, code, message, play, refusals

from exec_server.hosting.rules import HandshakeRate, Refusal, secret_hash
from exec_server.hosting.service import FIRST_TENANT
from exec_server.hosting.store import NewToken


def test_a_request_beyond_the_rate_writes_nothing(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.join((await site.url("register"))["url"])
        await site.store.limit_tenant(FIRST_TENANT, (None, None, None, 2))
        answers = [await site.ask("connect") for _ in range(5)]
        refused = [answer for answer in answers if answer.status != 200]
        assert [code(answer) for answer in refused] == [(429, "too_many_requests")] * 3
        assert message(refused[0]) == (
            "limit handshakes_per_second: each token has 2 with one executor on this node"
        )
        assert refused[0].headers == {"retry-after": "1"}
        count = ("SELECT count(*) FROM authorizations", ())
        assert await site.store._database.run([count]) == [[(2,)]]

    play(tmp_path, scene)


def test_every_refusal_is_logged_and_counted_with_token_tenant_and_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    known = "token=tok-1 tenant=default environment=env peer=-"
    expected = {
        "connect refused: 401 reason=no_token token=- tenant=- environment=env peer=-",
        "connect refused: 401 reason=unknown_token token=- tenant=- environment=env peer=-",
        'connect refused: 403 reason=forbidden token=tok-2 tenant=default environment="\\n x" '
        "peer=-",
        f"connect refused: 404 reason=environment_not_found {known}",
        f"connect refused: 409 reason=environment_offline {known}",
        f"connect refused: 429 reason=handshakes_per_second {known}",
        f"connect refused: 429 reason=sockets {known}",
        "register refused: 503 reason=environments token=tok-1 tenant=default "
        "environment=other peer=-",
        f"validate refused: 200 reason=invalid_authorization {known}",
        "rendezvous refused: 401 reason=invalid_signature token=- tenant=- environment=- peer=-",
        f"rendezvous refused: 503 reason=sockets {known}",
        "rendezvous refused: 503 reason=too_many_connections token=- tenant=- environment=- peer=-",
        "other refused: 404 reason=not_found token=- tenant=- environment=- peer=-",
        "unreadable refused: 413 reason=body_too_large token=- tenant=- environment=- peer=peer",
        f"connect refused: 401 reason=revoked_token {known}",
        f"rendezvous refused: 401 reason=revoked_token {known}",
    }

    async def scene(site: Site) -> None:
        narrow = NewToken("tok-2", secret_hash("narrow"), "", TENANT, ("connect:x",))
        await site.store.add_token(narrow)
        await site.ask("connect", token="")
        await site.ask("connect", token="wrong")
        await site.ask("connect", token="narrow", name="%0A x")
        await site.ask("connect")
        url = (await site.url("register"))["url"]
        await site.ask("connect")
        await site.join(url)
        await site.store.limit_tenant(FIRST_TENANT, (1, None, None, 1))
        site.service._endpoints._handshakes = HandshakeRate()
        client = (await site.url("connect"))["url"]
        await site.ask("connect")
        await site.ask("register", name="other")
        await site.ask("validate", VALIDATION)
        await site.refusal(client.replace("kid=", "kid=x"))
        await site.store.limit_tenant(FIRST_TENANT, (1, 1, None, 9))
        await site.ask("connect")
        await site.refusal(client)
        site.service.overloaded("/rendezvous/x")
        await site.get("/nothing")
        site.service.refuse(Refusal(413, "body_too_large", ""), "peer")
        await site.store.revoke_token("tok-1")
        await site.ask("connect")
        await site.refusal(client)
        lines = [r.getMessage() for r in caplog.records if " refused: " in r.getMessage()]
        assert len(lines) == len(expected)
        assert set(lines) == expected
        counted = await refusals(site)
        assert sum(counted.values()) == len(expected)
        assert counted['{endpoint="connect",reason="handshakes_per_second"}'] == 1
        assert counted['{endpoint="connect",reason="sockets"}'] == 1
        assert counted['{endpoint="connect",reason="revoked_token"}'] == 1
        assert not [word for word in ("wrong", "narrow", "sig=") if word in caplog.text]

    play(tmp_path, scene)


def test_a_validation_is_answered_401_for_the_token_of_the_executor_alone(tmp_path: Path) -> None:
    """Clients of Codex 0.169 give up for good after it."""

    async def scene(site: Site) -> None:
        await site.join((await site.url("register"))["url"])
        for name, scope in (("narrow", "executor:x"), ("client", "connect:env")):
            token = NewToken(f"tok-{name}", secret_hash(name), "", TENANT, (scope,))
            await site.store.add_token(token)
            assert code(await site.ask("validate", VALIDATION, token=name)) == (403, "forbidden")
        assert (await site.ask("validate", VALIDATION)).status == 200  # of another client: false
        assert (await site.ask("validate", {})).status == 400
        unknown = await site.ask("validate", VALIDATION, token="unknown")
        assert code(unknown) == (401, "invalid_token")
        await site.store.revoke_token("tok-1")
        assert code(await site.ask("validate", VALIDATION)) == (401, "invalid_token")

    play(tmp_path, scene)
