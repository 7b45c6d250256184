"""The commands for people, from their words to their exit codes, against both servers."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inside import eventually
from relay_service import ThreadedRelayService
from relaying import KINDS, start_executor
from wire import (
    PATIENCE,
    Server,
    descendants,
    scaled,
    server_command,
    server_environment,
    start_server,
    survivors,
)

Ended = subprocess.CompletedProcess[bytes]


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with start_server(request.param) as running:
        yield running


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with start_server("ours") as running:
        yield running


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The directory with targets.toml, which _run and _popen let the client find."""
    directory = tmp_path / "config" / "exec-server"
    directory.mkdir(parents=True)
    return directory


def _environment(config: Path | None, extra: dict[str, str] | None = None) -> dict[str, str]:
    where = "/nonexistent" if config is None else str(config.parent)
    return server_environment("ours", {"XDG_CONFIG_HOME": where, **(extra or {})})


def _run(
    *words: str,
    config: Path | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    **options: object,
) -> Ended:
    """Run a client to its end; without `input` its stdin is /dev/null."""
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*server_command("ours"), *words],
        env=_environment(config, env),
        cwd=cwd,
        capture_output=True,
        timeout=scaled(30),
        check=False,
        **options,
    )


@contextlib.contextmanager
def _popen(*words: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A client that runs; killed at last with all that it has started."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(  # type: ignore[call-overload]
        [*server_command("ours"), *words],
        env=_environment(None),
        process_group=0,  # as a shell does it: only then can it be stopped
        **(streams | options),
    )
    try:
        yield process
    finally:
        family = descendants(process.pid)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        assert not survivors(family)


def _said(ended: Ended) -> str:
    return ended.stderr.decode()


def _wait_gone(pid: int) -> None:
    eventually(f"process {pid} is gone", lambda: not Path(f"/proc/{pid}").exists())


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


# ---- exec: streams and exit codes -----------------------------------------------------


def test_output_and_exit_code_are_the_commands(server: Server) -> None:
    ended = _run("exec", server.url, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"out\n", b"err\n")


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 255", 255), ("kill $$", 143)])
def test_exit_codes(server: Server, script: str, code: int) -> None:
    assert _run("exec", server.url, "--", "sh", "-c", script).returncode == code


def test_words_reach_the_command_as_they_are(server: Server) -> None:
    words = ["a b", "", "--", "-t", "'\"$HOME*", "żółć", "\n"]
    ended = _run("exec", server.url, "--", "printf", "<%s>", *words)
    assert ended.stdout.decode() == "".join(f"<{word}>" for word in words)


def test_all_bytes_pass_both_ways(ours: Server) -> None:
    data = os.urandom(3_000_000)
    ended = _run("exec", ours.url, "--", "sh", "-c", "tee /dev/stderr", input=data)
    assert ended.returncode == 0
    assert ended.stdout == data
    assert ended.stderr == data


def test_all_bytes_pass_without_the_end_of_input(server: Server) -> None:
    data = os.urandom(1_000_000)
    ended = _run("exec", server.url, "--", "head", "-c", str(len(data)), input=data)
    assert (ended.returncode, ended.stdout) == (0, data)


def test_input_may_be_a_file(ours: Server, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 200_000)
    with (tmp_path / "data").open("rb") as file:
        ended = _run("exec", ours.url, "--", "wc", "-c", stdin=file)
    assert ended.stdout.split() == [b"200000"]


@pytest.mark.parametrize("flags", [(), ("-n",)])
def test_without_input_the_command_reads_the_end_at_once(
    server: Server, flags: tuple[str, ...]
) -> None:
    ended = _run("exec", *flags, server.url, "--", "cat")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_a_command_need_not_read_its_input(server: Server) -> None:
    ended = _run("exec", server.url, "--", "true", input=b"x" * 5_000_000)
    assert (ended.returncode, ended.stderr) in [(0, b""), (0, _NO_END)]


