"""The matrix of versions: what counts as a fault, and that the document has all versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.older_servers import older_binary
from tests.versions import client_sessions, installed, server_checks
from tests.versions.matrix import Row, reasons, table

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
ALL = len(client_sessions.NAMES)


def test_row_of_a_version_where_all_works() -> None:
    row = Row("0.1.0", {}, {}, {}, {})
    assert row.is_good
    assert reasons(row) == []
    checks = len(server_checks.NAMES)
    counts = f"{ALL} of {ALL} | {ALL} of {ALL} | - | - | {checks} of {checks} | - | -"
    assert table([row])[2:] == [f"| 0.1.0 | {counts} |"]


def test_fault_that_its_own_server_has_too_is_none_of_ours() -> None:
    row = Row("0.1.0", {"burst": "a"}, {"burst": "b"}, {}, {})
    assert (row.lacks, row.broken, row.is_good) == (["burst"], [], True)
    assert reasons(row) == ["0.1.0: burst with both: a"]


def test_feature_that_its_server_lacks_is_none_of_ours() -> None:
    row = Row("0.1.0", {}, {}, {}, {"start": "no input"})
    assert (row.unsupported, row.is_good) == (["start"], True)
    assert reasons(row) == ["0.1.0: start: no input"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row("0.1.0", {}, {"burst": "b"}, {}, {}), "0.1.0: burst with our server: b"),
        (Row("0.1.0", {}, {}, {"cp": "c"}, {}), "0.1.0: cp of our client: c"),
    ],
)
def test_other_faults_are_ours(row: Row, reason: str) -> None:
    assert not row.is_good
    assert reasons(row) == [reason]


def test_sessions_and_checks_have_names_of_their_own() -> None:
    assert len(set(client_sessions.NAMES)) == ALL
    assert len(set(server_checks.NAMES)) == len(server_checks.NAMES)
    assert set(installed.FEW) <= {*installed.GENERATIONS}


def test_the_reference_is_not_installed_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert older_binary("0.1.0") is None
    packages = tmp_path / "exec-server-reference" / "node_modules" / "@openai"
    program = packages / "codex-linux" / "vendor" / "linux" / "bin" / "codex"
    for folder in (packages / "codex", program.parent):
        folder.mkdir(parents=True)
    (packages / "codex" / "package.json").write_text('{"version": "0.1.0"}')
    program.touch()
    assert older_binary("0.1.0") == program
    assert older_binary("0.2.0") is None


def test_document_has_the_matrix_of_all_generations_without_a_fault() -> None:
    lines = _DOCUMENT.read_text().splitlines()
    start = lines.index(table([])[0])
    rows = [line.strip("| ").split(" | ") for line in lines[start + 2 :]]
    rows = rows[: rows.index([""])]
    assert [row[0] for row in rows] == [*installed.GENERATIONS]
    assert {row[4] for row in rows} == {"-"}  # fails with ours alone
    assert {row[7] for row in rows} == {"-"}  # fails with our client
