"""Any string is a path or a documented error; native paths survive the way there and back."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.protocol.paths import PathUri, path_to_uri

_PIECES = st.sampled_from(
    [
        *("/", "//", "\\", ".", "..", "%2e", "%2F", "%00", "%zz", "%", "c:", "C|", "c%3a", "a"),
        *("é", " ", "?", "#", "@", ":", "\t", "localhost", "server", "1", "[::1]", "file:"),
        *("bad/path/", "L0M6"),
    ]
)
_URIS = st.builds(
    lambda start, pieces: start + "".join(pieces),
    st.sampled_from(["", "file:", "file://", "file:///", "FILE:/", "file:///%00/bad/path/"]),
    st.lists(_PIECES, max_size=8),
)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(_URIS | _TEXT | _TEXT.map(lambda text: f"file:///{text}"))
def test_any_text_is_a_path_or_an_error(text: str) -> None:
    try:
        path = PathUri.from_wire(text)
    except InvalidParams:
        return
    assert path.uri.isascii()
    assert path.uri.startswith("file://")
    again = PathUri.from_wire(path.uri)
    try:
        native = path.native()
    except InvalidRequest:
        # A path of another platform stays one.
        with pytest.raises(InvalidRequest):
            again.native()
        return
    # The normalised text means the same path.
    assert (again, again.native()) == (path, native)
    assert native[0] == "/"
    segments = native.split("/")[1:]
    assert native == "/" or not {"", ".", ".."} & set(segments)


@given(st.lists(st.binary(min_size=1, max_size=8), max_size=5))
@example([b"C:", b"x"])
@example([b"\xff"])
def test_native_paths_survive_the_way_there_and_back(names: list[bytes]) -> None:
    names = [name.replace(b"/", b"_").replace(b"\0", b"_") for name in names]
    names = [name for name in names if name not in (b".", b"..")]
    native = b"/" + b"/".join(names)
    path = PathUri.from_wire(path_to_uri(native))
    assert path.native().encode("utf-8", "surrogateescape") == native


@given(_TEXT)
def test_native_text_is_taken_literally(text: str) -> None:
    try:
        path = PathUri.from_wire(f"/{text}")
    except InvalidParams:
        assert "\0" in text
        return
    assert PathUri.from_wire(path.uri).native() == path.native()
