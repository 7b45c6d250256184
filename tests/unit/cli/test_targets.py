"""TARGET:PATH arguments, and the flags for the access to a target."""

from __future__ import annotations

import pytest

from exec_server.cli.errors import UsageError
from exec_server.cli.info import build_parser
from exec_server.cli.targets import RemotePath, access_options, parse_remote_path


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("build:", RemotePath("build", "")),
        ("build:a", RemotePath("build", "a")),
        ("build:/a:/b", RemotePath("build", "/a:/b")),
        ("build:~/x", RemotePath("build", "~/x")),
        ("b-1.x_y:a\nb", RemotePath("b-1.x_y", "a\nb")),
        ("ws://h:7700", RemotePath("ws://h:7700", None)),
        ("ws://h:7700:", RemotePath("ws://h:7700", "")),
        ("ws://h:7700:/a", RemotePath("ws://h:7700", "/a")),
        ("ws://h:7700:/a:/b", RemotePath("ws://h:7700", "/a:/b")),
        ("ws://h:~", RemotePath("ws://h", "~")),
        ("wss://h/base:/a", RemotePath("wss://h/base", "/a")),
        ("ws://h:80/base", RemotePath("ws://h:80/base", None)),
        ("ws://a:b@h:80:/a", RemotePath("ws://a:b@h:80", "/a")),
        ("ws://[::1]:7700:/a", RemotePath("ws://[::1]:7700", "/a")),
        ("relay:https://r.net/b-7", RemotePath("relay:https://r.net/b-7", None)),
        ("relay:https://r.net:8/b-7:/a", RemotePath("relay:https://r.net:8/b-7", "/a")),
        ("stdio:/bin/x --listen stdio", RemotePath("stdio:/bin/x --listen stdio", None)),
        ("stdio:/bin/x stdio:/a", RemotePath("stdio:/bin/x stdio", "/a")),
        ("stdio:x ws://h:/a:~/b", RemotePath("stdio:x ws://h:/a", "~/b")),
        ("unix:/run/s", RemotePath("unix:/run/s", None)),
        ("unix:/run/s:", RemotePath("unix:/run/s", "")),
        ("unix:/run/s:/a", RemotePath("unix:/run/s", "/a")),
        ("unix:/run/s:~/a:b", RemotePath("unix:/run/s", "~/a:b")),
        ("unix:/run/s:0:/a", RemotePath("unix:/run/s:0", "/a")),
        ("unix:/run/s:a", RemotePath("unix:/run/s", "a")),
        ("/a:b", None),
        ("./a:b", None),
        ("a/b:c", None),
        ("file", None),
        (".hidden:a", None),
        (":a", RemotePath(":", "a")),
        (":", RemotePath(":", "")),
        (":~/x:y", RemotePath(":", "~/x:y")),
        ("", None),
    ],
)
def test_where_a_path_begins(text: str, path: RemotePath | None) -> None:
    assert parse_remote_path(text) == path


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("ws://h:7700:.", "ws://h:7700"),
        ("ws://h:7700:a/b", "ws://h:7700"),
        ("ws://h:7700:a:/b", "ws://h:7700"),
        ("wss://h:a", "wss://h"),
        ("ws://[::1]:7:a", "ws://[::1]:7"),
        ("ws://[::1]:a", "ws://[::1]"),
    ],
)
def test_a_relative_path_needs_a_name(text: str, url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_remote_path(text)
    assert str(caught.value).startswith(f"`{text}`: a path after {url} begins with / or ~; ")


def test_token_flags_exclude_each_other() -> None:
    words = ["--token-file", "f", "--token-env", "E", "build"]
    with pytest.raises(UsageError, match="exclude each other"):
        access_options(build_parser().parse_words(words))


def test_a_pin_replaces_root_certificates() -> None:
    with pytest.raises(UsageError, match="--ca-file and --pin exclude each other"):
        access_options(build_parser().parse_words(["--pin", "a", "--ca-file", "f", "build"]))
    words = ["--pin", "a", "--pin", "b", "--allow-insecure-token", "build"]
    given = access_options(build_parser().parse_words(words))
    assert (given.pin, given.allow_insecure_token) == (("a", "b"), True)


def test_flags_become_options() -> None:
    words = ["--token-env", "E", "--ca-file", "c", "build"]
    given = access_options(build_parser().parse_words(words))
    assert (given.token_env, given.ca_file) == ("E", "c")
