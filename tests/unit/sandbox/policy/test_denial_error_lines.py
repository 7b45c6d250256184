"""Lines of output with an error, the error, and the names in them."""

from __future__ import annotations

import errno

import pytest

from exec_server.sandbox.policy import denial
from exec_server.sandbox.policy.denial import (
    ERROR_PHRASES,
    find_error,
    find_names,
    last_messages,
    likely_names,
    lines_with,
    names_above,
)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("x: Permission denied", (3, errno.EACCES)),
        ("EROFS: read-only file system, open 'x'", (7, errno.EROFS)),
        ("Operation not permitted", (0, errno.EPERM)),
        ("Device or resource busy", (0, errno.EBUSY)),
        ("Failed to write file x", (0, errno.EROFS)),
        ("x: Keine Berechtigung", None),
        ("permission  denied", None),
        ("permi\N{LATIN SMALL LETTER LONG S}sion denied", None),
    ],
)
def test_errors_are_found_by_their_text(line: str, error: tuple[int, int] | None) -> None:
    assert find_error(line) == error
    assert any(phrase in line.encode().lower() for phrase in ERROR_PHRASES) == (error is not None)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("touch: cannot touch '/etc/a b': x", ["/etc/a b"]),
        ("mv: cannot move 'a' to '/srv/b': x", ["a", "/srv/b"]),
        # The quoting of a shell.
        ("touch: cannot touch '/etc/it'\\''s': x", ["/etc/it's"]),
        ("touch: cannot touch '/etc/a'$'\\n''b': x", ["/etc/a\nb"]),
        (
            "touch: cannot touch '/etc/'$'\\303\\244': x",
            ["/etc/\N{LATIN SMALL LETTER A WITH DIAERESIS}"],
        ),
        ('touch: cannot touch "/etc/it\'s": x', ["/etc/it's"]),
        ("error: failed to create directory `/usr/target`", ["/usr/target"]),
        ("x: `/usr/target' is read-only", ["/usr/target"]),
        ("mkdir: \u2018/usr/x\u2019: x", ["/usr/x"]),
        # An apostrophe is no quote.
        ("can't open '/etc/x'", ["/etc/x"]),
        ("couldn't open temporary file /etc/sedXY: x", ["/etc/sedXY"]),
        ("in `initialize': x @ rb_sysopen - /etc/x (Errno::EROFS)", ["initialize", "/etc/x"]),
        # Paths without quotes, but not the program that reports the error.
        ("/bin/sh: 1: cannot create /etc/x: x", ["/etc/x"]),
        ("java.io.FileNotFoundException: /etc/x (x)", ["/etc/x"]),
        ("fopen(/etc/x): Failed to open stream: x", ["/etc/x"]),
        ("/etc/x: x", ["/etc/x"]),
        ("nothing here: x", []),
    ],
)
def test_find_names(line: str, names: list[str]) -> None:
    assert find_names(line).names == names


@pytest.mark.parametrize(
    ("before", "names"),
    [
        ("cat: notes.txt: ", ["notes.txt"]),
        ("sh: 1: cannot create ../x: ", ["../x"]),
        ("PermissionError: [Errno 13] ", []),
        ("bash: line 1: ", []),
        ("", []),
    ],
)
def test_likely_names(before: str, names: list[str]) -> None:
    assert likely_names(before) == names


def test_names_of_a_reason_in_a_line_of_its_own() -> None:
    assert names_above(["failed to create directory `/x`", "", "Caused by:"]) == ["/x"]
    assert names_above(["all is well: `/x`"]) == []


def test_lines_are_found_with_the_lines_before_them() -> None:
    data = b"1\n2\n3\n4\n5\nx DENIED y\nz\nno\x1b[31m Denied\x1b[0m, denied\n"
    assert list(lines_with(data, {b"denied", b"never"})) == [
        ("x DENIED y", ["2", "3", "4", "5"]),
        ("no Denied, denied", ["4", "5", "x DENIED y", "z"]),
    ]


def test_an_empty_first_line_is_no_part_of_the_next_one() -> None:
    assert list(lines_with(b"\ndenied", {b"denied"})) == [("denied", [""])]


def test_of_a_long_line_the_part_around_the_phrase_is_taken() -> None:
    half = denial.LINE_BYTES // 2
    ((line, _),) = lines_with(b"a" * 100_000 + b"!" + b"b" * 100_000, {b"!"})
    assert line == "a" * half + "!" + "b" * (half - 1)


def test_last_messages() -> None:
    assert last_messages(b"1\n\n2\r\n\x1b[1m3\x1b[0m\n\n", 2) == ["2", "3"]
    assert last_messages(b"", 2) == []
    assert len(last_messages(b"x" * 100_000, 2)[0]) == denial.LINE_BYTES
