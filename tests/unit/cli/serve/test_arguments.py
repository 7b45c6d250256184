"""The flags of the server: defaults, combinations, help."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from exec_server.cli.serve import arguments
from exec_server.cli.serve.arguments import (
    DEFAULT_LISTEN_URL,
    build_forward_parser,
    build_parser,
    build_up_parser,
    ignored_flags,
    parse,
    parse_up,
    stdin_flags,
)
from exec_server.process.table import RETENTION_SECONDS
from exec_server.server.serve import DEFAULT_RETENTION_SECONDS, MAX_RETENTION_SECONDS

_REMOTE = ["--remote", "https://r", "--environment-id", "e"]


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXEC_SERVER_LOG", "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE"):
        monkeypatch.delenv(name, raising=False)
    arguments = parse([])
    assert (arguments.listen, arguments.concurrent_requests) == ([DEFAULT_LISTEN_URL], 1)
    assert (arguments.session_retention, arguments.log_level) == (80.0, "error")
    assert arguments.max_session_retention == MAX_RETENTION_SECONDS
    retentions = (arguments.session_retention, arguments.process_retention)
    assert retentions == (DEFAULT_RETENTION_SECONDS, RETENTION_SECONDS)
    assert not arguments.exit_on_stdin_close
    assert not arguments.forward


@pytest.mark.parametrize(
    ("words", "retention"),
    [
        ("--session-retention 0", 80.0),
        ("--session-retention 600", 600.0),
        ("--session-retention 600 --process-retention 5", 5.0),
        ("--process-retention 0", 0.0),
    ],
)
def test_a_longer_session_keeps_its_finished_processes(words: str, retention: float) -> None:
    assert parse(words.split()).process_retention == retention


def test_listen_may_be_repeated() -> None:
    urls = ["unix:/s", "wss://127.0.0.1:0"]
    words = [word for url in urls for word in ("--listen", url)]
    arguments = parse([*words, "--tls-cert", "c", "--tls-key", "k"])
    assert arguments.listen == urls
    assert (arguments.tls_cert, arguments.tls_key) == ("c", "k")


def test_variables_change_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXEC_SERVER_LOG", "info")
    monkeypatch.setenv("CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE", "true")
    arguments = parse([])
    assert (arguments.log_level, arguments.exit_on_stdin_close) == ("info", True)
    assert parse(["--log-level", "debug"]).log_level == "debug"


@pytest.mark.parametrize("flag", ["--legacy-sandbox-forms", "--older-sandbox-forms"])
def test_flags_for_legacy_sandbox_forms_are_accepted_and_hidden(flag: str) -> None:
    parse([flag])
    assert flag not in build_parser().format_help()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], None),
        (["--linux-sandbox-pid-namespace", "isolate", "--proxy-private-ips-via-upstream"], None),
        (["-c", "a=1"], "Warning: --config has no effect: flags alone configure this server"),
        (
            ["-ca=1", "--enable", "x", "--config=b=2", "--disable", "y", "--strict-config"],
            "Warning: --config, --enable, --disable, --strict-config have no effect: flags alone "
            "configure this server",
        ),
        (
            ["--linux-sandbox-pid-namespace", "inherit", "--strict-config"],
            "Warning: --strict-config has no effect: flags alone configure this server; "
            "--linux-sandbox-pid-namespace inherit has no effect: confined commands stay isolated "
            "and cannot signal other processes",
        ),
    ],
)
def test_flags_of_codex_without_effect_are_named(words: list[str], text: str | None) -> None:
    assert ignored_flags(parse(words)) == text


@pytest.mark.parametrize(("value", "is_set"), [("true", True), ("false", False), ("", False)])
def test_private_addresses_via_upstream_by_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, is_set: bool
) -> None:
    monkeypatch.setenv("CODEX_EXEC_SERVER_PROXY_PRIVATE_IPS_VIA_UPSTREAM", value)
    assert parse([]).proxy_private_ips_via_upstream == is_set
    assert parse(["--proxy-private-ips-via-upstream"]).proxy_private_ips_via_upstream


@pytest.mark.parametrize("value", ["1", "TRUE", "yes"])
def test_private_addresses_via_upstream_by_an_invalid_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setenv("CODEX_EXEC_SERVER_PROXY_PRIVATE_IPS_VIA_UPSTREAM", value)
    with pytest.raises(SystemExit, match="2"):
        parse([])
    assert "UPSTREAM must be true or false" in capsys.readouterr().err


def test_help_fits_and_its_examples_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = build_parser().format_help()
    assert max(map(len, text.splitlines())) <= 100
    examples = re.findall(r"^  exec-server (?:serve)?(.*)$", text.partition("examples:")[2], re.M)
    assert len(examples) >= 6
    for example in examples:
        parse(shlex.split(example))


def test_forward_may_follow_flags() -> None:
    assert parse([*_REMOTE, "forward", "--connect", "ws://h:1"]).forward
    assert parse(["forward", *_REMOTE, "--connect", "ws://h:1"]).forward


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["forward"], "forward requires --remote"),
        (["--aws-sigv4", "--name", "n"], "--name, --aws-sigv4 requires --remote"),
        (["--remote", "u", "--listen", "stdio"], "--remote and --listen exclude each other"),
        (["--remote", "u"], "--remote requires --environment-id"),
        ([*_REMOTE, "--executor-id", "i"], "--environment-id and --executor-id exclude each other"),
        ([*_REMOTE, "forward"], "forward requires --connect"),
        ([*_REMOTE, "--connect", "ws://h"], "--connect requires forward"),
        (
            [*_REMOTE, "--use-agent-identity-auth", "--executor-credential-stdin"],
            "--use-agent-identity-auth and --executor-credential-stdin exclude each other",
        ),
        *(
            ([*_REMOTE, one, other], f"{one} and {other} exclude each other")
            for one, other in (
                ("--executor-credential-stdin", "--aws-sigv4"),
                ("--use-agent-identity-auth", "--registration-bearer-stdin"),
                ("--registration-bearer-stdin", "--aws-sigv4"),
                ("--use-agent-identity-auth", "--chatgpt-token-stdin"),
                ("--chatgpt-token-stdin", "--aws-sigv4"),
                ("--executor-credential-stdin", "--registration-bearer-stdin"),
                ("--executor-credential-stdin", "--chatgpt-token-stdin"),
                ("--registration-bearer-stdin", "--chatgpt-token-stdin"),
            )
        ),
        (["--registration-bearer-stdin"], "--registration-bearer-stdin requires --remote"),
        (["--chatgpt-token-stdin"], "--chatgpt-token-stdin requires --remote"),
        (["--chatgpt-account-id", "a"], "--chatgpt-account-id requires --remote"),
        (
            [*_REMOTE, "--chatgpt-account-id", "a"],
            "--chatgpt-account-id requires --chatgpt-token-stdin",
        ),
        (
            ["forward", "--connect", "ws://h", *_REMOTE, "--chatgpt-token-stdin"],
            "--chatgpt-token-stdin does not work with forward",
        ),
        (
            [*_REMOTE, "--remote-transport", "direct"],
            "--remote-transport direct requires --aws-sigv4",
        ),
        (
            [*_REMOTE, "--remote-transport", "direct", "--aws-sigv4", "--relay-security", "text"],
            "--relay-security requires --remote-transport noise",
        ),
        (
            [*_REMOTE, "--remote-transport", "direct", "--aws-sigv4", "--key-file", "k"],
            "--key-file requires --relay-security noise",
        ),
        (
            [*_REMOTE, "--relay-security", "plain", "--key-file", "k"],
            "--key-file requires --relay-security noise",
        ),
        (
            ["--remote", "u", "--executor-id", "e", "--key-file", "k"],
            "--key-file requires --relay-security noise",
        ),
        (["--key-file", "k"], "--key-file requires --remote"),
        ([*_REMOTE, "--ws-auth", "capability-token"], "--ws-auth requires --listen"),
        (["forward", "again"], "unrecognized arguments: again"),
        (["--concurrent-requests", "0"], "invalid positive number value: '0'"),
        (["--session-retention", "-1"], "invalid number of seconds value: '-1'"),
        (
            ["--max-session-retention", "8 hours"],
            "invalid duration (90s, 30m, 8h, 1d) value: '8 hours'",
        ),
        (["--listen"], "argument --listen: expected one argument"),
    ],
)
def test_invalid_flags_are_named(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert text in error
    assert error.endswith("\n\nFor more information, try 'exec-server serve --help'.\n")


@pytest.mark.parametrize(
    "flag", ["--executor-credential-stdin", "--registration-bearer-stdin", "--chatgpt-token-stdin"]
)
def test_the_form_of_stdin_is_found(flag: str) -> None:
    assert parse([*_REMOTE, flag]).stdin_flag == flag
    assert parse(_REMOTE).stdin_flag is None
    # The server refuses it, with another exit code than for flags that could be corrected.
    assert parse([*_REMOTE, flag, "--remote-transport", "direct"]).stdin_flag == flag
    if flag != "--chatgpt-token-stdin":
        assert parse([*_REMOTE, "forward", "--connect", "ws://h", flag]).forward


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--registration-bearer-stdin"], "requires the URL of its registry"),
        (["https://r", "--chatgpt-token-stdin", "--install"], "a service has no stdin"),
    ],
)
def test_up_with_a_credential_on_stdin(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_up(words)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
    flags = ["--chatgpt-token-stdin", "--chatgpt-account-id", "a"]
    assert stdin_flags(parse_up(["https://r", *flags])) == flags
    assert stdin_flags(parse_up([])) == []


def test_the_server_knows_every_flag() -> None:
    known = arguments.build_parser()._option_string_actions
    assert set(build_forward_parser()._option_string_actions) <= set(known)


def test_examples_parse() -> None:
    examples = re.findall(
        r"^  exec-server (forward .*)$", build_forward_parser().format_help(), re.M
    )
    assert len(examples) == 2
    for example in examples:
        assert arguments.parse(shlex.split(example)).forward


def test_the_registry_and_the_id_have_defaults() -> None:
    arguments = build_up_parser().parse_args([])
    assert (arguments.url, arguments.environment_id) == (None, None)


def test_lost_connections_are_told_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EXEC_SERVER_LOG", raising=False)
    assert build_up_parser().parse_args([]).log_level == "warning"
    monkeypatch.setenv("EXEC_SERVER_LOG", "error")
    assert build_up_parser().parse_args([]).log_level == "error"


def test_a_service_is_not_installed_and_removed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_up_parser().parse_args(["--install", "--uninstall"])
    assert "exec-server up --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("start", "flag"), [(parse, "--ws-token-file"), (parse_up, "`exec-server login`")]
)
@pytest.mark.parametrize("words", [["--token", "correct-horse"], ["--token=correct-horse"]])
def test_a_token_is_no_argument(
    capsys: pytest.CaptureFixture[str],
    start: Callable[[list[str]], object],
    flag: str,
    words: list[str],
) -> None:
    with pytest.raises(SystemExit):
        start(words)
    errors = capsys.readouterr().err
    assert (
        f"there is no --token, because other users can see the arguments of a process: use {flag}"
        in errors
    )
    assert "correct-horse" not in errors
