"""Path URIs: the texts and cases were asked of the reference."""

from __future__ import annotations

import pytest

from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.protocol.paths import (
    PATH_CHARACTERS,
    RECENT_CHARACTERS,
    RECENT_PATHS,
    PathUri,
    child_uri,
    path_to_uri,
)
from exec_server.protocol.sandbox import FileUri


@pytest.mark.parametrize(
    ("text", "uri", "native"),
    [
        ("file:///a/b.txt", "file:///a/b.txt", "/a/b.txt"),
        ("file:///a/.git/..x", "file:///a/.git/..x", "/a/.git/..x"),
        ("file:///a/b/", "file:///a/b/", "/a/b"),
        ("file:///a//b", "file:///a//b", "/a/b"),
        ("file:////a//b", "file:///a//b", "/a/b"),
        ("file:///a/./b/../c", "file:///a/c", "/a/c"),
        ("file:///a/b/..", "file:///a/", "/a"),
        ("file:///../../a", "file:///a", "/a"),
        ("file:///a/%2E%2e/b", "file:///b", "/b"),
        ("file:///a/.%2e/b", "file:///b", "/b"),
        ("file:///a%2F..%2Fb", "file:///a%2F..%2Fb", "/b"),
        ("file:a/b", "file:///a/b", "/a/b"),
        ("file:/a", "file:///a", "/a"),
        ("file:", "file:///", "/"),
        ("file://", "file:///", "/"),
        ("FiLe:///a", "file:///a", "/a"),
        (" \x00fi\tle:/\n//a\x1f ", "file:///a", "/a"),
        ("file:\\\\\\a\\b", "file:///a/b", "/a/b"),
        ("file://LOCALHOST/a", "file:///a", "/a"),
        ("file://localhost", "file:///", "/"),
        ("file://%6Cocalhost//a", "file:///a", "/a"),
        ('file:///a b"<>`{}|^[]é%zz%', "file:///a%20b%22%3C%3E%60%7B%7D|^[]%C3%A9%zz%", None),
        ("file:///a\x01b\x7f", "file:///a%01b%7F", "/a\x01b\x7f"),
        ("file:///bad%FF", "file:///bad%FF", "/bad\udcff"),
        ("file:///%5C%25%3F%23", "file:///%5C%25%3F%23", "/\\%?#"),
        ("file:///c|/x", "file:///c|/x", "/c|/x"),
        ("file:///c:x", "file:///c:x", "/c:x"),
        ("file:///1:/x", "file:///1:/x", "/1:/x"),
        ("file:///%43:/x", "file:///%43:/x", "/C:/x"),
        ("file:///C:%2Fx", "file:///C:%2Fx", "/C:/x"),
        ("file:///a/c:/../b", "file:///a/c:/b", "/a/c:/b"),
        ("file:///%00/bad/path/L0M6L3g", "file:///%00/bad/path/L0M6L3g", "/C:/x"),
        ("file:///a/../%00/bad/path/L0M6", "file:///%00/bad/path/L0M6", "/C:"),
        # A superset: native paths, taken literally.
        ("/a/b", "file:///a/b", "/a/b"),
        ("/a/%41/../b c/", "file:///a/b%20c", "/a/b c"),
        ("/", "file:///", "/"),
        ("/../a", "file:///a", "/a"),
        # As many characters go as escapes add: a length alone says nothing.
        ("///\\", "file:///%5C", "/\\"),
        ("/é", "file:///%C3%A9", "/é"),
        ("/a?b#c", "file:///a%3Fb%23c", "/a?b#c"),
        ("/C:/x", "file:///%00/bad/path/L0M6L3g", "/C:/x"),
    ],
)
def test_a_path_of_this_platform(text: str, uri: str, native: str | None) -> None:
    path = PathUri.from_wire(text)
    assert path.uri == str(path) == uri
    if native is not None:
        assert path.native() == native


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("file:///c:/x", "file:///C:/x"),
        ("file:///c:", "file:///C:"),
        ("file:///c%3A/x", "file:///C%3A/x"),
        ("file://c|/x", "file:///C:/x"),
        ("file://C:/x", "file:///C:/x"),
        ("file:c|", "file:///C:"),
        ("file:/c|/x", "file:///C:/x"),
        ("file:///a/../../c:/x", "file:///C:/x"),
        ("file:///c:/..", "file:///C:/"),
        ("file://server/c|/..", "file:///C:/"),
        ("file://localhost/c:/x", "file:///C:/x"),
        ("file://Server/share/../x", "file://server/x"),
        ("file://server", "file://server/"),
        ("file://ser%76er//x", "file://server/x"),
        ("file://a..b/x", "file://a..b/x"),
        ("file://sér/x", "file://xn--sr-bja/x"),
        ("file://.é/", "file://.xn--9ca/"),
        ("file://1/x", "file://0.0.0.1/x"),
        ("file://0x7f.010.1/x", "file://127.8.0.1/x"),
        ("file://1.2.3.4./x", "file://1.2.3.4/x"),
        ("file://[::1]/x", "file://[::1]/x"),
        # Opaque URIs of paths that do not need them.
        ("file:///%00/bad/path/L2E", "file:///%00/bad/path/L2E"),
        ("file:///%00/bad/path/L0M6Lw", "file:///%00/bad/path/L0M6Lw"),
        ("file:///%00/bad/path/cmVs", "file:///%00/bad/path/cmVs"),
    ],
)
def test_a_path_of_another_platform_fails_when_it_is_used(text: str, uri: str) -> None:
    path = PathUri.from_wire(text)
    assert path.uri == uri
    with pytest.raises(InvalidRequest, match="is invalid on 'linux'") as caught:
        path.native()
    assert caught.value.message == f"'{uri}' is invalid on 'linux'"
    with pytest.raises(InvalidParams):
        path.native(InvalidParams)


