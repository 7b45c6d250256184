"""The part of the server's start that precedes its URL."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

# Each takes milliseconds to import, and none of them is needed to parse flags and bind a socket.
_SLOW = ["asyncio", "dataclasses", "hashlib", "inspect", "logging", "msgspec", "ssl", "uvloop"]


# Before 3.13 importlib imports warnings, and uuid imports platform.
_OF_PYTHON = [] if sys.version_info >= (3, 13) else ["platform", "warnings"]
# They and their own imports would be half of the memory of the watchdog.
_LARGE = ["contextlib", "re", "threading", "typing", "warnings"]


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


def test_less_is_imported_before_the_watchdog_is_forked() -> None:
    code = (
        "import exec_server.cli.main, exec_server.cli.serve.watchdog;"
        "import exec_server.host.secret_variables, exec_server.registry.secrets"
    )
    assert _imported(code, _LARGE) == []


def test_the_server_does_without_some_slow_modules() -> None:
    code = (
        "from exec_server.cli.serve import command; command._import_msgspec();"
        "import exec_server.cli.serve.run"
    )
    slow = ["dataclasses", "platform", "shlex", "typing_extensions"]
    assert _imported(code, ["msgspec", *slow]) == ["msgspec"]
    assert _imported(f"{code}; import typing_extensions", ["typing_extensions"]) != []
