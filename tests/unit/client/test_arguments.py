"""Paths on another machine."""

from __future__ import annotations

import errno
from pathlib import Path, PurePosixPath, PureWindowsPath

import msgspec
import pytest

from exec_server.client.arguments import AnyPath, PathResolver, decoded, encoded, is_dot, native
from exec_server.client.engine.messages import decode_environment
from exec_server.client.exceptions import SandboxDenied, path_error
from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.protocol.sandbox import Denial


def resolver(**members: object) -> PathResolver:
    info = {"shell": {"name": "sh", "path": "/bin/sh"}, **members}
    return PathResolver(decode_environment(msgspec.Raw(msgspec.json.encode(info))))


THERE = resolver(cwd="file:///work%20shop", userHomeDir="file:///home/me")


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("/a/b", "file:///a/b"),
        (Path("/a"), "file:///a"),
        (PurePosixPath("c"), "file:///work%20shop/c"),
        ("file:x", "file:///work%20shop/file:x"),
        (".", "file:///work%20shop"),
        ("../x", "file:///x"),
        ("~", "file:///home/me"),
        ("~/a?b", "file:///home/me/a%3Fb"),
        ("~other", "file:///work%20shop/%7Eother".replace("%7E", "~")),
        ("file:///a%20b", "file:///a%20b"),
        ("/\udcff", "file:///%FF"),
        ("C:\\Users\\me", "file:///C:/Users/me"),
    ],
)
def test_paths_become_uris(path: AnyPath, uri: str) -> None:
    assert THERE.uri(path).uri == uri


@pytest.mark.parametrize("path", ["/nul\0", "/lone\ud800", "lone\ud800", "file:///lone\ud800"])
def test_a_path_that_no_machine_has_is_invalid(path: str) -> None:
    with pytest.raises(InvalidParams):
        THERE.uri(path)


@pytest.mark.parametrize(
    ("path", "absolute"),
    [
        ("file:///a%20b", "/a b"),
        ("file:///a%2520b/", "/a%20b"),
        ("file://localhost/a", "/a"),
        ("file:///C:/a", "file:///C:/a"),
        ("file:", "/work shop/file:"),
        ("file:/a", "/work shop/file:/a"),
        ("/a%20b", "/a%20b"),
        ("file", "/work shop/file"),
    ],
)
def test_uris_stand_for_paths(path: AnyPath, absolute: str) -> None:
    assert THERE.absolute(path) == absolute


@pytest.mark.parametrize("path", ["", b""])
def test_an_empty_path_is_refused_by_the_name_of_its_argument(path: AnyPath) -> None:
    with pytest.raises(ValueError, match=r"^path must not be empty"):
        THERE.uri(path)
    with pytest.raises(ValueError, match=r"^root must not be empty"):
        THERE.absolute(path, "root")


@pytest.mark.parametrize(
    ("path", "expected"),
    [(".", True), ("..", True), ("a/./", True), (b"/a/..", True), ("/a/.b", False), ("/", False)],
)
def test_paths_without_a_name(path: AnyPath, expected: bool) -> None:
    assert is_dot(path) == expected


def test_a_server_that_says_little() -> None:
    bare = resolver()
    assert (bare.cwd, bare.home) == ("/", None)
    assert bare.uri("~/a").uri == "file:///~/a"
    assert resolver(userHomeDir="file:///home/me").cwd == "/home/me"


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///a%20b", "/a b"),
        ("file:///%FF", "/\udcff"),
        ("/plain", "/plain"),
        ("file:///C:/x", "file:///C:/x"),
        ("nonsense", "nonsense"),
    ],
)
def test_uris_become_paths(uri: str, path: str) -> None:
    assert native(uri) == path


def test_a_path_of_windows_has_slashes_on_the_server() -> None:
    assert decoded(PureWindowsPath("a") / "b") == "a/b"
    assert decoded(PurePosixPath("a\\b")) == "a\\b"


def test_bytes_are_utf_8_on_the_server_whatever_the_client_uses() -> None:
    assert decoded(b"\xff\xc3\xa4") == "\udcffä"
    assert encoded("\udcffä") == b"\xff\xc3\xa4"


def test_the_account_of_a_denied_file_operation() -> None:
    error = InvalidRequest("Permission denied (os error 13)")
    error.data = {"sandboxDenial": {"path": "/x", "operation": "read", "rule": "deny entry /x"}}
    denied = path_error(error, "/x", is_confined=True)
    assert isinstance(denied, SandboxDenied)
    assert denied.denial == Denial(None, "/x", "read", "deny entry /x")
    assert str(denied) == "/x: Permission denied (deny entry /x)"
    assert (denied.errno, denied.filename) == (errno.EACCES, "/x")
    unpermitted = path_error(InvalidRequest("no (os error 1)"), "/x", is_confined=True)
    assert isinstance(unpermitted, SandboxDenied)
    assert unpermitted.errno == errno.EPERM
    for data in ({"sandboxDenial": 7}, {"sandboxDenial": {"path": 7}}, "text"):
        error.data = data
        unknown = path_error(error, "/x", is_confined=True)
        assert isinstance(unknown, SandboxDenied)
        assert unknown.denial is None