def test_native_path_never_leaves_the_root() -> None:
    assert PathUri.from_wire("/../a/../../b").native() == "/b"
    assert path_to_uri(b"/../%") == "file:///%25"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid URI: relative URL without a base"),
        ("a.txt", "invalid URI: relative URL without a base"),
        ("~/x", "invalid URI: relative URL without a base"),
        ("  /a", "invalid URI: relative URL without a base"),
        ("1file:///a", "invalid URI: relative URL without a base"),
        ("\\a", "invalid URI: relative URL without a base"),
        ("C:\\x", "unsupported path URI scheme `c`"),
        ("HTTP://x", "unsupported path URI scheme `http`"),
        ("file:///a?", "query parameters are not allowed in path URIs"),
        ("file:///a?#", "query parameters are not allowed in path URIs"),
        ("file:///a#?", "fragments are not allowed in path URIs"),
        ("file://user@localhost/x", "invalid URI: invalid international domain name"),
        ("file://localhost:80/x", "invalid URI: invalid international domain name"),
        ("file://a%FF/x", "invalid URI: invalid international domain name"),
        ("file://xn--/x", "invalid URI: invalid international domain name"),
        ("file://256.256.256.256/x", "invalid URI: invalid international domain name"),
        ("file://1.2.3.4.5/x", "invalid URI: invalid international domain name"),
        ("file://a.1/x", "invalid URI: invalid international domain name"),
        ("file://[::1/x", "invalid URI: invalid international domain name"),
        ("file://[::g]/x", "invalid URI: invalid international domain name"),
        ("file:///a%00", "'file:///a%00' is invalid on 'linux'"),
        ("file:///c:/x%00", "'file:///c:/x%00' is invalid on 'linux'"),
        (
            "file://server/%00/bad/path/L0M6",
            "'file://server/%00/bad/path/L0M6' is invalid on 'linux'",
        ),
        ("file:///%00/bad/path/L0M6L3h", "'file:///%00/bad/path/L0M6L3h' is invalid on 'linux'"),
        ("file:///%00/bad/path/L0M6L", "'file:///%00/bad/path/L0M6L' is invalid on 'linux'"),
        ("file:///%00/bad/path/", "'file:///%00/bad/path/' is invalid on 'linux'"),
        ("/a\0b", "'file:///%00/bad/path/L2EAYg' is invalid on 'linux'"),
    ],
)
def test_what_is_no_path_uri(text: str, message: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        PathUri.from_wire(text)
    assert caught.value.message == message


def test_a_nul_byte_in_an_opaque_uri_fails_when_it_is_used() -> None:
    path = PathUri.from_wire("file:///%00/bad/path/L2EAYg")
    with pytest.raises(InvalidRequest, match="file name contained an unexpected NUL byte"):
        path.native()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null"),
        (True, "boolean `true`"),
        (5, "number"),
        (1.5, "number"),
        ([], "sequence"),
        ({}, "map"),
    ],
)
def test_a_path_must_be_a_string(value: object, kind: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        PathUri.from_wire(value)
    assert caught.value.message == f"invalid type: {kind}, expected a string"


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("/a/b.c", "file:///a/b.c"),
        ("/", "file:///"),
        ("/tmp/", "file:///tmp"),
        (b"/\xff %\xc3\xa9", "file:///%FF%20%25%C3%A9"),
        ("/\udcff", "file:///%FF"),
        ("/!$&'()*+,-.:;=@[]^_|~", "file:///!$&'()*+,-.:;=@[]^_|~"),
        ("/C:", "file:///%00/bad/path/L0M6"),
        ("/C:x", "file:///C:x"),
        ("relative", "file:///%00/bad/path/cmVsYXRpdmU"),
    ],
)
def test_the_uri_of_a_native_path(path: str | bytes, uri: str) -> None:
    assert path_to_uri(path) == uri