_NO_END = (
    b"exec-server: this server cannot tell the command that its input has ended; "
    b"if it waits for that, end it with Ctrl-C\n"
)


@pytest.mark.reference
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_server_that_cannot_end_input_is_told_of_once(kind: str) -> None:
    with start_server(kind) as server:
        words = ("exec", server.url, "--", "cat")
        with _popen(*words, stdin=subprocess.PIPE) as client:
            assert client.stdin is not None
            assert client.stderr is not None
            client.stdin.write(b"hello\n")
            client.stdin.close()
            client.stdin = None
            assert client.stderr.readline() == _NO_END
            assert _line(client) == b"hello\n"
            client.send_signal(signal.SIGINT)
            assert client.wait(scaled(PATIENCE)) == 130


def test_output_is_passed_on_at_once(server: Server) -> None:
    with _popen("exec", server.url, "--", "sh", "-c", "printf begun; sleep 1000") as client:
        assert client.stdout is not None
        assert client.stdout.read(5) == b"begun"


def test_directory_and_variables(server: Server, tmp_path: Path) -> None:
    ended = _run(
        *("exec", "--cwd", str(tmp_path), "--env", "A=b=c", "--env", "HERE", server.url),
        *("--", "sh", "-c", 'echo "$PWD $A $HERE ${PATH:+inherited}"'),
        env={"HERE": "there"},
    )
    assert ended.stdout.decode() == f"{tmp_path} b=c there inherited\n"


def test_nobody_is_left_when_nobody_reads(server: Server) -> None:
    with _popen("exec", server.url, "--", "sh", "-c", "echo $$; exec yes") as client:
        pid = int(_line(client))
        assert client.stdout is not None
        client.stdout.close()
        client.stdout = None
        assert client.wait(scaled(PATIENCE)) == 141
        _wait_gone(pid)


def test_a_command_that_takes_too_long_is_ended(server: Server) -> None:
    words = ("exec", "--timeout", "0.3", server.url, "--", "sh", "-c", "echo $$; exec sleep 1000")
    ended = _run(*words)
    assert ended.returncode == 124
    assert _said(ended) == "exec-server: the command was ended after 0.3 s\n"
    _wait_gone(int(ended.stdout))


def test_a_terminal_without_one_here(server: Server) -> None:
    ended = _run("exec", "-t", server.url, "--", "sh", "-c", "tty; echo $TERM; cat", input=b"abc\n")
    assert ended.returncode == 0
    assert b"/dev/pts/" in ended.stdout
    assert b"dumb" in ended.stdout
    assert b"abc" in ended.stdout


# ---- exec: signals --------------------------------------------------------------------


def _trap(name: str) -> list[str]:
    return [
        "sh",
        "-c",
        f"trap 'echo {name}; exit 7' {name}; echo begun; sleep 1000 > /dev/null 2>&1 & wait",
    ]


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2"])
def test_signals_reach_the_command(ours: Server, name: str) -> None:
    with _popen("exec", ours.url, "--", *_trap(name)) as client:
        assert _line(client) == b"begun\n"
        client.send_signal(getattr(signal, f"SIG{name}"))
        assert _line(client) == f"{name}\n".encode()
        assert client.wait(scaled(PATIENCE)) == 7


def test_where_only_ctrl_c_can_be_sent_the_others_kill(server: Server) -> None:
    with _popen("exec", server.url, "--", *_trap("INT")) as client:
        assert _line(client) == b"begun\n"
        client.send_signal(signal.SIGINT)
        assert _line(client) == b"INT\n"
        assert client.wait(scaled(PATIENCE)) == 7
    with _popen("exec", server.url, "--", "sh", "-c", "echo begun; exec sleep 1000") as client:
        assert _line(client) == b"begun\n"
        client.send_signal(signal.SIGTERM)
        expected = 143 if server.kind == "ours" else 137
        assert client.wait(scaled(PATIENCE)) == expected


