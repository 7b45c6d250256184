"""Variables and policies of a command to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server.cli.errors import UsageError
from exec_server.cli.start_options import (
    MAX_POLICY_BYTES,
    command_variables,
    load_policy,
    needs_surroundings,
    with_surroundings,
)


def test_names_are_kept() -> None:
    assert load_policy("--sandbox", None) is None
    assert load_policy("--sandbox", "read-only") == "read-only"
    assert not needs_surroundings("read-only")


@pytest.mark.parametrize(
    ("text", "value", "is_partial"),
    [
        ('{"type": "managed"}', {"type": "managed"}, True),
        ('{"permissions": {}}', {"permissions": {}}, False),
        ('{"sandbox": {"permissions": {}}, "argv": []}', {"permissions": {}}, False),
    ],
)
def test_files_hold_a_sandbox_or_its_permissions(
    tmp_path: Path, text: str, value: object, is_partial: bool
) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    loaded = load_policy("--sandbox", str(path))
    assert loaded == value
    assert needs_surroundings(loaded) is is_partial


def test_permissions_are_completed() -> None:
    completed = with_surroundings({"type": "managed"}, "file:///w", ["file:///w"])
    assert completed["permissions"] == {"type": "managed"}
    assert (completed["cwd"], completed["workspaceRoots"]) == ("file:///w", ["file:///w"])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "does not exist; the named policies are read-only and workspace-write"),
        (b"[]", "holds no `sandbox` object"),
        (b"{", "policy.json: "),
        (b" " * (MAX_POLICY_BYTES + 1), f"has more than {MAX_POLICY_BYTES} bytes"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "policy.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        load_policy("--sandbox", str(path))
    assert text in str(raised.value)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--sandbox: .*Is a directory"):
        load_policy("--sandbox", str(tmp_path))


def test_values_are_given_or_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "local")
    assert command_variables(["A=1=2", "B=", "HERE"], tty=False) == {
        "A": "1=2",
        "B": "",
        "HERE": "local",
    }


def test_a_terminal_has_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORTERM", raising=False)
    monkeypatch.setenv("TERM", "vt100")
    assert command_variables([], tty=True) == {"TERM": "vt100"}
    monkeypatch.delenv("TERM")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert command_variables(["TERM=x"], tty=True) == {"TERM": "x", "COLORTERM": "truecolor"}


@pytest.mark.parametrize("word", ["=1", "", "NO_SUCH_VARIABLE"])
def test_wrong_variables_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--env"):
        command_variables([word], tty=False)
