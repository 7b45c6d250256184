"""Tokens, tenants and status on a SQLite database, without a node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.registry import command, verbs
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.rules import Ticket
from exec_server.hosting.sqlite_database import SqliteDatabase
from exec_server.hosting.store import AuthenticatedToken, Limits, Store


class Registry:
    """The verbs on one database; each call returns its output."""

    def __init__(self, directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self._capfd = capfd

    def run(self, *words: str) -> str:
        parser = command.build_parser()
        arguments = parser.parse_words([*words, "--data", str(self.directory)])
        self._capfd.readouterr()  # of a run that has failed
        assert command.run(arguments) == 0
        return self._capfd.readouterr().out

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))


@pytest.fixture
def registry(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Registry:
    return Registry(tmp_path / "data", capfd)


def test_the_first_tokens_are_shown_once(registry: Registry) -> None:
    text = registry.run("init", "--public-url", "HTTPS://registry.example.net/")
    assert text.count("esr_") == 2
    assert "EXEC_SERVER_API_KEY=esr_" in text
    assert "REGISTRY_TOKEN=esr_" in text
    assert "relay:https://registry.example.net/my-machine" in text
    assert "`exec-server up` prints it; --log-level info" in text
    with pytest.raises(CommandError, match="token create"):
        registry.run("init")
    scopes = [token["scopes"] for token in registry.json("token", "list")["tokens"]]
    assert sorted(scopes) == [["connect:*"], ["executor:*"]]


def test_the_first_tokens_as_json_and_a_wrong_url(registry: Registry) -> None:
    with pytest.raises(UsageError, match="--public-url"):
        registry.run("init", "--public-url", "nothing")
    assert set(registry.json("init")) == {"tenant", "executor_token", "client_token"}


def test_a_token_is_shown_once_and_listed_without_its_text(registry: Registry) -> None:
    text = registry.run("token", "create", "--scope", "connect:*", "--name", "me")
    token, _, rest = text.partition("\n")
    assert token.startswith("esr_")
    assert "of tenant default: connect:*" in rest
    assert "valid until" not in rest
    [listed] = registry.json("token", "list")["tokens"]
    assert listed["scopes"] == ["connect:*"]
    assert listed["expires_at"] is None
    table = registry.run("token", "list", "--tenant", "default")
    assert listed["id"] in table
    assert token not in table
    assert registry.json("token", "list", "--tenant", "other") == {"tokens": []}


def test_a_token_with_an_end(registry: Registry) -> None:
    made = registry.json("token", "create", "--scope", "executor:a", "--expires", "1h")
    [listed] = registry.json("token", "list")["tokens"]
    assert made["expires_at"] - listed["created_at"] in (3599, 3600, 3601)
    assert "valid until 2" in registry.run(
        "token", "create", "--scope", "executor:a", "--expires", "1h"
    )


def test_a_credential_is_a_line_for_one_environment(registry: Registry) -> None:
    line = registry.run("token", "create", "--credential", "box", "--expires", "1h")
    assert line.count("\n") == 1
    credential = json.loads(line)
    assert credential["environment_id"] == "box"
    assert isinstance(credential["expires_at"], int)
    [listed] = registry.json("token", "list")["tokens"]
    assert listed["scopes"] == ["executor:box"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "needs --scope"),
        (("--scope", "x"), "invalid scope"),
        (("--scope", "connect:x", "--tenant", "a b"), "--tenant"),
        (("--credential", "box"), "--expires"),
        (("--credential", "a b", "--expires", "1h"), "not an environment id"),
        (
            ("--credential", "a", "--expires", "1h", "--scope", "connect:a"),
            "add --scope executor:a",
        ),
        (
            ("--credential", "a", "--expires", "1h", "--scope", "executor:b"),
            "add --scope executor:a",
        ),
    ],
)
def test_wrong_flags_are_explained(registry: Registry, words: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        registry.run("token", "create", *words)


def test_a_token_is_revoked_once(registry: Registry) -> None:
    made = registry.json("token", "create", "--scope", "connect:*")
    assert registry.run("token", "revoke", made["id"]) == f"{made['id']} is revoked\n"
    with pytest.raises(CommandError, match="there is no token"):
        registry.run("token", "revoke", made["id"])
    assert registry.json("token", "list") == {"tokens": []}


def test_limits_of_a_tenant(registry: Registry) -> None:
    registry.run("token", "create", "--scope", "connect:*", "--tenant", "ops")
    assert registry.json("tenant", "limit", "ops", "--sockets", "5")["sockets"] == 5
    assert "environments           1000\n" in registry.run("tenant", "limit", "ops")
    with pytest.raises(CommandError, match="there is no tenant"):
        registry.run("tenant", "limit", "none")


def test_status_of_environments_and_nodes(registry: Registry) -> None:
    registry.run("token", "create", "--scope", "connect:*", "--tenant", "ops")

    async def fill() -> None:
        store = Store(SqliteDatabase(registry.directory / "registry.db"), Metrics())
        found = await store.tenant("ops")
        assert found is not None
        caller = AuthenticatedToken("tok", found[0], (), Limits())
        await store.register(caller, "box", "reg", "{}", takeover=True)
        await store.renew("node-1", "http://x", draining=True, since=0.0, counts=[], used_tokens=[])
        await store.close()

    asyncio.run(fill())
    status = registry.json("status")
    assert status["environments"][0]["since"] > 1_700_000_000  # offline since the registration
    assert status == {
        "environments": [
            {
                "tenant": "ops",
                "environment_id": "box",
                "online": False,
                "node": None,
                "since": status["environments"][0]["since"],
                "streams": 0,
                "bytes": 0,
            }
        ],
        "nodes": [{"node": "node-1", "url": "http://x", "draining": True, "executors": 0}],
    }
    text = registry.run("status")
    assert "ops     box          no      -     " in text
    assert "node-1  http://x  yes       0\n" in text


def test_a_watched_status_is_printed_again(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.run("token", "create", "--scope", "connect:*")
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "print_text", show)
    monkeypatch.setattr(verbs, "RENEWAL_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        registry.run("status", "--watch")
    assert shown[0] == shown[2]


def test_a_database_that_cannot_be_used_is_an_error(registry: Registry) -> None:
    registry.directory.mkdir()
    (registry.directory / "registry.db").write_bytes(b"not a database" * 100)
    with pytest.raises(CommandError, match="cannot use the database"):
        registry.run("status")


def test_a_directory_without_a_registry_is_an_error_and_stays_as_it_is(registry: Registry) -> None:
    for words in (
        ("status",),
        ("token", "list"),
        ("token", "revoke", "x"),
        ("tenant", "limit", "t"),
    ):
        with pytest.raises(CommandError, match="there is no registry in"):
            registry.run(*words)
    assert not registry.directory.exists()


def test_a_name_cannot_forge_lines_of_the_table(registry: Registry) -> None:
    registry.run("token", "create", "--scope", "connect:*", "--name", "a\n\x1b[31mb")
    table = registry.run("token", "list")
    assert "a\\n\\x1b[31mb" in table
    assert len(table.splitlines()) == 2


def test_a_limit_that_no_database_can_hold_is_refused(registry: Registry) -> None:
    registry.run("token", "create", "--scope", "connect:*")
    with pytest.raises(SystemExit, match="2"):
        registry.run("tenant", "limit", "default", "--sockets", str(10**22))
    assert (
        registry.json("tenant", "limit", "default", "--sockets", str(10**15))["sockets"] == 10**15
    )


def _register(registry: Registry, tenant: str, *names: str, node: str | None = None) -> None:
    """Environments of a tenant; those with a node are online."""
    registry.run("token", "create", "--scope", "connect:*", "--tenant", tenant)

    async def fill() -> None:
        store = Store(SqliteDatabase(registry.directory / "registry.db"), Metrics())
        found = await store.tenant(tenant)
        assert found is not None
        caller = AuthenticatedToken("tok", found[0], (), Limits())
        for name in names:
            await store.register(caller, name, "reg", "{}", takeover=True)
            if node is not None:
                values: Any = {"draining": False, "since": 0.0, "counts": [], "used_tokens": []}
                await store.renew(node, "http://x", **values)
                ticket = Ticket(found[0], name, "environment", "reg", 4_000_000_000, "n", "tok")
                assert await store.claim(ticket, node) is not None
        await store.close()

    asyncio.run(fill())


def _names(registry: Registry, *flags: str) -> list[str]:
    listed = registry.json("environment", "list", *flags)["environments"]
    return [each["environment_id"] for each in listed]


def test_tenants_are_listed_shown_and_removed(registry: Registry) -> None:
    _register(registry, "default", "a", "b")
    _register(registry, "ops", "a", node="node-1")
    table = registry.run("tenant", "list")
    assert table == (
        "TENANT   TOKENS  ENVIRONMENTS  ONLINE\n"
        "default  1       2             0\n"
        "ops      1       1             1\n"
    )
    listed = registry.json("tenant", "list")["tenants"]
    assert [each["tenant"] for each in listed] == ["default", "ops"]
    shown = registry.json("tenant", "show", "ops")
    assert shown == listed[1]
    assert (shown["tokens"], shown["environments"], shown["online"]) == (1, 1, 1)
    assert shown["limits"]["handshakes_per_second"] == 20
    assert "limit handshakes_per_second  20\n" in registry.run("tenant", "show", "ops")
    with pytest.raises(CommandError, match="tenant ops has an environment online"):
        registry.run("tenant", "remove", "ops")
    assert registry.json("tenant", "list")["tenants"] == listed
    removed = registry.run("tenant", "remove", "default")
    assert removed == "tenant default is removed with its tokens and environments\n"
    assert [each["tenant"] for each in registry.json("tenant", "list")["tenants"]] == ["ops"]
    assert _names(registry) == ["a"]
    assert len(registry.json("token", "list")["tokens"]) == 1
    for verb in ("show", "remove"):
        with pytest.raises(CommandError, match="there is no tenant default"):
            registry.run("tenant", verb, "default")


def test_an_environment_whose_node_has_died_shows_no_streams(registry: Registry) -> None:
    _register(registry, "default", "a", node="node-1")
    with contextlib.closing(sqlite3.connect(registry.directory / "registry.db")) as database:
        database.execute("UPDATE environments SET streams = 7")
        database.commit()
        assert registry.json("status")["environments"][0]["streams"] == 7
        database.execute("UPDATE nodes SET expires = 0")
        database.commit()
    assert registry.json("status")["environments"][0]["streams"] == 0
    [line] = registry.run("environment", "list").splitlines()[1:]
    assert line.split()[-2:] == ["-", "0"]


def test_times_have_their_zone(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XXX-5:30")
    time.tzset()
    try:
        made = registry.run("token", "create", "--scope", "connect:*", "--expires", "1h")
        assert re.search(r"valid until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \+0530\n", made)
        assert registry.run("token", "list").count(" +0530") == 2
    finally:
        monkeypatch.undo()
        time.tzset()


def test_environments_are_listed_and_removed_by_their_ids(registry: Registry) -> None:
    _register(registry, "default", "a", "b")
    _register(registry, "ops", "a")
    assert _names(registry) == ["a", "b", "a"]
    assert _names(registry, "--tenant", "ops") == ["a"]
    assert "ops     a            no" in registry.run("environment", "list", "--tenant", "ops")
    assert registry.run("environment", "remove", "a") == "a of tenant default is removed\n"
    assert _names(registry) == ["b", "a"]
    with pytest.raises(CommandError, match=r"not removed, because online or unknown in .*: a c;"):
        registry.run("environment", "remove", "a", "b", "c")
    assert _names(registry) == ["a"]
    with pytest.raises(UsageError, match="needs ids, or --unseen TIME"):
        registry.run("environment", "remove")
    with pytest.raises(UsageError, match="needs ids, or --unseen TIME"):
        registry.run("environment", "remove", "a", "--unseen", "1d")


def test_an_environment_that_is_online_is_not_removed(registry: Registry) -> None:
    _register(registry, "default", "up", node="node-1")
    with pytest.raises(CommandError, match="online"):
        registry.run("environment", "remove", "up")
    assert registry.run("environment", "remove", "--unseen", "1s") == "nothing is removed\n"
    assert _names(registry) == ["up"]


def test_environments_that_were_not_seen_are_removed(registry: Registry) -> None:
    _register(registry, "default", "old", "new")
    _register(registry, "ops", "old")
    with contextlib.closing(sqlite3.connect(registry.directory / "registry.db")) as database:
        database.execute("UPDATE environments SET since = since - 7200 WHERE id = 'old'")
        database.commit()
    assert registry.json("environment", "remove", "--unseen", "3h") == {"removed": []}
    removed = registry.json("environment", "remove", "--unseen", "1h", "--tenant", "ops")
    assert removed == {"removed": [{"tenant": "ops", "environment_id": "old"}]}
    text = registry.run("environment", "remove", "--unseen", "1h")
    assert text == "old of tenant default is removed\n"
    assert _names(registry) == ["new"]


def test_a_node_that_has_just_died_was_seen(registry: Registry) -> None:
    """Its row tells when, although its environments came online long ago."""
    _register(registry, "default", "box", node="node-1")
    with contextlib.closing(sqlite3.connect(registry.directory / "registry.db")) as database:
        database.execute("UPDATE environments SET since = since - 7200")
        database.execute("UPDATE nodes SET expires = expires - 60")
        database.commit()
    assert registry.json("environment", "remove", "--unseen", "1h") == {"removed": []}
    with contextlib.closing(sqlite3.connect(registry.directory / "registry.db")) as database:
        database.execute("UPDATE nodes SET expires = expires - 7200")
        database.commit()
    removed = registry.json("environment", "remove", "--unseen", "1h")["removed"]
    assert [each["environment_id"] for each in removed] == ["box"]