def test_who_insists_gets_an_end(server: Server) -> None:
    script = (
        "trap 'echo ignored' INT; echo $$; while :; do sleep 1000 > /dev/null 2>&1 & wait; done"
    )
    with _popen("exec", server.url, "--", "sh", "-c", script) as client:
        pid = int(_line(client))
        client.send_signal(signal.SIGINT)
        assert _line(client) == b"ignored\n"
        client.send_signal(signal.SIGINT)
        assert client.wait(scaled(PATIENCE)) == 130
        _wait_gone(pid)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_stopping_the_client_stops_the_command(ours: Server) -> None:
    with _popen("exec", ours.url, "--", "sh", "-c", "echo $$; exec cat", stdin=subprocess.PIPE) as (
        client
    ):
        assert client.stdin is not None
        pid = int(_line(client))
        client.send_signal(signal.SIGTSTP)
        eventually("stopped", lambda: _state(pid) == "T")
        client.send_signal(signal.SIGCONT)
        eventually("continued", lambda: _state(pid) == "S")
        client.stdin.write(b"on\n")
        client.stdin.close()
        client.stdin = None
        assert _line(client) == b"on\n"
        assert client.wait(scaled(PATIENCE)) == 0


def test_a_signal_before_the_command_ends_the_client(tmp_path: Path) -> None:
    # A program that never answers: the client hangs in its handshake.
    pid_file = tmp_path / "pid"
    with _popen(
        "exec", f"stdio:sh -c 'echo $$ > {pid_file}; exec sleep 1000'", "--", "x"
    ) as client:
        pid = int(eventually("pid", lambda: pid_file.exists() and pid_file.read_text().strip()))
        client.send_signal(signal.SIGTERM)
        assert client.wait(scaled(PATIENCE)) == 143
        _wait_gone(pid)


# ---- exec: what fails -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["ws://127.0.0.1:1"], ["cannot connect", "refused", "Is it running"]),
        (["ws://nowhere.invalid"], ["cannot connect", "spelt correctly"]),
        (["ws://user:pw@127.0.0.1"], ["must not contain a user name"]),
        (["nobody"], ["unknown target `nobody`", "targets.toml has none"]),
        (["stdio:/no/such/program"], ["cannot start /no/such/program"]),
        (["stdio:true"], ["must speak the protocol"]),
        (["--ca-file", "/etc/passwd", "wss://127.0.0.1"], ["no certificates in /etc/passwd"]),
        (["--token-env", "UNSET", "ws://127.0.0.1"], ["environment variable UNSET"]),
        (["--env", "=x", "ws://127.0.0.1"], ["there is no name"]),
        (["--env", "UNSET", "ws://127.0.0.1"], ["UNSET=VALUE"]),
        (["relay:https://127.0.0.1/e"], ["wants a token"]),
        (["-x"], ["try 'exec-server exec -h'"]),
    ],
)
def test_failures_say_what_to_do(words: list[str], texts: list[str]) -> None:
    ended = _run("exec", *words, "--", "true")
    assert (ended.returncode, ended.stdout) == (255, b"")
    said = _said(ended)
    assert said.startswith("Error: ")
    for text in texts:
        assert text in said
    assert "Traceback" not in said


def test_commands_that_cannot_be_run(server: Server) -> None:
    ended = _run("exec", server.url, "--", "no-such-program")
    assert ended.returncode == 255
    assert "cannot start no-such-program: No such file or directory\n" in _said(ended)
    ended = _run("exec", "--cwd", "/no/such/place", server.url, "--", "true")
    assert ended.returncode == 255
    assert _said(ended).endswith("No such file or directory (in /no/such/place)\n")


