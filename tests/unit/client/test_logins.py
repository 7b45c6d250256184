"""Stored logins: where the tokens are, which of them is found, and damaged files."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exec_server.client import logins
from exec_server.client.logins import Login
from exec_server.errors import StartupError

keyring = pytest.importorskip("keyring")

from keyring.backend import KeyringBackend  # noqa: E402
from keyring.errors import PasswordDeleteError  # noqa: E402

URL = "https://registry.example.net"


class MemoryKeyring(KeyringBackend):  # type: ignore[misc,unused-ignore]
    """Passwords by service and account."""

    priority = 5

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.passwords: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, username: str) -> str | None:
        return self.passwords.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.passwords[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        if self.passwords.pop((service, username), None) is None:
            raise PasswordDeleteError(username)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "exec-server" / "logins.json"


@pytest.fixture
def memory() -> Iterator[MemoryKeyring]:
    before = keyring.get_keyring()
    memory = MemoryKeyring()
    keyring.set_keyring(memory)
    yield memory
    keyring.set_keyring(before)


def test_a_token_is_kept_in_a_file_for_the_user_alone(file: Path) -> None:
    assert logins.load_logins() == {}
    login = Login(URL, {"client": "secret"}, "/ca.pem", ("ab",))
    logins.save_login(login, "file")
    assert logins.load_logins() == {URL: login}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = logins.find_login(f"{URL}/")
    assert found is not None
    assert (found.read_token("client"), found.read_token("executor")) == ("secret", None)
    assert "secret" not in repr(found)


def test_a_further_login_keeps_the_token_of_the_other_role() -> None:
    logins.save_login(Login(URL, {"executor": "one"}), "file")
    logins.save_login(Login(URL, {"client": "two"}, "/ca.pem"), "file")
    assert logins.load_logins() == {
        URL: Login(URL, {"executor": "one", "client": "two"}, "/ca.pem")
    }


def test_a_keyring_holds_the_token_instead_of_the_file(file: Path, memory: MemoryKeyring) -> None:
    assert logins.has_keyring()
    logins.save_login(Login(URL, {"client": "secret"}), "keyring")
    assert "secret" not in file.read_text()
    found = logins.find_login(URL)
    assert found is not None
    assert found.read_token("client") == "secret"
    memory.passwords.clear()
    with pytest.raises(StartupError, match="the keyring no longer holds the token"):
        found.read_token("client")
    assert logins.remove_login(URL)  # also if the keyring has forgotten it
    assert logins.load_logins() == {}


def test_logging_out_removes_the_token_from_the_keyring(memory: MemoryKeyring) -> None:
    logins.save_login(Login(URL, {"client": "a"}), "keyring")
    logins.save_login(Login(URL, {"executor": "b"}), "file")
    assert logins.remove_login(URL)
    assert (memory.passwords, logins.load_logins(), logins.remove_login(URL)) == ({}, {}, False)


def test_a_keyring_that_stores_nothing_is_not_used(
    memory: MemoryKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryKeyring, "priority", 0.5)
    assert not logins.has_keyring()
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert not logins.has_keyring()
    with pytest.raises(StartupError, match=r"install '\.\[keyring\]'.*; or use --store file"):
        logins.save_login(Login(URL, {"client": "a"}), "keyring")


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("https://Registry.example.net:443/", URL),
        (" https://registry.example.net ", URL),
        ("http://127.0.0.1:7800/", "http://127.0.0.1:7800"),
        ("http://[::1]:7800", "http://[::1]:7800"),
        ("https://h/base/", "https://h/base"),
    ],
)
def test_one_registry_has_one_url(given: str, stored: str) -> None:
    assert logins.normalise_url(given) == stored


@pytest.mark.parametrize("host", ["registry.example.net", "127.0.0.1:7800", "localhost:7800"])
def test_a_host_is_told_how_to_become_a_url(host: str) -> None:
    with pytest.raises(StartupError, match=f"`{host}` is not a URL: write https://{host}"):
        logins.normalise_url(host)


@pytest.mark.parametrize("url", ["http://registry.example.net", "ws://127.0.0.1", "nonsense", ""])
def test_a_url_that_no_token_is_sent_to_has_no_login(url: str) -> None:
    with pytest.raises(StartupError):
        logins.normalise_url(url)
    logins.save_login(Login(URL, {"client": "a"}), "file")
    assert logins.find_login(url) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"registries": [1]}',
        '{"registries": [{"url": "u"}]}',
        '{"registries": [{"url": "u", "tokens": 1}]}',
        '{"registries": [{"url": "u", "tokens": {}, "ca_file": 1}]}',
        '{"registries": [{"url": 1, "tokens": {}}]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_reported(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.touch(0o600)
    file.write_text(text)
    with pytest.raises(StartupError, match="is damaged: remove it and log in again"):
        logins.load_logins()


def test_files_that_others_can_read_or_that_cannot_be_read_are_refused(file: Path) -> None:
    logins.save_login(Login(URL, {"client": "a"}), "file")
    file.chmod(0o640)
    with pytest.raises(StartupError, match="readable by other users: run `chmod 600"):
        logins.load_logins()
    file.unlink()
    file.mkdir()
    with pytest.raises(StartupError, match="cannot read"):
        logins.load_logins()


def test_a_file_that_cannot_be_written_is_reported(file: Path) -> None:
    file.parent.write_text("in the way")
    with pytest.raises(StartupError, match=r"cannot (write|read)"):
        logins.save_login(Login(URL, {"client": "a"}), "file")


def test_a_full_disk_is_reported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space")

    monkeypatch.setattr(logins, "write_private_file", fail)
    with pytest.raises(StartupError, match=f"cannot write {file}: No space"):
        logins.save_login(Login(URL, {"client": "a"}), "file")


def test_the_number_of_registries_is_limited(file: Path) -> None:
    entries = [
        {"url": f"https://r{number}", "tokens": {"client": "t"}}
        for number in range(logins.MAX_REGISTRIES)
    ]
    file.parent.mkdir()
    file.touch(0o600)
    file.write_text(json.dumps({"registries": entries}))
    logins.save_login(Login("https://r0", {"client": "new"}), "file")
    with pytest.raises(StartupError, match="remove one with `exec-server logout URL`"):
        logins.save_login(Login(URL, {"client": "a"}), "file")
