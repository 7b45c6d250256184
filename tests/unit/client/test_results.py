"""Values that the client returns."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.client.results import Entry, Response, Result


def test_a_result_as_text_and_as_truth() -> None:
    result = Result(("a",), b"o\xff", b"e\xff", 0, 0.1)
    assert (result.text, result.error_text, bool(result)) == ("o\ufffd", "e\ufffd", True)
    assert not Result(("a",), b"", b"", 1, 0.1)


def test_the_ends_of_a_long_output() -> None:
    short = Result(("a",), b"out", b"err\n", 0, 0.1)
    assert short.head_and_tail(100) == "out\nerr\n"
    assert Result(("a",), b"", b"err", 0, 0.1).head_and_tail(3) == "err"
    long = Result(("a",), b"begin\n" + b"x" * 100 + b"\nend\n", b"", 0, 0.1)
    assert long.head_and_tail(11) == "begin\n[… 100 bytes left out …]\nend\n"
    assert long.head_and_tail(0) == "[… 111 bytes left out …]"
    lost = Result(("a",), b"kept", b"", 0, 0.1, lost_bytes=7)
    assert lost.head_and_tail(100) == "kept\n[… 7 bytes left out …]"
    with pytest.raises(ValueError, match="limit must not be negative"):
        long.head_and_tail(-1)


def test_the_note_stands_where_bytes_are_missing() -> None:
    parts: dict[str, Any] = {"lost_bytes": 50, "lost_stdout": 30, "lost_stderr": 20}
    ends = Result(("a",), b"1\n2\n8\n9\n", b"a\nb\ny\nz\n", 0, 0.1, kept_head=4, **parts)
    first, second = "[… 30 bytes left out …]", "[… 20 bytes left out …]"
    assert ends.head_and_tail(100) == f"1\n2\n{first}\n8\n9\na\nb\n{second}\ny\nz\n"
    cut = f"1\n2\n{first}\n8\n[… 4 bytes left out …]\nb\n{second}\ny\nz\n"
    assert ends.head_and_tail(12) == cut
    assert ends.head_and_tail(4) == "1\n[… 62 bytes left out …]\nz\n"
    beginning = Result(("a",), b"1\n2\n", b"a\n", 0, 0.1, **parts)
    assert beginning.head_and_tail(100) == f"1\n2\n{first}\na\n{second}"
    no_head = Result(("a",), b"8\n9\n", b"", 0, 0.1, lost_bytes=3, lost_stdout=3, kept_head=0)
    assert no_head.head_and_tail(100) == "[… 3 bytes left out …]\n8\n9\n"
    whole = Result(("a",), b"1\n\n2\n", b"", 0, 0.1, lost_bytes=3, lost_stdout=3, kept_head=3)
    assert whole.head_and_tail(100) == "1\n\n[… 3 bytes left out …]\n2\n"


def test_characters_are_not_cut() -> None:
    result = Result(("a",), "äöü€😀".encode() * 20, b"", 0, 0.1)
    for limit in range(1, 60):
        text = result.head_and_tail(limit)
        assert "\ufffd" not in text
        assert len(text.encode()) <= limit + 40
    broken = Result(("a",), b"\x80" * 100, b"", 0, 0.1)
    assert "bytes left out" in broken.head_and_tail(10)


def test_the_representation_of_a_result_is_short() -> None:
    short = Result(("a", "b"), b"out", b"", 3, 0.1)
    assert repr(short) == (
        "Result(argv=('a', 'b'), exit_code=3, stdout=b'out', stderr=b'', duration=0.100)"
    )
    long = Result(("a" * 9999,), b"\n" * 9999, b"\xff" * 9999, 0, 0.1, True, None, 5)
    text = repr(long)
    assert len(text) < 1500
    assert "(9999 bytes)" in text
    assert text.endswith("sandbox_denied=True, lost_bytes=5)")


def test_an_entry_has_a_name() -> None:
    assert Entry("/a/b", is_directory=False, is_file=True).name == "b"


def test_headers_are_found_in_any_case() -> None:
    response = Response(200, (("a", "1"), ("A", "2"), ("b", "3")), b"x\xff")
    assert [response.header(name) for name in ("A", "B", "c")] == ["1", "3", None]
    assert response.text == "x\ufffd"
