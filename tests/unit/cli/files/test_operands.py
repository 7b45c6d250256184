"""Operands of the commands for files."""

from __future__ import annotations

import pytest

from exec_server.cli.errors import UsageError
from exec_server.cli.files.operands import parse_operand
from exec_server.cli.targets import RemotePath


def test_a_target_alone_is_an_operand_where_no_path_is_needed() -> None:
    assert parse_operand("build", needs_path=False) == RemotePath("build", None)
    assert parse_operand("build:a", needs_path=True) == RemotePath("build", "a")
    assert parse_operand(":", needs_path=False) == RemotePath(":", "")
    assert parse_operand(":/a", needs_path=True) == RemotePath(":", "/a")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("./a", "`./a` is a local path; write TARGET:./a"),
        ("", "`` is a local path"),
        ("..", "`..` is a local path"),
        ("build:", "`build:` names no file; write build:PATH"),
        ("a.md", "`a.md` names no file; write a.md:PATH, or TARGET:a.md if it is a file"),
        ("ws://h:1/etc", "write ws://h:1:/etc"),
        (":", "`:` names no file; write :PATH"),
    ],
)
def test_other_texts_are_refused(text: str, error: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_operand(text, needs_path=True)
    assert error in str(raised.value)