def test_a_lost_session_is_a_failure(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    serve = shlex.join([*server_command("ours"), "--listen", "stdio"])
    target = f"stdio:sh -c 'echo $$ > {pid_file}; exec {serve}'"
    with _popen("exec", target, "--", "sh", "-c", "echo begun; sleep 1000") as client:
        assert _line(client) == b"begun\n"
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        assert client.wait(scaled(PATIENCE)) == 255
        assert client.stderr is not None
        assert b"the connection is lost" in client.stderr.read()


# ---- targets --------------------------------------------------------------------------


def test_a_program_is_a_target(server: Server) -> None:
    """Over the standard streams of whichever server; what it says on stderr is passed on."""
    serve = shlex.join([*server_command(server.kind), "--listen", "stdio"])
    target = f"stdio:sh -c 'echo complaint >&2; exec {serve}'"
    ended = _run("exec", target, "--", "echo", "hi", env=server_environment(server.kind))
    assert (ended.returncode, ended.stdout) == (0, b"hi\n")
    assert "complaint\n" in _said(ended)


def test_names_and_tokens(config: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("right-token\n")
    flags = ("--ws-auth", "capability-token", "--ws-token-file", str(token))
    with start_server("ours", *flags) as server:
        (config / "wrong").write_text("wrong-token")
        (config / "targets.toml").write_text(
            f'[right]\nurl = "{server.url}"\ntoken_file = "{token}"\n'
            f'[wrong]\nurl = "{server.url}"\ntoken_file = "wrong"\n'
            f'[none]\nurl = "{server.url}"\n'
        )
        assert _run("exec", "right", "--", "echo", "hi", config=config).stdout == b"hi\n"
        given = ("--token-env", "T", server.url, "--", "echo", "hi")
        assert _run("exec", *given, env={"T": "right-token"}).stdout == b"hi\n"

        wrong = _run("exec", "wrong", "--", "true", config=config)
        assert wrong.returncode == 255
        assert "Is the token the one that this server knows" in _said(wrong)
        none = _run("info", "none", config=config)
        assert none.returncode == 1
        assert "The server wants a token: use --token-file" in _said(none)
        for ended in (wrong, none):
            assert "-token\n" not in _said(ended)
        unknown = _run("ls", "nope:/", config=config)
        assert unknown.returncode == 2
        assert "known targets: none, right, wrong" in _said(unknown)


def test_tokens_are_not_sent_in_the_open(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-1")
    ended = _run("info", "--token-file", str(tmp_path / "token"), "ws://192.0.2.1:7")
    assert ended.returncode == 2
    assert "a token is sent only to wss:// URLs" in _said(ended)
    assert "secret-1" not in _said(ended)


def test_an_environment_of_a_registry_is_a_target(config: Path) -> None:
    with ThreadedRelayService() as service, start_executor(service):
        (config / "targets.toml").write_text(
            f'[far]\nregistry = "{service.url}"\nenvironment_id = "env-1"\ntoken_env = "T"\n'
        )
        env = {"T": service.token}
        data = os.urandom(200_000)
        ended = _run("exec", "far", "--", "cat", config=config, env=env, input=data)
        assert (ended.returncode, ended.stdout) == (0, data)
        words = ("--token-env", "T", f"relay:{service.url}/env-1", "--", "echo", "hi")
        assert _run("exec", *words, env=env).stdout == b"hi\n"
        wrong = _run("exec", "--executor-key", "ab" * 32, *words, env=env)
        assert wrong.returncode == 255
        assert "cannot reach relay:" in _said(wrong)
        assert "whose key is not the expected one" in _said(wrong)


def test_targets_are_listed(config: Path) -> None:
    ended = _run("targets", config=config)
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert "there are no targets" in _said(ended)
    (config / "targets.toml").write_text('[b]\nurl = "ws://h"\n[a-long]\nstdio = ["x", "y z"]\n')
    assert _run("targets", config=config).stdout == b"a-long  stdio:x 'y z'\nb       ws://h\n"
    assert _run("targets", "--names", config=config).stdout == b"a-long\nb\n"


def test_a_client_needs_no_guardian(ours: Server) -> None:
    with _popen("exec", ours.url, "--", "sh", "-c", "echo begun; sleep 1000") as client:
        assert _line(client) == b"begun\n"
        assert descendants(client.pid) == {}


# ---- cp -------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree with everything that is easily lost."""
    root = tmp_path / "tree"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "program").write_bytes(b"#!/bin/sh\n")
    (root / "program").chmod(0o755)
    (root / "sub" / "name with spaces żółć").write_bytes(b"")
    (root / "large").write_bytes(os.urandom(5_000_000))
    (root / "link").symlink_to("program")
    return root


def _picture(root: Path) -> dict[str, object]:
    """What a tree consists of, for comparison."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = None
        else:
            found[name] = (path.stat().st_mode & 0o777, path.read_bytes())
    return found


def test_trees_go_there_and_back(server: Server, tree: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    ended = _run("cp", str(tree), f"{server.url}:{there}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    assert _picture(there) == _picture(tree)
    assert _run("cp", f"{server.url}:{there}", str(back)).returncode == 0
    assert _picture(back) == _picture(tree)


def test_into_a_directory_things_go_under_their_names(
    server: Server, tree: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    words = [str(tree / "program"), str(tree / "sub") + "/", f"{server.url}:{there}"]
    assert _run("cp", *words).returncode == 0
    assert sorted(path.name for path in there.iterdir()) == ["program", "sub"]
    assert _run("cp", f"{server.url}:{there}/program", ".", cwd=tmp_path).returncode == 0
    assert (tmp_path / "program").read_bytes() == b"#!/bin/sh\n"
    # The content of a directory, as with cp.
    assert _run("cp", f"{server.url}:{tree}/.", str(there)).returncode == 0
    assert (there / "large").exists()


def test_between_paths_of_one_target_and_of_two(
    ours: Server, server: Server, tree: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert _run("cp", f"{server.url}:{tree}", f"{server.url}:{one}").returncode == 0
    assert _picture(one).keys() == _picture(tree).keys()
    assert _run("cp", f"{server.url}:{tree}", f"{ours.url}:{two}").returncode == 0
    assert _picture(two) == _picture(tree)
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("exec-server-cp-*"))


def test_mistakes_of_copies(server: Server, tree: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for words, code, text in (
        ([str(tree), str(missing)], 2, "both sides are local"),
        ([str(tree)], 2, "no destination"),
        ([str(tree), server.url], 2, "names no path"),
        ([str(tree), str(tree), f"{server.url}:{missing}"], 1, "is not a directory"),
        ([str(tree), f"{server.url}:{missing}/"], 1, "is not a directory"),
        ([str(missing), f"{server.url}:{tmp_path}"], 1, f"{missing}: No such file"),
        ([f"{server.url}:{missing}", str(tmp_path)], 1, f"{missing}: No such file"),
    ):
        ended = _run("cp", *words)
        assert ended.returncode == code, words
        assert text in _said(ended)
        assert "Traceback" not in _said(ended)
    # The others are copied all the same.
    (tmp_path / "there").mkdir()
    words = [str(missing), str(tree / "program"), f"{server.url}:{tmp_path / 'there'}"]
    assert _run("cp", *words).returncode == 1
    assert (tmp_path / "there" / "program").exists()


def _begins(directory: Path) -> Callable[[], bool]:
    """Whether a file in the directory has some content by now."""
    return lambda: any(path.stat().st_size > 1_048_576 for path in directory.iterdir())


@pytest.mark.parametrize("goes_up", [True, False])
def test_an_interrupted_copy_has_no_final_name_and_goes_on(
    ours: Server, tmp_path: Path, goes_up: bool
) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    there.mkdir()
    with source.open("wb") as file:
        file.write(os.urandom(1_048_576))
        file.truncate(256 * 1_048_576)
    target = f"{ours.url}:{there / 'copy'}" if goes_up else str(there / "copy")
    origin = str(source) if goes_up else f"{ours.url}:{source}"
    with _popen("cp", origin, target) as client:
        eventually("begun", _begins(there))
        client.send_signal(signal.SIGINT)
        assert client.wait(scaled(PATIENCE)) == 130
    assert not (there / "copy").exists()
    assert _run("cp", origin, target).returncode == 0
    assert (there / "copy").read_bytes() == source.read_bytes()
    assert [path.name for path in there.iterdir()] == ["copy"]


def test_progress_is_shown_on_a_terminal(server: Server, tree: Path, tmp_path: Path) -> None:
    for flags, is_shown in (((), True), (("-q",), False)):
        master, slave = os.openpty()
        words = ("cp", *flags, str(tree), f"{server.url}:{tmp_path / 'there'}")
        with _popen(*words, stderr=slave) as client:
            os.close(slave)
            code = client.wait(scaled(PATIENCE))
        drawn = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(master, 65_536):
                drawn += data
        os.close(master)
        assert code == 0
        assert (b"100%" in drawn) == is_shown
        assert drawn.endswith(b"\x1b[K\r\n" if is_shown else b"")


# ---- ls, cat, rm, info ----------------------------------------------------------------


def test_directories_are_listed(server: Server, tree: Path) -> None:
    (tree / ".hidden").write_bytes(b"")
    place = f"{server.url}:{tree}"
    assert _run("ls", place).stdout.decode() == "large\nlink\nprogram\nsub\n"
    assert _run("ls", "-a", place).stdout.decode().splitlines()[0] == ".hidden"
    long = [line.split() for line in _run("ls", "-l", place).stdout.decode().splitlines()]
    assert [(words[0], words[-1]) for words in long] == [
        *(("-", "large"), ("-l", "link"), ("-", "program"), ("d", "sub")),
    ]
    assert long[0][1] == "5000000"
    both = _run("ls", f"{place}/sub", f"{place}/program").stdout.decode()
    assert both == f"{place}/sub:\nempty\nname with spaces żółć\n{tree}/program\n"


def test_a_target_alone_is_where_it_works(tmp_path: Path, config: Path) -> None:
    (tmp_path / "here").write_bytes(b"")
    with start_server("ours", cwd=tmp_path) as server:
        (config / "targets.toml").write_text(f'[build]\nurl = "{server.url}"\n')
        for words in ([server.url], [f"{server.url}:"], ["build"], ["build:"], ["build:."]):
            assert b"here\n" in _run("ls", *words, config=config).stdout
        assert _run("cat", "build:here", config=config).returncode == 0


def test_files_are_printed_as_they_are(server: Server, tree: Path) -> None:
    words = (f"{server.url}:{tree}/large", f"{server.url}:{tree}/program")
    ended = _run("cat", *words)
    assert ended.stdout == (tree / "large").read_bytes() + b"#!/bin/sh\n"
    ended = _run("cat", f"{server.url}:{tree}/missing", words[1])
    assert (ended.returncode, ended.stdout) == (1, b"#!/bin/sh\n")
    assert _said(ended) == f"exec-server: {server.url}:{tree}/missing: No such file or directory\n"


def test_files_are_removed(server: Server, tree: Path) -> None:
    place = f"{server.url}:{tree}"
    assert _run("rm", f"{place}/program").returncode == 0
    assert not (tree / "program").exists()
    again = _run("rm", f"{place}/program")
    assert (again.returncode, "No such file" in _said(again)) == (1, True)
    assert _run("rm", "-f", f"{place}/program").returncode == 0
    assert _run("rm", f"{place}/sub").returncode == 1
    assert (tree / "sub").exists()
    assert _run("rm", "-r", place).returncode == 0
    assert not tree.exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ls", "/tmp"], "write TARGET:/tmp"),
        (["cat", "ws://127.0.0.1:1"], "names no file"),
        (["cat", "build"], "names no file"),
        (["rm", "build:"], "names no file"),
    ],
)
def test_mistakes_about_places(words: list[str], text: str) -> None:
    ended = _run(*words)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert text in _said(ended)


def test_everything_is_not_removed(ours: Server) -> None:
    ended = _run("rm", "-r", f"{ours.url}:///")
    assert ended.returncode == 2
    assert "everything there is" in _said(ended)


def test_a_target_is_described(server: Server) -> None:
    text = _run("info", server.url).stdout.decode()
    for label in ("target ", "version ", "session ", "shell ", "directory ", "sandbox ", "can "):
        assert f"\n{label}" in f"\n{text}"
    facts = json.loads(_run("info", "--json", server.url).stdout)
    assert facts["target"] == server.url
    assert facts["directory"] == os.getcwd()
    assert facts["capabilities"]["fsWatchMissing"] is True
    assert isinstance(facts["sandbox"]["works"], bool)
    assert facts["capabilities"]["processResize"] is (server.kind == "ours")


# ---- help and completion --------------------------------------------------------------


@pytest.mark.parametrize("command", ["exec", "cp", "ls", "cat", "rm", "info", "targets"])
def test_help(command: str) -> None:
    ended = _run(command, "--help")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.decode().startswith(f"usage: exec-server {command}")


_BASH = r"""
source <(exec-server completion bash)
compopt() { :; }  # it works only while a key is pressed
for typed in "$@"; do
    read -r -a COMP_WORDS <<< "$typed"
    [[ $typed == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    $(complete -p exec-server | sed 's/.*-F \([^ ]*\).*/\1/')
    echo "${COMPREPLY[*]}"
done
"""
_TYPED = {
    "exec-server ": "exec cp ls cat rm info targets completion sandbox",
    "exec-server e": "exec",
    "exec-server exec --ti": "--timeout",
    "exec-server exec bu": "build",
    "exec-server exec build -- bu": "",
    "exec-server info ": "build lab",
    "exec-server cat ": "build: lab:",
    "exec-server cp la": "lab:",
    "exec-server cp /etc/os-rel": "/etc/os-release",
    "exec-server completion f": "fish",
    "exec-server --log-l": "--log-level",
    "exec-server --log-level d": "debug",
}


@pytest.fixture
def installed(config: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds exec-server and two targets."""
    (config / "targets.toml").write_text('[build]\nurl = "ws://h"\n[lab]\nstdio = "x"\n')
    program = tmp_path / "bin" / "exec-server"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(server_command("ours"))} "$@"\n')
    program.chmod(0o755)
    environment = _environment(config)
    return environment | {"PATH": f"{program.parent}:{environment['PATH']}"}


def test_bash_completes(installed: dict[str, str]) -> None:
    ended = subprocess.run(
        ["bash", "--norc", "-c", _BASH, "bash", *_TYPED],
        env=installed,
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=True,
    )
    assert dict(zip(_TYPED, ended.stdout.split("\n"), strict=False)) == _TYPED
    assert ended.stderr == ""


def test_fish_completes(installed: dict[str, str]) -> None:
    if not any(Path(place, "fish").exists() for place in ("/usr/bin", "/bin", "/usr/local/bin")):
        pytest.skip("there is no fish")
    script = 'exec-server completion fish | source; for t in $argv; complete -C "$t"; echo .; end'
    typed = [text for text in _TYPED if "--log-level " not in text and "/etc" not in text]
    ended = subprocess.run(
        ["fish", "--no-config", "-c", script, *typed],
        env=installed,
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=True,
    )
    answers = [
        {line.partition("\t")[0] for line in answer.split("\n") if line}
        for answer in ended.stdout.split(".\n")
    ]
    for text, answer in zip(typed, answers, strict=False):
        assert set(_TYPED[text].split()) <= answer, text


def test_a_listing_of_many_files_asks_in_turns(ours: Server, tmp_path: Path) -> None:
    for number in range(1100):
        (tmp_path / f"{number:04}").touch()
    lines = _run("ls", "-l", f"{ours.url}:{tmp_path}").stdout.decode().splitlines()
    assert [line[-4:] for line in lines] == [f"{number:04}" for number in range(1100)]