def test_the_uri_of_an_entry_keeps_the_spelling_of_its_directory() -> None:
    assert child_uri("file:///a%62", "x:y") == "file:///a%62/x:y"
    assert child_uri("file:///a", "q?#% é") == "file:///a/q%3F%23%25%20%C3%A9"


def test_paths_are_equal_by_their_uri() -> None:
    path = PathUri.from_wire("file:/a")
    assert path == PathUri.from_wire("/a")
    assert hash(path) == hash(PathUri.from_wire("/a"))
    assert path != PathUri.from_wire("/b")
    assert path != "file:///a"
    assert repr(path) == "PathUri('file:///a')"


@pytest.mark.parametrize("unit", ["/a", "/..", "%41", " ", "\u00e4", "/", "?"])
@pytest.mark.parametrize("start", ["/", "file:///", "file://host/", ""])
def test_long_paths_are_refused_before_they_are_normalised(start: str, unit: str) -> None:
    text = start + unit * (PATH_CHARACTERS // len(unit)) + " /"
    with pytest.raises(InvalidParams, match=r"^path exceeds 65536 characters$"):
        PathUri.from_text(text)


def test_long_plain_paths_are_left_to_the_kernel() -> None:
    path = "/a" * PATH_CHARACTERS
    assert PathUri.from_text("file://" + path).native() == path


def test_a_path_is_parsed_once() -> None:
    for text in ("file:///once/a", "/once/b", "file:///once/%41/../c"):
        first, again = PathUri.from_wire(text), PathUri.from_wire(text[:3] + text[3:])
        assert first is again
        assert (first.uri, first.native()) == (
            PathUri.from_text(text).uri,
            PathUri.from_text(text).native(),
        )


def test_a_refused_path_is_refused_again_and_in_each_class() -> None:
    assert PathUri.from_wire("/once/native") is PathUri.from_wire("/once/native")
    for text in ("/once/native", "file:///x?y"):
        for _ in range(2):
            with pytest.raises(InvalidParams):
                FileUri.from_wire(text)
    assert type(FileUri.from_wire("file:///once/a")) is FileUri
    assert type(PathUri.from_wire("file:///once/a")) is PathUri


def test_only_some_short_paths_are_kept() -> None:
    long = "/" + "x" * RECENT_CHARACTERS
    for text in (long, "/\u00e9"):
        assert PathUri.from_wire(text) is not PathUri.from_wire(text)
    assert PathUri.from_wire(long[:-1]) is PathUri.from_wire(long[:-1])
    for number in range(2 * RECENT_PATHS):
        PathUri.from_wire(f"/once/{number}")
        assert len(PathUri._recent) <= RECENT_PATHS
    assert PathUri.from_wire("/once/0").native() == "/once/0"
