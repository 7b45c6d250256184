"""The command: help, flags, and the URLs that it listens on."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from tests.support.certificates import make_pair
from tests.support.client import run_command, start_server

_LOOPBACK = "ws://127.0.0.1:0"


@pytest.mark.quick
def test_help_teaches() -> None:
    ended = run_command("ours", "serve", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert run_command("ours", "--listen", "stdio", "-h").stdout == ended.stdout
    for word in ("--listen", "--concurrent-requests", "--ws-auth", "--session-retention"):
        assert word in ended.stdout
    assert "examples:" in ended.stdout
    for word in ("--remote", "--environment-id"):
        assert word in ended.stdout


def test_every_example_of_the_help_starts(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token")
    make_pair(tmp_path, "cert", "127.0.0.1").key.rename(tmp_path / "key.pem")
    help_text = run_command("ours", "serve", "--help").stdout
    examples = re.findall(r"^  exec-server(.*)$", help_text, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        words = example.split()
        if "--remote" in words:
            words = ["http://127.0.0.1:9" if word == "URL" else word for word in words]
            refused = run_command("ours", *words)
            assert refused.returncode == 1
            assert "requires ChatGPT authentication or API key" in refused.stderr
            continue
        if "stdio" in words:
            assert run_command("ours", *words).returncode == 0
            continue
        # Any port but theirs, which may be taken here, and a socket in our own directory.
        words = [re.sub(r":7700$", ":0", word) for word in words]
        words = [re.sub(r"unix:.*", f"unix:{tmp_path}/s", word) for word in words]
        flags = words if "--listen" in words else ["--listen", _LOOPBACK]
        with start_server("ours", *flags, cwd=tmp_path) as server:
            assert server.url.startswith(("ws://", "wss://", "unix:"))


@pytest.mark.quick
def test_help_lists_the_commands_of_people_first() -> None:
    ended = run_command("ours", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.index("\n  exec ") < ended.stdout.index("\n  serve ")
    assert "--ws-auth" not in ended.stdout
    assert run_command("ours", "help").stdout == ended.stdout


@pytest.mark.parametrize(("words", "usage"), [("forward", "forward"), ("sandbox run", "sandbox")])
def test_help_of_a_command(words: str, usage: str) -> None:
    shown = run_command("ours", "help", *words.split())
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"usage: exec-server {usage}")
    assert run_command("ours", *words.split(), "--help").stdout == shown.stdout


def test_an_unknown_command_suggests_the_nearest() -> None:
    ended = run_command("ours", "exce", "build")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: unknown command `exce`; did you mean `exec`?\n")


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(word: str) -> None:
    ended = run_command("ours", word)
    assert ended.returncode == 0
    form = r"exec-server \d+\.\d+\.\d+(\.dev\d+)?( \(commit [0-9a-f]{12}\))?\n"
    assert re.fullmatch(form, ended.stdout)


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-such-flag"],
        ["word"],
        ["--listen"],
        ["--concurrent-requests", "0"],
        ["--concurrent-requests", "-1"],
        ["--concurrent-requests", "x"],
        ["--concurrent-requests", "1.5"],
        ["--session-retention", "-1"],
        ["--session-retention", "nan"],
        ["--session-retention", "x"],
        ["--ws-auth", "password"],
        ["--ws-max-clock-skew-seconds", "x"],
        ["--log-level", "loud"],
        ["--log-format", "xml"],
        ["--concurrent", "2"],  # no abbreviations: they would break when flags are added
    ],
)
def test_wrong_flags_are_usage_errors(flags: list[str]) -> None:
    ended = run_command("ours", *flags)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: ")
    assert re.search(r"try 'exec-server (serve )?--help'", ended.stderr)


_SCHEMES = "expected `ws://IP:PORT` or `stdio`, or `wss://IP:PORT` or `unix:/PATH`"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:1", f"unsupported --listen URL `{{}}`; {_SCHEMES}"),
        ("WS://127.0.0.1:1", f"unsupported --listen URL `{{}}`; {_SCHEMES}"),
        ("", f"unsupported --listen URL `{{}}`; {_SCHEMES}"),
        ("ws://example.net:1", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://127.0.0.1", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://127.0.0.1:1/", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://127.0.0.1:65536", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://256.0.0.1:1", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://::1:1", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
    ],
)
def test_wrong_listen_urls(url: str, text: str) -> None:
    ended = run_command("ours", "--listen", url)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: {text.format(url)}\n"


def test_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        url = f"ws://127.0.0.1:{holder.getsockname()[1]}"
        ended = run_command("ours", "--listen", url)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: cannot listen on {url}: Address in use (os error 98)\n"


def test_port_can_be_used_again_at_once() -> None:
    with start_server("ours") as server:
        url = server.url
        client = server.connect()
    client.close()
    with start_server("ours", "--listen", url) as server:
        assert server.url == url


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]"])
def test_listening_beyond_loopback_needs_authentication(address: str, tmp_path: Path) -> None:
    if "::" in address and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    url = f"ws://{address}:0"
    ended = run_command("ours", "--listen", url)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(
        r"Error: refusing to listen on \S+ without authentication: .*--allow-unauthenticated\n",
        ended.stderr,
    )
    (tmp_path / "token").write_text("a-token")
    token = ("--ws-auth", "capability-token", "--ws-token-file", str(tmp_path / "token"))
    for flags in (("--allow-unauthenticated",), token):
        with start_server("ours", "--listen", url, *flags) as server:
            assert server.url.startswith(f"ws://{address}:")


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
