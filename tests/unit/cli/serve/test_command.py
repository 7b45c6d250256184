"""The part of the server's start that precedes its URL."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from typing import NamedTuple, cast

import pytest

from exec_server.cli.serve.command import explanation
from exec_server.net.listen import Address, BoundSocket, TcpAddress, UnixAddress

pytestmark = pytest.mark.quick

# Each takes milliseconds to import, and none of them is needed to parse flags and bind a socket.
_SLOW = ["asyncio", "dataclasses", "hashlib", "inspect", "logging", "msgspec", "ssl", "uvloop"]


# Before 3.13 importlib imports warnings, and uuid imports platform.
_OF_PYTHON = [] if sys.version_info >= (3, 13) else ["platform", "warnings"]


def _imported(code: str, names: list[str]) -> list[str]:
    """The names of modules that are imported after this code."""
    code = f"import sys; {code}; print(*(name for name in {names} if name in sys.modules))"
    # The measurement of coverage imports some of them itself.
    variables = {name: value for name, value in os.environ.items() if "COV" not in name}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return [name for name in done.stdout.split() if name not in _OF_PYTHON]


def test_little_is_imported_before_the_url_is_printed() -> None:
    code = (
        "import exec_server.cli.main, exec_server.cli.serve.watchdog;"
        "import exec_server.cli.serve.command;"
        "from exec_server.cli.serve.arguments import parse; parse([])"
    )
    assert _imported(code, [*_SLOW, "locale"]) == []


def test_the_server_does_without_some_slow_modules() -> None:
    code = (
        "from exec_server.cli.serve import command; command._import_msgspec();"
        "import exec_server.cli.serve.run"
    )
    slow = ["dataclasses", "platform", "shlex", "typing_extensions"]
    assert _imported(code, ["msgspec", *slow]) == ["msgspec"]
    assert _imported(f"{code}; import typing_extensions", ["typing_extensions"]) != []


class _Bound(NamedTuple):
    address: Address

    @property
    def url(self) -> str:
        return self.address.url


def _explained(*addresses: Address, auth: str | None = None) -> str:
    return explanation(cast("list[BoundSocket]", [_Bound(each) for each in addresses]), auth)


def test_a_person_is_told_who_may_be_a_client() -> None:
    loopback = TcpAddress("ws", "127.0.0.1", 7700)
    text = _explained(loopback)
    assert text.startswith("`exec-server --help` lists all commands.")
    assert f"with the rights of {pwd.getpwuid(os.geteuid()).pw_name}." in text
    assert "exec-server exec ws://127.0.0.1:7700 -- uname -a" in text
    assert "every user of this machine" in text
    assert text.endswith("Ctrl-C stops it, and ends all that it runs.")
    assert "a token of --ws-auth capability-token" in _explained(loopback, auth="capability-token")
    both = _explained(UnixAddress("/run/a b"), TcpAddress("ws", "192.0.2.1", 7700))
    assert "exec 'unix:/run/a b' -- uname" in both
    assert "Clients of unix:/run/a b: you and root." in both
    assert "everyone who can reach this address" in both


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_001)
    text = _explained(UnixAddress("/run/x"))
    assert "with the rights of user 4000000001." in text
