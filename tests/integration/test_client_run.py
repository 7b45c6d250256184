"""Commands that the async client runs to their end: input, output, limits; on both servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import scaled, server_command, uri
from tests.support.client_targets import ClientTarget
from tests.support.server_internals import eventually, is_running

from exec_server import (
    Command,
    CommandFailed,
    Environment,
    FileError,
    NotFound,
    PermissionDenied,
    ProgramNotFound,
    Result,
    RpcError,
    RunProgress,
    Timeout,
    Unsupported,
    WorkingDirectoryNotFound,
    sync,
)
from exec_server.client import commands as run_module
from exec_server.client.process import ProcessInput
from exec_server.errors import InternalError, InvalidParams


@pytest.mark.quick
def test_a_result_is_a_plain_value(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        result = await env.run(["sh", "-c", "printf 'a\\377'; printf b >&2"])
        expected = Result(("sh", "-c", "printf 'a\\377'; printf b >&2"), b"a\xff", b"b", 0, 0.0)
        assert (result.argv, result.stdout, result.stderr) == (
            expected.argv,
            expected.stdout,
            expected.stderr,
        )
        assert (result.text, result.error_text) == ("a\ufffd", "b")
        assert 0 < result.duration < 10
        assert result
        assert not await env.run(["false"])

    there.play(scene)


def test_where_and_with_what_it_runs(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        shown = ["sh", "-c", 'pwd; echo $A; test -n "$HOME"']
        result = await env.run(shown, cwd=tmp_path, env={"A": "b c"})
        assert (result.text, result.exit_code) == (f"{tmp_path}\nb c\n", 0)
        bare = await env.run(["/usr/bin/env"], env={"A": "b"}, clean_env=True)
        assert bare.text == "A=b\n"
        default = await env.run(["pwd"])
        assert env.info.cwd == uri(default.text.strip())
        assert (await env.run(["cat"])).stdout == b""  # its stdin is empty

    there.play(scene)


@pytest.mark.parametrize("size", [1, 70_000, 5_000_000])
def test_input_arrives_whole_and_ends(there: ClientTarget, size: int) -> None:
    data = os.urandom(size)

    async def scene(env: Environment) -> None:
        assert (await env.run(["cat"], input=data)).stdout == data

    there.play(scene)


def test_input_that_nobody_reads_holds_up_nothing(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(env.run(["sleep", "0.3"], input=bytes(20_000_000)))
            assert (await env.run(["echo", "meanwhile"])).text == "meanwhile\n"
            assert not slow.done()
        assert slow.result()
        assert await env.run(["true"], input=bytes(3_000_000))

    there.play(scene)


def test_input_of_a_terminal(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        result = await env.run(
            ["sh", "-c", "stty -echo; read a; echo got $a"], input=b"x\n", tty=True
        )
        assert b"got x\r\n" in result.stdout
        assert result.stderr == b""

    there.play(scene)


@pytest.mark.parametrize("data", [b"", b"no newline", b"one\ntwo", b"line\n", b"line\r"])
def test_the_end_of_the_input_of_a_terminal(there: ClientTarget, data: bytes) -> None:
    async def scene(env: Environment) -> None:
        words = ["sh", "-c", "stty -echo; cat; echo done"]
        result = await env.run(words, input=data, tty=True, timeout=20)
        expected = data.replace(b"\r", b"\n").replace(b"\n", b"\r\n") + b"done\r\n"
        # What came before the echo was off is there twice.
        assert result.stdout.replace(b"^D\b\b", b"").endswith(expected)

    there.play(scene)


def test_input_is_bytes_or_a_text(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        with pytest.raises(TypeError, match="input must be bytes or str, not int"):
            await env.run(["cat"], input=3)  # type: ignore[arg-type]
        assert (await env.run(["cat"], input="grün")).stdout == "grün".encode()
        for data in (bytearray(b"xyz"), memoryview(b"xyz")):
            ended = await env.run(["cat"], input=data)  # type: ignore[arg-type]
            assert ended.stdout == b"xyz"

    there.play(scene)


def test_input_that_cannot_be_written_ends_the_run(
    there: ClientTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = f"35{os.getpid()}"

    async def broken(*arguments: object) -> None:
        while not is_running(word):
            await asyncio.sleep(0.01)
        raise ZeroDivisionError

    monkeypatch.setattr(ProcessInput, "write", broken)

    async def scene(env: Environment) -> None:
        with pytest.raises(ZeroDivisionError):
            await env.run(["sh", "-c", f"sleep {word}; cat"], input=b"x")
        eventually("it is gone", lambda: not is_running(word))

    there.play(scene)


def test_a_check_raises_with_the_result(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        with pytest.raises(CommandFailed, match=r"^sh ended with exit code 7$") as failed:
            await env.run(["sh", "-c", "echo out; exit 7"], check=True)
        assert (failed.value.result.stdout, failed.value.result.exit_code) == (b"out\n", 7)
        assert (await env.run(["true"], check=True)).exit_code == 0

    there.play(scene)


def test_what_cannot_be_started_says_which(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        with pytest.raises(RpcError, match=r"^cannot start no-such-program: No such file"):
            await env.run(["no-such-program"])
        with pytest.raises(InvalidParams, match="argv must not be empty"):
            await env.run([])
        with pytest.raises(TypeError, match="a list of words"):
            await env.run("ls -l")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(env.run(["true"]))

    there.play(scene)


def test_a_missing_program_or_directory_can_be_told(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        cases: tuple[tuple[str, str | None, type[NotFound], str, str], ...] = (
            ("no-such-program", None, ProgramNotFound, "no-such-program", "no-such-program"),
            ("pwd", "/none", WorkingDirectoryNotFound, "pwd in /none", "/none"),
        )
        for word, cwd, kind, name, missing in cases:
            with pytest.raises(NotFound, match=f"^cannot start {name}: No such file") as caught:
                await env.run([word], cwd=cwd)
            assert type(caught.value) is kind
            assert isinstance(caught.value, InternalError)
            assert isinstance(caught.value, FileNotFoundError)
            assert caught.value.code == InternalError.code
            assert (caught.value.errno, caught.value.filename) == (2, missing)
        with pytest.raises(WorkingDirectoryNotFound):
            async with env.start(["pwd"], cwd=Path("/none")):
                raise AssertionError
        with pytest.raises(PermissionDenied, match="cannot start /etc/passwd") as refused:
            await env.run(["/etc/passwd"])
        assert isinstance(refused.value, PermissionError)

    there.play(scene)


@pytest.mark.parametrize(
    ("word", "cwd", "kind"),
    [
        ("no-such-program", None, ProgramNotFound),
        ("./no-such-program", None, ProgramNotFound),
        ("/no-such-program", None, ProgramNotFound),
        ("no-such-program", "/none", WorkingDirectoryNotFound),
        ("./no-such-program", "/none", WorkingDirectoryNotFound),
        ("./passwd", "/etc", PermissionDenied),
        ("/etc/passwd", None, PermissionDenied),
        ("./bin", "/usr", PermissionDenied),
    ],
)
def test_a_program_that_cannot_run_on_a_terminal_is_told_as_on_pipes(
    there: ClientTarget, word: str, cwd: str | None, kind: type[FileError]
) -> None:
    async def scene(env: Environment) -> None:
        said = []
        for tty in (False, True):
            with pytest.raises(kind) as caught:
                await env.run([word], cwd=cwd, tty=tty)
            error = caught.value
            said.append((error.message, error.errno, error.strerror, error.filename))
        assert said[0] == said[1]

    there.play(scene)


def test_words_are_texts_or_paths(there: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        result = await env.run([Path("/bin/ls"), tmp_path], env={"A": tmp_path})
        assert (result.exit_code, result.argv) == (0, ("/bin/ls", str(tmp_path)))
        assert (await env.run(str(n) for n in ("echo", 1))).argv == ("echo", "1")
        assert (await env.run(["echo", b"x"])).text == "x\n"
        wrong: list[Any] = [["echo", 1], b"ls", Path("/bin/ls")]
        for argv in wrong:
            with pytest.raises(TypeError, match="argv"):
                await env.run(argv)
        for variables in ({"A": 1}, {"A": None}, {1: "x"}):
            with pytest.raises(TypeError, match=r"in env|env\['A'\]"):
                await env.run(["true"], env=variables)  # type: ignore[arg-type]
        for argv in ([], iter(())):
            with pytest.raises(InvalidParams, match="argv must not be empty"):
                await env.run(argv)

    there.play(scene)


def test_what_is_not_utf8_is_refused_at_once(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with asyncio.timeout(scaled(4)):  # no waiting for the end of what never began
            for argv, variables in ((["true", "\udcff"], {}), (["true"], {"A": "\udcff"})):
                with pytest.raises(InvalidParams, match=r"^cannot start true: text that is not"):
                    await env.run(argv, env=variables)
                with pytest.raises(InvalidParams, match="not UTF-8"):
                    async with env.start(argv, env=variables):
                        raise AssertionError
            with pytest.raises(InvalidParams, match="has no form on the wire"):
                await env.run(["true"], sandbox={"x": object()})

    there.play(scene)


def test_the_command_line_says_what_is_not_utf8(there: ClientTarget) -> None:
    lines: list[list[str | bytes]] = [["--", "printf", b"\xff"], ["--env", b"A=\xff", "--", "true"]]
    for words in lines:
        command = [*server_command("ours"), "exec", there.url, *words]
        ended = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)
        assert (ended.returncode, ended.stdout) == (125, b"")
        assert b"text that is not UTF-8 cannot be sent" in ended.stderr
        assert b"Traceback" not in ended.stderr


def test_a_timeout_carries_the_output_and_kills(there: ClientTarget) -> None:
    word = f"31{os.getpid()}"

    async def scene(env: Environment) -> None:
        with pytest.raises(Timeout, match=r"sh did not end within 0.5 s and was killed") as late:
            await env.run(["sh", "-c", f"echo begun; sleep {word}"], timeout=0.5)
        assert isinstance(late.value, TimeoutError)
        assert late.value.result.stdout == b"begun\n"
        assert late.value.result.exit_code == 137
        assert 0.5 <= late.value.result.duration < 10
        eventually("the command is gone", lambda: not is_running(word))
        assert await env.run(["true"], timeout=30)

    there.play(scene)


def test_a_cancelled_run_is_killed(there: ClientTarget) -> None:
    word = f"32{os.getpid()}"

    async def scene(env: Environment) -> None:
        task = asyncio.get_running_loop().create_task(env.run(["sleep", word]))
        while not is_running(word):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_running(word)

    there.play(scene)


def test_output_beyond_the_limit_is_counted(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        result = await env.run(["sh", "-c", "head -c 100000 /dev/zero"], output_limit=70_000)
        assert (len(result.stdout), result.lost_bytes) == (70_000, 30_000)
        result = await env.run(["echo", "x"], output_limit=0)
        assert (result.stdout, result.lost_bytes) == (b"", 2)
        with pytest.raises(InvalidParams, match="output_limit must not be negative"):
            await env.run(["echo", "x"], output_limit=-1)

    there.play(scene)


def test_much_output_of_many_commands(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(env.run(["sh", "-c", f"seq {number} 300000; seq 3 >&2"]))
                for number in range(4)
            ]
        for number, run in enumerate(runs):
            lines = run.result().text.splitlines()
            assert lines == [str(each) for each in range(number, 300_001)]
            assert run.result().error_text == "1\n2\n3\n"

    there.play(scene)


@pytest.mark.parametrize("tty", [False, True])
def test_a_run_does_not_wait_for_what_it_leaves_running(there: ClientTarget, tty: bool) -> None:
    word = f"39{os.getpid()}"
    pids = []

    async def scene(env: Environment) -> None:
        words = ["sh", "-c", f"trap '' HUP; sleep {word} & echo $!"]
        result = await env.run(words, timeout=scaled(20), tty=tty)
        pids.append(int(result.text))
        assert result.exit_code == 0
        assert is_running(word)
        assert await env.run(["true"])

    there.play(scene)
    if not there.is_ours:  # the reference does not kill what an exited command has left
        os.kill(pids[0], signal.SIGKILL)
    eventually("it is gone", lambda: not is_running(word))


@pytest.mark.parametrize("child", ["sleep {}", "setsid sleep {} >/dev/null 2>&1"])
def test_a_run_may_kill_what_it_leaves_running(there: ClientTarget, child: str) -> None:
    word = f"32{os.getpid()}"

    async def scene(env: Environment) -> None:
        words = ["sh", "-c", f"{child.format(word)} & echo done"]
        if not env.capabilities.process_terminate_exited:
            with pytest.raises(Unsupported, match="processTerminateExited: it cannot kill"):
                await env.run(words, leave_running=False)
            return
        result = await env.run(words, leave_running=False)
        assert (result.text, result.exit_code) == ("done\n", 0)
        eventually("it is gone", lambda: not is_running(word))

    there.play(scene)


def test_output_of_a_child_after_the_exit_is_had_for_a_moment(
    there: ClientTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "QUIET_SECONDS", scaled(10))  # for a machine under load

    async def scene(env: Environment) -> None:
        result = await env.run(["sh", "-c", "(sleep 0.05; echo late) & echo done"])
        assert result.text == "done\nlate\n"

    there.play(scene)


def test_texts_of_shells_and_of_python(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        result = await env.shell("seq 5 | tail -n 2; exit 3", timeout=scaled(20))
        assert (result.text, result.exit_code) == ("4\n5\n", 3)
        assert (await env.shell("echo $BASH", program="bash")).text.strip() != ""
        code = """
            import sys
            print(sys.argv[1:], sys.stdin.read())
        """
        result = await env.python(code, "a", "b", input=b"text", program=sys.executable)
        assert result.text == "['a', 'b'] text\n"
        with pytest.raises(CommandFailed):
            await env.shell("false", check=True)

    there.play(scene)


def test_many_commands(there: ClientTarget, tmp_path: Path) -> None:
    word = f"31{os.getpid()}"

    async def scene(env: Environment) -> None:
        told: list[RunProgress] = []
        commands = [["sh", "-c", f"echo {number}; pwd"] for number in range(20)]
        results = await env.run_many(commands, concurrency=4, cwd=tmp_path, progress=told.append)
        assert [each.text for each in results] == [f"{n}\n{tmp_path}\n" for n in range(20)]
        assert (told[-1].done, told[-1].total) == (20, 20)
        with pytest.raises(CommandFailed):
            await env.run_many([["sleep", word], ["sleep", word], ["false"]], check=True)
        eventually("the others are gone", lambda: not is_running(word))

    there.play(scene)


def test_results_of_commands_with_options_of_their_own(there: ClientTarget, tmp_path: Path) -> None:
    word = f"32{os.getpid()}"

    async def scene(env: Environment) -> None:
        commands: list[Command | list[str]] = [
            ["sh", "-c", "echo $A; pwd"],
            Command(["sh", "-c", "echo $A; pwd"], env={"A": "b"}, cwd="/"),
            Command(["sleep", word], timeout=0.2),
            Command(["false"], check=True),
            ["/nonexistent/program"],
            Command(["cat"], input=b"in"),
        ]
        ended = {each.index: each async for each in env.run_each(commands, cwd=tmp_path)}
        assert (ended[0].result.text, ended[1].result.text) == (f"\n{tmp_path}\n", "b\n/\n")
        kinds = [type(ended[index].error) for index in (2, 3, 5)]
        assert kinds == [Timeout, CommandFailed, type(None)]
        assert ended[4].error is not None or ended[4].result.exit_code == 127
        assert ended[5].result.text == "in"
        async with env.run_each([["true"], ["sleep", word]]) as results:
            assert (await anext(results)).index == 0
        eventually("the other one is gone", lambda: not is_running(word))

    there.play(scene)


def test_many_commands_without_async(there: ClientTarget) -> None:
    with sync.connect(there.url) as env:
        assert [each.text for each in env.run_many([["echo", "1"], ["echo", "2"]])] == [
            "1\n",
            "2\n",
        ]
        commands = [Command(["sh", "-c", "sleep 0.3; echo late"]), Command(["echo", "soon"])]
        with env.run_each(commands) as results:
            assert [each.result.text for each in results] == ["soon\n", "late\n"]
        assert env.shell("echo $((1 + 1))").text == "2\n"
        with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
            env.shell("true", no_such=True)  # type: ignore[call-arg]
        assert env.python("print(3)", program=sys.executable).text == "3\n"


def test_both_streams_as_one_in_the_order_of_writing(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        text = "for n in 1 2 3 4 5; do echo out $n; echo err $n >&2; done; cat"
        result = await env.shell(text, merge_stderr=True, input=b"input")
        lines = "".join(f"out {n}\nerr {n}\n" for n in range(1, 6))
        assert (result.text, result.stderr) == (f"{lines}input", b"")

    there.play(scene)


def test_both_streams_as_one_in_a_sandbox(ours: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        for data in (None, b"input"):
            text = "echo a; echo b >&2; echo c; cat"
            result = await env.shell(text, merge_stderr=True, sandbox="read-only", input=data)
            assert (result.stdout, result.stderr) == (b"a\nb\nc\n" + (data or b""), b"")

    ours.play(scene)


def test_output_is_collected_for_a_while(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", "echo a; cat; sleep 60 & exit 3"], tty=True) as process:
            assert await process.collect(60, limit=3) == b"a\r\n"
            assert await process.collect(0.01) == b""
            await process.write(b"b\n\x04")
            assert (await process.collect(60)).endswith(b"b\r\n")
            assert process.exit_code == 3

    there.play(scene)
