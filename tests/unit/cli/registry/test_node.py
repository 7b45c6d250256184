"""The flags of a node, and what it prints; a node that runs is in the integration tests."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from exec_server.cli.errors import UsageError
from exec_server.cli.registry import node
from exec_server.cli.registry.command import build_parser
from exec_server.errors import StartupError
from exec_server.hosting.rules import secret_hash
from exec_server.hosting.service import FirstStart, Listening
from exec_server.net.self_signed import make_self_signed

FIRST = Listening("node-1", FirstStart("default", "esr_e", "esr_c"))
LATER = Listening("node-1", None)
EMPTY = Listening("node-1", None, has_tenant=False)


def _place(*words: str) -> node._Place:
    place = node._bind(build_parser().parse_words(list(words)), None)
    place.bound.close()
    if place.metrics is not None:
        place.metrics.close()
    return place


def test_the_urls_follow_from_the_address() -> None:
    place = _place("--listen", "127.0.0.1:0")
    assert place.listen.startswith("127.0.0.1:")
    assert place.options.public_url == place.options.node_url == f"http://{place.listen}"
    words = ("--public-url", "https://r.example.net/x/", "--node-url", "http://10.0.0.1:1")
    place = _place("--listen", "0.0.0.0:0", *words, "--metrics-listen", "127.0.0.1:0")
    assert place.options.public_url == "https://r.example.net/x"
    assert place.options.node_url == "http://10.0.0.1:1"
    assert place.metrics is not None
    words = ("--public-url", "HTTPS://R.example.net/X", "--node-url", "Http://node:1/")
    place = _place("--listen", "127.0.0.1:0", *words)
    assert (place.options.public_url, place.options.node_url) == (
        "https://R.example.net/X",
        "http://node:1",
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--listen", "0.0.0.0:0"), "without TLS"),
        (("--listen", "x"), "expected IP:PORT"),
        (("--metrics-listen", "x"), "--metrics-listen"),
        (("--metrics-listen", "0.0.0.0:0"), "without a token: use --metrics-token-file"),
        (("--metrics-token-file", "/nonexistent"), "--metrics-token-file /nonexistent: "),
        (("--metrics-token-file", "/dev/null"), "it is empty"),
        (("--listen", "127.0.0.1:0", "--node-url", "http://[::]:1"), "cannot connect"),
        (("--public-url", "http://x/?y"), "must not have a query"),
        (("--public-url", "nothing"), "--public-url"),
    ],
)
def test_wrong_flags_are_explained(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        _place(*words)


def test_metrics_are_open_on_loopback_without_tls_alone(tmp_path: Path) -> None:
    assert _place("--listen", "127.0.0.1:0").options.metrics_are_open
    outside = ("--listen", "0.0.0.0:0", "--public-url", "https://x")
    assert not _place(*outside).options.metrics_are_open
    assert not _place(*outside).options.metrics_token_hash
    (tmp_path / "token").write_text("secret\n")
    words = ("--metrics-token-file", str(tmp_path / "token"), "--metrics-listen", "0.0.0.0:0")
    place = _place("--listen", "127.0.0.1:0", *words)
    assert place.options.metrics_token_hash == secret_hash("secret")
    assert place.metrics is not None
    insecure = ("--metrics-listen", "0.0.0.0:0", "--insecure-listen")
    assert _place("--listen", "127.0.0.1:0", *insecure).metrics is not None


def test_a_port_in_use_is_named_without_a_scheme() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        for flag in ("--listen", "--metrics-listen"):
            first = () if flag == "--listen" else ("--listen", "127.0.0.1:0")
            with pytest.raises(StartupError) as caught:
                _place(*first, flag, taken)
            text = f"{flag}: cannot listen on {taken}: Address in use (os error 98)"
            assert str(caught.value) == text


def test_an_exposed_address_may_be_wanted() -> None:
    assert _place("--listen", "0.0.0.0:0", "--insecure-listen").listen.startswith("0.0.0.0:")
    assert _place("--listen", "127.0.0.1:0", "--node-url", "http://node-1:1").options.node_url


@pytest.mark.parametrize("flag", ["--database", "--database-url-file"])
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_nodes_of_one_database_have_addresses_for_each_other(flag: str, listen: str) -> None:
    words = ("--listen", listen, "--insecure-listen", flag, "postgresql://x")
    with pytest.raises(UsageError, match="needs --node-url"):
        _place(*words)
    assert _place(*words, "--node-url", "http://node-1:1").options.node_url == "http://node-1:1"


def test_networks_of_proxies() -> None:
    assert len(node._networks(["10.0.0.0/8", "::1"])) == 2
    with pytest.raises(UsageError, match="--trust-forwarded"):
        node._networks(["x"])


def test_a_certificate_has_a_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from datetime import UTC, datetime

    parser = build_parser()
    assert node._certificate(parser.parse_words([])) is None
    with pytest.raises(UsageError, match="belong together"):
        node._certificate(parser.parse_words(["--tls-key", "x"]))
    made = make_self_signed(["localhost"], datetime.now(UTC), 3)
    (tmp_path / "cert").write_bytes(made.certificate)
    (tmp_path / "key").write_bytes(made.key)
    (tmp_path / "key").chmod(0o644)
    words = ["--tls-cert", str(tmp_path / "cert"), "--tls-key", str(tmp_path / "key")]
    assert node._certificate(parser.parse_words(words)) is not None
    assert "chmod 600" in capfd.readouterr().err


def test_data_that_other_users_may_open_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "my data"
    node._warn_about_modes(directory)
    directory.mkdir(0o700)
    database = directory / "registry.db"
    database.touch(0o600)
    node._warn_about_modes(directory)
    assert capfd.readouterr().err == ""
    directory.chmod(0o755)
    database.chmod(0o640)
    node._warn_about_modes(directory)
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition("run ")[2] for line in lines] == [
        f"`chmod 700 '{directory}'`",
        f"`chmod 600 '{database}'`",
    ]
    assert directory.stat().st_mode & 0o777 == 0o755


def test_the_first_lines(capfd: pytest.CaptureFixture[str]) -> None:
    place = _place("--listen", "127.0.0.1:0")
    arguments = build_parser().parse_words([])
    node._print_listening(arguments, place, EMPTY)
    text = capfd.readouterr().out
    assert text.startswith(
        f"listening on {place.listen} as node-1, for {place.options.public_url}\n"
    )
    assert "`exec-server registry init`" in text
    node._print_listening(arguments, place, LATER)
    assert capfd.readouterr().out.count("\n") == 1
    arguments = build_parser().parse_words(["--print-json"])
    for facts in (FIRST, LATER):
        node._print_listening(arguments, place, facts)
        event = json.loads(capfd.readouterr().out)
        assert event["first_start"] is (facts is FIRST)
        assert ("executor_token" in event) is (facts is FIRST)
