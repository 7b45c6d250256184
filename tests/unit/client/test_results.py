"""Values that the client returns."""

from __future__ import annotations

from exec_server.client.results import Entry, Response, Result


def test_a_result_as_text_and_as_truth() -> None:
    result = Result(("a",), b"o\xff", b"e\xff", 0, 0.1)
    assert (result.text, result.error_text, bool(result)) == ("o\ufffd", "e\ufffd", True)
    assert not Result(("a",), b"", b"", 1, 0.1)


def test_an_entry_has_a_name() -> None:
    assert Entry("/a/b", is_directory=False, is_file=True).name == "b"


def test_headers_are_found_in_any_case() -> None:
    response = Response(200, (("a", "1"), ("A", "2"), ("b", "3")), b"x\xff")
    assert [response.header(name) for name in ("A", "B", "c")] == ["1", "3", None]
    assert response.text == "x\ufffd"
