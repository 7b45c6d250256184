"""A shell that stays: state, exit codes, time limits, and commands that try to break it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.support.client import scaled
from tests.support.client_targets import ClientTarget

from exec_server import CommandFailed, Environment, OutputLimit, StartupError, Timeout, sync
from exec_server.client import shell_session

PATIENCE = scaled(20)
SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason="not installed"))
    for name in ("sh", "bash", "dash")
]


@pytest.mark.quick
@pytest.mark.parametrize("program", SHELLS)
def test_state_stays(there: ClientTarget, program: str, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        (tmp_path / "sub").mkdir()
        options = {"A": "a b", "ENV": "/nonexistent"}
        async with env.shell_session(program=program, cwd=tmp_path, env=options) as shell:
            result = await shell.run("cd sub && x=1; f() { echo fun $1; }; echo err >&2; false")
            assert (result.stdout, result.stderr, result.exit_code) == (b"", b"err\n", 1)
            result = await shell.run('echo "$? $x $PWD $A $ENV"; f 2')
            assert result.text == f"1 1 {tmp_path}/sub a b /nonexistent\nfun 2\n"
            assert (result.error_text, result.exit_code, result.shell_ended) == ("", 0, False)
            assert (
                await shell.run("echo $?; cat; read v || echo no input")
            ).text == "0\nno input\n"
            # Nothing of the session is left in the environment of a command.
            assert (await shell.run("env | grep -e ^PS1= -e EXEC_SERVER_ENV")).text == ""

    there.play(scene)


@pytest.mark.parametrize("program", SHELLS)
@pytest.mark.parametrize(
    "definition",
    ["exit() { :; }", "alias exit=true command=echo eval=echo printf=echo", "alias command=sudo"],
)
def test_other_meanings_of_words_skip_no_command(
    there: ClientTarget, program: str, definition: str
) -> None:
    async def scene(env: Environment) -> None:
        async with env.shell_session(program=program) as shell:
            await shell.run("x=3")
            await shell.run(definition)  # dash refuses the function
            assert (await shell.run("false")).exit_code == 1
            result = await shell.run("echo $? $x")
            assert result.text == "1 3\n"

    there.play(scene)


@pytest.mark.parametrize("program", SHELLS)
def test_commands_that_would_break_a_shell(there: ClientTarget, program: str) -> None:
    async def scene(env: Environment) -> None:
        async with env.shell_session(program=program) as shell:
            await shell.run("x=kept")
            for broken in ("echo 'open", 'echo "open', "if true; then", "echo ) y", "echo $(", "}"):
                result = await shell.run(broken, timeout=PATIENCE)
                assert result.exit_code in (1, 2), broken
                assert not result.shell_ended, broken
                assert b"yntax error" in result.stderr or b"unexpected EOF" in result.stderr
            assert (await shell.run("cat <<END\nline")).text.strip() == "line"
            for odd in (
                "exec >/dev/null 2>&1 </dev/null; echo hidden",
                "exec >&- 2>&- <&-",
                "set -x; set -v",
                "set +x; set +v",
                ". /nonexistent/file",
                "${none?}",
                "readonly r=1; r=2",
                "unset PATH; PATH=/usr/bin:/bin",
                "# a comment",
                "",
                "echo '!x' \\",
            ):
                assert not (await shell.run(odd, timeout=PATIENCE)).shell_ended, odd
            result = await shell.run('printf "a\\0b\\377\\n\\n%s" "$x"', timeout=PATIENCE)
            assert result.stdout == b"a\0b\xff\n\nkept"

    there.play(scene)


@pytest.mark.parametrize("program", SHELLS)
def test_output_is_that_of_the_command_alone(there: ClientTarget, program: str) -> None:
    async def scene(env: Environment) -> None:
        async with env.shell_session(program=program) as shell:

            async def outputs(command: str, **options: float) -> tuple[bytes, bytes]:
                result = await shell.run(command, **options)  # type: ignore[arg-type]
                return result.stdout, result.stderr

            assert await outputs("PS1='(venv) ' PS2=more") == (b"", b"")
            assert await outputs("echo a; echo b >&2") == (b"a\n", b"b\n")
            assert await outputs("echo $PS1; : ${none?}") != (b"", b"")
            assert await outputs("echo a") == (b"a\n", b"")
            assert (await outputs("set -x"))[1] == b""
            assert (await outputs("set +x"))[1].lstrip(b"+") == b" set +x\n"
            assert b"tcsetattr" not in (await outputs("sh -c 'kill -9 $$'"))[1]
            with pytest.raises(Timeout) as late:
                await shell.run("echo a; sleep 300", timeout=0.2)
            assert late.value.result.stderr == b""
            if program == "bash":
                await shell.run('PROMPT_COMMAND="echo hook"; trap "echo debug" DEBUG')
                assert await outputs("false") == (b"debug\n", b"")
                await shell.run('trap - DEBUG; trap "echo failed" ERR')
                assert await outputs("false") == (b"failed\n", b"")
            await shell.run("trap 'echo bye' EXIT")
            assert (await shell.run("exit 3")).stdout.endswith(b"bye\n")

    there.play(scene)


@pytest.mark.parametrize("program", SHELLS)
def test_a_command_that_interrupts_its_shell(
    there: ClientTarget, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_session, "MARK_SECONDS", 0.05)

    async def scene(env: Environment) -> None:
        async with env.shell_session(program=program) as shell:
            result = await shell.run("x=kept; kill -INT $$; echo never", timeout=PATIENCE)
            assert (result.stdout, result.exit_code) == (b"", 130)
            assert (await shell.run("echo $x")).text == "kept\n"

    there.play(scene)


@pytest.mark.parametrize("program", SHELLS)
def test_a_timeout_interrupts_the_command_and_keeps_the_shell(
    there: ClientTarget, program: str
) -> None:
    async def scene(env: Environment) -> None:
        async with env.shell_session(program=program) as shell:
            await shell.run("x=kept; sleep 300 & background=$!")
            for endless in (
                "echo begun; sleep 300; echo never; sleep 300",
                "echo begun; while :; do :; done",
                "echo begun; (sleep 300) | cat; echo never",
            ):
                with pytest.raises(Timeout, match="and was interrupted") as late:
                    await shell.run(endless, timeout=0.3)
                result = late.value.result
                assert (result.stdout, result.exit_code) == (b"begun\n", 130)
                assert not result.shell_ended  # type: ignore[attr-defined]
                assert (await shell.run("echo $? $x")).text == "130 kept\n"
            assert await shell.run("kill $background")

    there.play(scene)


def test_a_command_that_cannot_be_interrupted_ends_with_its_shell(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.shell_session() as shell:
            await shell.run("x=lost")
            stubborn = "echo begun; sh -c \"trap '' INT; sleep 300\""
            with pytest.raises(Timeout, match="killed with its shell") as late:
                await shell.run(stubborn, timeout=0.3)
            assert late.value.result.stdout == b"begun\n"
            assert late.value.result.shell_ended  # type: ignore[attr-defined]
            assert (await shell.run("echo .$x.")).text == "..\n"

    there.play(scene)


@pytest.mark.parametrize("program", SHELLS)
def test_the_end_of_the_shell(there: ClientTarget, program: str) -> None:
    async def scene(env: Environment) -> None:
        async with env.shell_session(program=program, cwd="/") as shell:
            for end, code in (("exit 3", 3), ("set -e; echo last; false", 1), ("kill -9 $$", 137)):
                result = await shell.run(f"cd /tmp; {end}", timeout=PATIENCE)
                assert (result.exit_code, result.shell_ended) == (code, True)
                assert (await shell.run("pwd")).text == "/\n"
            result = await shell.run("sleep 300 & exit 4", timeout=PATIENCE)
            assert (result.exit_code, result.shell_ended) == (4, True)
        with pytest.raises(RuntimeError, match="not open"):
            await shell.run("true")

    there.play(scene)


def test_large_output_is_bounded(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.shell_session() as shell:
            flood = "head -c 3000000 /dev/zero; echo end; echo error >&2"
            result = await shell.run(
                flood, output_limit=OutputLimit(head=2, tail=6), timeout=PATIENCE
            )
            assert (result.stdout, result.lost_stdout) == (b"\0\0\0\0end\n", 3_000_004 - 8)
            assert (result.stderr, result.lost_stderr) == (b"error\n", 0)

    there.play(scene)


def test_both_streams_in_one(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.shell_session(merge_stderr=True) as shell:
            result = await shell.run("echo a; echo b >&2; echo c")
            assert (result.text, result.stderr) == ("a\nb\nc\n", b"")

    there.play(scene)


def test_commands_wait_for_each_other_and_may_be_cancelled(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.shell_session() as shell:
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(shell.run("x=1; sleep 0.2; x=2"))
                second = tasks.create_task(shell.run("echo $x"))
            assert (first.result().exit_code, second.result().text) == (0, "2\n")
            async with asyncio.TaskGroup() as tasks:
                third = tasks.create_task(shell.run("x=3; sleep 300"))
                await asyncio.sleep(0.2)
                third.cancel()
            assert (await shell.run("echo $x")).text == "3\n"
            with pytest.raises(CommandFailed):
                await shell.run("false", check=True)
            for wrong, kind in ((3, TypeError), ("a\0b", ValueError)):
                with pytest.raises(kind):
                    await shell.run(wrong)  # type: ignore[arg-type]

    there.play(scene)


def test_a_program_that_is_no_shell(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        for program in ("/nonexistent/shell", "false", "env"):
            with pytest.raises(StartupError, match=f"{program} is no POSIX shell"):
                await env.shell_session(program=program)

    there.play(scene)


def test_without_async(there: ClientTarget) -> None:
    with sync.connect(there.url) as env, env.shell_session() as shell:
        shell.run("cd /")
        assert shell.run("pwd").text == "/\n"
        with pytest.raises(Timeout):
            shell.run("sleep 300", timeout=0.2)
        assert shell.run("pwd").text == "/\n"
    assert not shell.is_open
