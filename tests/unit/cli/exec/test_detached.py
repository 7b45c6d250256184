"""Detached commands: their table, logs and ends, and attaching with a helpful error."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.support.detached_commands import TARGET, FakeEnvironment, listed

from exec_server.cli import connection
from exec_server.cli.connection import attached
from exec_server.cli.errors import CommandError
from exec_server.cli.exec import detached, execution
from exec_server.cli.exec.detached import (
    END,
    as_json,
    as_table,
    build_attach_parser,
    build_kill_parser,
    build_logs_parser,
)
from exec_server.cli.parser import CommandParser
from exec_server.client.results import Chunk
from exec_server.protocol import process


def test_the_table() -> None:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    rows = [
        listed(),
        listed("build", running=False, exit_code=3, attached=0, argv=["sh", "-c", "x" * 80]),
        listed("old", running=False, exit_code=143, ended_by="idleTimeout", argv=["\x1b[m"]),
    ]
    long = f"sh -c {'x' * 53}…"
    assert as_table(rows) == (
        f"NAME   STATUS                     {'STARTED':19}  CLIENTS  COMMAND\n"
        f"web    running                    {started}  1        node app.js\n"
        f"build  exited 3                   {started}  0        {long}\n"
        f"old    exited 143 (idle timeout)  {started}  1        '\\x1b[m'\n"
    )
    assert "  running  ?        1  " in as_table([listed(started_at_ms=-(10**30))])
    assert as_table([]) == "NAME  STATUS  STARTED  CLIENTS  COMMAND\n"


def test_json_has_the_names_of_the_protocol() -> None:
    [web] = json.loads(as_json([listed()]))
    assert (web["name"], web["nextSeq"], web["endedBy"]) == ("web", 4, None)


def test_attaching() -> None:
    environment = FakeEnvironment(listed())

    async def scene() -> None:
        async with attached(cast(Any, environment), TARGET, "web", after=END) as process:
            assert process.name == "web"
        with pytest.raises(CommandError) as raised:
            async with attached(cast(Any, environment), TARGET, "nothing"):
                raise AssertionError
        text = "box: unknown detached process nothing\n`exec-server ps box` lists the names"
        assert str(raised.value) == text

    asyncio.run(scene())
    [process] = environment.opened
    assert (process.after, process.calls) == (END, ["aclose"])


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_list(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    FakeEnvironment(listed()).open_in(monkeypatch, connection)
    monkeypatch.setattr(detached, "chosen_target", lambda _: TARGET)
    assert detached.run_ps(detached.build_ps_parser().parse_words([*flags, "box"])) == 0
    printed = capfd.readouterr().out
    if flags:
        assert json.loads(printed)[0]["name"] == "web"
    else:
        assert printed.splitlines()[1].startswith("web   running")


def _answer(*chunks: process.OutputChunk, **others: Any) -> process.ReadResult:
    return process.ReadResult(list(chunks), 9, False, None, False, None, False, **others)


def test_the_retained_output_up_to_now(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(listed(next_seq=5)).open_in(monkeypatch, connection)
    environment.answers = [
        _answer(
            process.OutputChunk(2, "stdout", b"one"),
            process.OutputChunk(3, "stderr", b"two"),
            first_seq=2,
            lost_bytes=10,
        ),
        _answer(process.OutputChunk(5, "stdout", b"more")),
    ]
    assert asyncio.run(detached.print_output(TARGET, "web", is_following=False)) == 0
    printed = capfd.readouterr()
    assert printed.out == "onemore"
    text = "exec-server: 10 bytes of older output are not retained any more\n"
    assert printed.err == f"two{text}"
    assert [params.after_seq for params in environment.asked] == [0, 3]


def test_a_process_without_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(listed(next_seq=3)).open_in(monkeypatch, connection)
    environment.answers = [_answer()]
    assert asyncio.run(detached.print_output(TARGET, "web", is_following=False)) == 0
    assert capfd.readouterr() == ("", "")


def test_following(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    environment = FakeEnvironment(listed()).open_in(monkeypatch, connection)
    environment.chunks = [Chunk("stdout", b"a"), Chunk("pty", b"b"), Chunk("stderr", b"c")]
    environment.lost_bytes = 7
    assert asyncio.run(detached.print_output(TARGET, "web", is_following=True)) == 0
    printed = capfd.readouterr()
    assert printed.out == "ab"
    assert printed.err == "cexec-server: 7 bytes of older output are not retained any more\n"


def test_the_last_lines_and_what_follows(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(listed(next_seq=3)).open_in(monkeypatch, connection)
    environment.answers = [_answer(process.OutputChunk(2, "stdout", b"one\ntwo\n"), lost_bytes=9)]
    environment.chunks = [Chunk("stdout", b"three\n")]
    code = asyncio.run(detached.print_output(TARGET, "web", is_following=True, lines=1))
    assert code == 0
    assert capfd.readouterr() == ("two\nthree\n", "")


@pytest.mark.parametrize(
    ("chunks", "count", "kept"),
    [
        ([b"a\nb\nc\n"], 1, b"c\n"),
        ([b"a\nb\nc"], 1, b"c"),
        ([b"a\nb\n", b"c\n"], 2, b"b\nc\n"),
        ([b"a\nb\n", b""], 1, b"b\n"),
        ([b"a", b"b\n", b"\n"], 2, b"ab\n\n"),
        ([b"a\nb\n"], 0, b""),
        ([b"a\nb\n"], 9, b"a\nb\n"),
        ([], 3, b""),
    ],
)
def test_last_lines(chunks: list[bytes], count: int, kept: bytes) -> None:
    output = [("stdout", chunk) for chunk in chunks]
    assert b"".join(data for _, data in detached.last_lines(output, count)) == kept


def test_the_flag_for_following(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(listed()).open_in(monkeypatch, connection)
    environment.chunks = [Chunk("stdout", b"x")]
    monkeypatch.setattr(detached, "chosen_target", lambda _: TARGET)
    assert detached.run_logs(detached.build_logs_parser().parse_words(["-f", "box", "web"])) == 0
    assert capfd.readouterr().out == "x"


@pytest.mark.parametrize("words", [[], ["box"], ["box", "a", "b"]])
def test_one_target_and_one_name(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        detached.build_logs_parser().parse_words(words)


def test_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEnvironment(listed()).open_in(monkeypatch, execution)
    monkeypatch.setattr(detached, "chosen_target", lambda _: TARGET)
    arguments = detached.build_attach_parser().parse_words(["-n", "-e", "none", "box", "web"])
    assert (arguments.name, arguments.no_stdin, arguments.escape) == ("web", True, None)
    assert detached.run_attach(arguments) == 3


@pytest.mark.parametrize(
    ("signal", "call"),
    [(None, "terminate"), ("kill", "kill"), ("9", "kill"), ("HUP", "HUP"), ("15", 15)],
)
def test_each_is_ended_or_signalled(
    monkeypatch: pytest.MonkeyPatch, signal: str | None, call: object
) -> None:
    environment = FakeEnvironment(listed("a"), listed("b")).open_in(monkeypatch, connection)
    assert asyncio.run(detached.kill_commands(TARGET, ["a", "b"], signal)) == 0
    assert [each.name for each in environment.opened] == ["a", "b"]
    assert [each.calls for each in environment.opened] == [[call, "aclose"]] * 2


def test_errors_do_not_stop_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment(listed("ended", closed=True), listed("b"))
    environment.open_in(monkeypatch, connection)
    names = ["nothing", "ended", "b"]
    assert asyncio.run(detached.kill_commands(TARGET, names, "NONSENSE")) == 1
    assert capfd.readouterr().err == (
        "Error: box: unknown detached process nothing\n`exec-server ps box` lists the names\n"
        "Error: box: ended has already ended\n"
        "Error: box: b: unknown signal\n"
    )
    assert [each.name for each in environment.opened] == ["b"]


def test_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = FakeEnvironment(listed("a"), listed("b")).open_in(monkeypatch, connection)
    monkeypatch.setattr(detached, "chosen_target", lambda _: TARGET)
    words = ["-s", "HUP", "box", "a", "b"]
    assert detached.run_kill(detached.build_kill_parser().parse_words(words)) == 0
    assert [each.calls[0] for each in environment.opened] == ["HUP", "HUP"]


@pytest.mark.parametrize("words", [[], ["box"]])
def test_a_name_is_needed(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        detached.build_kill_parser().parse_words(words)


@pytest.mark.parametrize(
    ("word", "signal"), [("-9", "9"), ("-HUP", "HUP"), ("-SIGUSR1", "SIGUSR1")]
)
def test_the_short_form_of_a_signal(word: str, signal: str) -> None:
    arguments = detached.build_kill_parser().parse_words([word, "box", "a"])
    assert (arguments.signal, arguments.target, arguments.names) == (signal, "box", ["a"])


@pytest.mark.parametrize("words", [["-s", "FOO"], ["-s", ""], ["-FOO"], ["-99"], ["-s", "0"]])
def test_an_unknown_signal(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        detached.build_kill_parser().parse_words([*words, "box", "a"])
    assert end.value.code == 2
    assert "unknown signal `" in capsys.readouterr().err


@pytest.mark.parametrize("build", [build_logs_parser, build_attach_parser, build_kill_parser])
def test_a_missing_name_leads_to_the_list_of_names(
    build: Callable[[], CommandParser], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build().parse_words(["build"])
    assert "`exec-server ps TARGET` lists the names" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        build().parse_words(["build", "name", "--unknown"])
    assert "lists the names" not in capfd.readouterr().err
