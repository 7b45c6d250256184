"""Paths on another machine."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

import msgspec
import pytest

from exec_server.client.engine.messages import decode_environment
from exec_server.client.paths import AnyPath, PathResolver, decoded, encoded, native


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
        ("", "file:///work%20shop"),
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


@pytest.mark.parametrize(
    ("path", "absolute"),
    [
        ("file:///a%20b", "/a b"),
        ("file:///a%2520b/", "/a%20b"),
        ("file://localhost/a", "/a"),
        ("file:///C:/a", "file:///C:/a"),
        ("file:", "/"),
        ("/a%20b", "/a%20b"),
        ("file", "/work shop/file"),
    ],
)
def test_uris_stand_for_paths(path: AnyPath, absolute: str) -> None:
    assert THERE.absolute(path) == absolute


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
