"""A real Codex as the client of an executor behind a relay, with a scripted model.

Everything runs with our executor and with the reference's, through the same relay, and the
same is expected of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exec_server.client.engine.relay import RelayDialer
from exec_server.client.engine.session import ClientSession
from exec_server.errors import RegistryError, SessionLost
from exec_server.relay.frames import Kind, encode
from tests.conformance.codex import (
    Codex,
    appears,
    command,
    patch,
    report,
    start_app_server,
    start_codex,
    write,
)
from tests.conformance.model import Model, Step, ToolCall
from tests.relay_service import TO_HARNESS, Endpoint, ThreadedRelayService
from tests.support.client import Server, b64, descendants, reference_version, survivors
from tests.support.client_targets import bounded, until_lost
from tests.support.relay import ENVIRONMENT, register_absent, start_executor
from tests.support.server_internals import is_kept_for_later

pytestmark = pytest.mark.reference

EXECUTOR_KEY, HARNESS_TOKEN = "the-executors-key", "the-harnesss-token"
CALLERS = {f"Bearer {EXECUTOR_KEY}": "executor", f"Bearer {HARNESS_TOKEN}": "harness"}

# Prints eight lines in 0.8 s and leaves a mark beside each, for tests to wait for.
_LINES = "for i in 1 2 3 4 5 6 7 8; do echo line-$i; touch mark-$i; sleep 0.1; done; exit 5"
_ALL_LINES = "".join(f"line-{n}\n" for n in range(1, 9))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For executors: a shell in it has nothing to read or say when it starts."""
    return tmp_path_factory.mktemp("home").resolve()


def _running(
    kind: str, service: ThreadedRelayService, home: Path, *flags: str
) -> AbstractContextManager[Server]:
    variables = {"CODEX_API_KEY": EXECUTOR_KEY, "HOME": str(home)}
    return start_executor(service, *flags, kind=kind, env=variables)


@dataclass
class Stage:
    """A relay, an executor attached to it, and a folder to work in."""

    kind: str
    service: ThreadedRelayService
    executor: Server
    home: Path
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.variables = self.variables or pointing_to(self.service)

    def codex(self, script: Sequence[Step], **o: Any) -> AbstractContextManager[Codex]:
        return start_codex(script, self.folder, variables=self.variables, **o)

    def play(self, *script: Step, **options: Any) -> Model:
        """Runs a whole script and returns what the model was told."""
        with self.codex(script, **options) as client:
            return client.completed()

    def cut(self, *, harness: bool = False, executor: bool = False) -> None:
        """Drops connections without a word, both at the same moment."""
        relay = self.service.service

        def abort() -> None:
            sockets = relay.harnesses(ENVIRONMENT) if harness else []
            attached = relay.executor(ENVIRONMENT) if executor else None
            for socket in [*sockets, *([attached] if attached else [])]:
                socket.abort()

        self.service.call(abort)


def pointing_to(service: ThreadedRelayService) -> dict[str, str]:
    """What makes a Codex use the environment of a registry."""
    prefix = "CODEX_EXEC_SERVER_NOISE_"
    return {
        f"{prefix}REGISTRY_URL": service.url,
        f"{prefix}ENVIRONMENT_ID": ENVIRONMENT,
        f"{prefix}AUTH_TOKEN": HARNESS_TOKEN,
    }


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService(authorizations=CALLERS) as running:
        yield running


@pytest.fixture
def stage(service: ThreadedRelayService, kind: str, home: Path, folder: Path) -> Iterator[Stage]:
    """A relay and an executor of this kind for one test, which may do anything to them."""
    with _running(kind, service, home) as executor:
        yield Stage(kind, service, executor, home, folder)


@pytest.fixture(scope="module")
def shared(kind: str, home: Path) -> Iterator[tuple[ThreadedRelayService, Server]]:
    with (
        ThreadedRelayService(authorizations=CALLERS) as running,
        _running(kind, running, home) as executor,
    ):
        yield running, executor


@pytest.fixture
def calm(
    shared: tuple[ThreadedRelayService, Server], kind: str, home: Path, folder: Path
) -> Iterator[Stage]:
    """The same for tests that leave both as they were; nothing that they started may be left."""
    service, executor = shared
    before = descendants(executor.process.pid)
    yield Stage(kind, service, executor, home, folder)
    started = {
        pid: start
        for pid, start in descendants(executor.process.pid).items()
        if pid not in before and not is_kept_for_later(pid)
    }
    assert not (left := survivors(started)), f"processes left behind: {left}"


def _ended(model: Model, call_id: str) -> tuple[int | None, str]:
    told = report(model.outputs[call_id])
    return told.exit_code, told.text


# ---- work ------------------------------------------------------------------------------


def test_commands(calm: Stage) -> None:
    secret = "canary-f3a71c"
    before = len(calm.service.requests_to(Endpoint.CONNECT))
    model = calm.play(
        [command("both", f"echo {secret}; sleep 0.1; echo err >&2; exit 3")],
        [command("folder", "pwd; cat; echo end of input", workdir=str(calm.folder))],
        [command("bytes", r"printf 'ü\xff\x00z'")],
        [command("signal", "kill -9 $$")],
    )
    assert _ended(model, "both") == (3, f"{secret}\nerr\n")
    assert _ended(model, "folder") == (0, f"{calm.folder}\nend of input\n")
    assert _ended(model, "bytes") == (0, "ü\ufffd\0z")
    assert _ended(model, "signal") == (137, "")
    # All of it in one stream, of which the relay could read nothing.
    assert len(calm.service.requests_to(Endpoint.CONNECT)) == before + 1
    seen = b"".join(message.data for message in calm.service.frames)
    assert len(seen) > 10_000
    for text in (secret, b64(f"{secret}\n"), "process/start"):
        assert text.encode() not in seen


def test_terminal_that_is_typed_into(calm: Stage) -> None:
    text = "test -t 0 && stty size; read a; echo hi $a; read b; echo bye $b; exit 4"
    model = calm.play(
        [command("start", text, tty=True, yield_time_ms=500)],
        write("first", "start", "Ann\n", yield_time_ms=500),
        write("second", "start", "Zoë\n"),
    )
    started, first = report(model.outputs["start"]), report(model.outputs["first"])
    assert (started.session is not None, started.text) == (True, "24 80\r\n")
    assert (first.session, first.text) == (started.session, "Ann\r\nhi Ann\r\n")
    assert _ended(model, "second") == (4, "Zoë\r\nbye Zoë\r\n")


def test_patches(calm: Stage) -> None:
    # The large one arrives as one message of 8 MB in more than a hundred records.
    filler = "x" * 59 + "\n"
    (calm.folder / "large.txt").write_text("first\n" + filler * 100_000)
    (calm.folder / "delete.txt").write_text("x\n")
    model = calm.play(
        [patch("small", "*** Add File: new/add.txt", "+hello", "*** Delete File: delete.txt")],
        [patch("large", "*** Update File: large.txt", "@@", "-first", "+changed")],
        [patch("bad", "*** Update File: missing.txt", "@@", "-a", "+b")],
    )
    assert model.outputs["small"].endswith("files:\nA new/add.txt\nD delete.txt\n")
    assert model.outputs["large"].endswith("files:\nM large.txt\n")
    assert model.outputs["bad"] == (
        "apply_patch verification failed: Failed to read file to update "
        f"{calm.folder}/missing.txt: No such file or directory (os error 2)"
    )
    assert (calm.folder / "new" / "add.txt").read_text() == "hello\n"
    assert (calm.folder / "large.txt").read_text() == "changed\n" + filler * 100_000
    assert not (calm.folder / "delete.txt").exists()


def test_big_output(calm: Stage) -> None:
    # The client counts four bytes as a token and shows the ends of what it got.
    model = calm.play(
        [command("numbers", "seq 1 100000", max_output_tokens=100)],
        [command("endless", "yes | head -c 30000000; echo end", max_output_tokens=100)],
        [command("terminal", "seq 1 20000", tty=True, max_output_tokens=100)],
    )
    numbers, terminal = report(model.outputs["numbers"]), report(model.outputs["terminal"])
    assert (numbers.exit_code, numbers.tokens) == (0, 147_224)
    assert "\n1\n2\n3\n" in numbers.text
    assert numbers.text.endswith("\n99999\n100000\n")
    assert (terminal.exit_code, terminal.tokens) == (0, 32_224)
    assert terminal.text.endswith("\r\n19999\r\n20000\r\n")
    code, text = _ended(model, "endless")
    assert (code, text[-8:]) == (0, "y\ny\nend\n")


def test_parallel_commands(calm: Stage) -> None:
    # Each waits for the file of its successor: none can end unless all run at once.
    count = 8
    calls = [
        command(
            f"c{n}",
            f"touch here-{n}; while ! test -e here-{(n + 1) % count}; do sleep 0.02; done;"
            f" echo {n}; exit {n}",
        )
        for n in range(count)
    ]
    model = calm.play(calls)
    assert [_ended(model, f"c{n}") for n in range(count)] == [(n, f"{n}\n") for n in range(count)]


def test_a_workspace_can_be_written_and_nothing_else(calm: Stage) -> None:
    outside = "/etc/exec-server-conformance"
    model = calm.play(
        [command("inside", "echo new > new.txt && cat new.txt")],
        [command("outside", f"echo new > {outside}")],
        [command("network", "exec 3<>/dev/tcp/127.0.0.1/9", shell="/bin/bash")],
        [patch("patch", "*** Add File: added.txt", "+first")],
        [patch("escape", f"*** Add File: {outside}", "+first")],
        sandbox="workspace-write",
    )
    assert _ended(model, "inside") == (0, "new\n")
    assert "Read-only file system" in report(model.outputs["outside"]).text
    assert report(model.outputs["network"]).exit_code != 0
    assert sorted(path.name for path in calm.folder.iterdir()) == ["added.txt", "new.txt"]
    assert not Path(outside).exists()


def test_two_clients_at_once(calm: Stage) -> None:
    # Each waits for the other's file.
    def script(mine: str, other: str) -> list[Step]:
        text = f"touch {mine}; while ! test -e {other}; do sleep 0.02; done; echo {mine}"
        return [[command("c", text)]]

    with calm.codex(script("a", "b")) as one, calm.codex(script("b", "a")) as two:
        assert _ended(one.completed(), "c") == (0, "a\n")
        assert _ended(two.completed(), "c") == (0, "b\n")


def test_command_left_running_ends_with_the_client(calm: Stage) -> None:
    # The fixture checks that it is gone.
    model = calm.play([command("c", "echo ready; sleep 1000 & sleep 1001", yield_time_ms=500)])
    assert report(model.outputs["c"]).session is not None


# ---- recovery --------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["harness", "executor", "both"])
def test_connection_lost_during_a_command(stage: Stage, lost: str) -> None:
    script: list[Step] = [[command("c", _LINES)], [command("next", "echo after")]]
    with stage.codex(script) as client:
        appears(stage.folder / "mark-3")
        stage.cut(harness=lost != "executor", executor=lost != "harness")
        model = client.completed()
    assert len(stage.service.requests_to(Endpoint.VALIDATE)) >= 2
    assert len(stage.service.requests_to(Endpoint.REGISTER)) == 1
    assert _ended(model, "c") == (5, _ALL_LINES)
    assert _ended(model, "next") == (0, "after\n")


def test_connection_lost_during_big_output(stage: Stage) -> None:
    text = "seq 1 50000; touch half; seq 50001 100000"
    with stage.codex([[command("c", text, max_output_tokens=100)]]) as client:
        appears(stage.folder / "half")
        stage.cut(executor=True)
        told = report(client.completed().outputs["c"])
    assert (told.exit_code, told.tokens) == (0, 147_224)
    assert told.text.endswith("\n99999\n100000\n")


def test_connection_lost_before_typing(calm: Stage) -> None:
    def cut_and_type(outputs: dict[str, str]) -> Sequence[ToolCall]:
        calm.cut(harness=True)
        return type_more(outputs)

    type_more = write("second", "start", "Zoë\n")
    text = "read a; echo hi $a; read b; echo bye $b"
    model = calm.play(
        [command("start", text, tty=True, yield_time_ms=500)],
        write("first", "start", "Ann\n", yield_time_ms=500),
        cut_and_type,
    )
    assert report(model.outputs["first"]).text == "Ann\r\nhi Ann\r\n"
    assert _ended(model, "second") == (0, "Zoë\r\nbye Zoë\r\n")


def test_executor_that_comes_late(
    service: ThreadedRelayService, kind: str, home: Path, folder: Path
) -> None:
    script: list[Step] = [[command("c", "echo here")]]
    register_absent(service, f"Bearer {EXECUTOR_KEY}")
    with start_codex(script, folder, variables=pointing_to(service)) as client:
        # Answered with 409 environment_offline, after which the client asks again.
        service.until(lambda: service.service.requests_to(Endpoint.CONNECT))
        with _running(kind, service, home):
            assert _ended(client.completed(), "c") == (0, "here\n")


def test_executor_replaced_during_a_command(stage: Stage) -> None:
    script: list[Step] = [[command("c", _LINES)], [command("next", "echo after")]]
    with stage.codex(script) as client:
        appears(stage.folder / "mark-3")
        stage.executor.stop()
        with _running(stage.kind, stage.service, stage.home):
            model = client.completed()
    assert model.outputs["c"] == (
        'exec_command failed: ProcessFailed { message: "exec-server transport disconnected: Noise '
        "relay stream reset; failed to resume exec-server session: exec-server protocol error: "
        'executor key changed during session recovery" }'
    )
    assert _ended(model, "next") == (0, "after\n")


# ---- what the client says of handshakes that fail ----------------------------------------


def _refuse(faults: Any) -> None:
    faults.http.answer(Endpoint.VALIDATE, 200, {"valid": False}, times=None)


def _garble(faults: Any) -> None:
    faults.frames.corrupt_payload(direction=TO_HARNESS, kind=Kind.HANDSHAKE, times=None)


def _send_data_instead(faults: Any) -> None:
    faults.frames.alter(
        lambda _, frame: [encode(frame._replace(kind=Kind.DATA, payload=b"x"))],
        direction=TO_HARNESS,
        kind=Kind.HANDSHAKE,
        times=None,
    )


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_refuse, "Noise relay stream reset"),
        (
            _garble,
            "Noise relay handshake failed: Noise channel handshake failed: "
            "Cipher error: Decrypt error",
        ),
        (_send_data_instead, "Noise relay received data before handshake completion"),
    ],
)
def test_failed_handshake(stage: Stage, spoil: Callable[[Any], None], text: str) -> None:
    spoil(stage.service.faults)
    expected = (
        "exec-server connection attempt failed: Noise harness handshake failed before "
        f"connection became ready: {text}"
    )
    with start_app_server(stage.variables) as client:
        status = client.call("environment/status", {"environmentId": "remote"})
        assert status == {"status": "disconnected", "error": expected}
        # Once everything is in order, the next request connects.
        stage.service.faults.clear()
        info = client.call("environment/info", {"environmentId": "remote"})
    assert info["cwd"] == Path.cwd().as_uri()


def test_environment_probes(calm: Stage) -> None:
    with start_app_server(calm.variables) as client:
        status = client.call("environment/status", {"environmentId": "remote"})
        assert status == {"status": "ready"}
        info = client.call("environment/info", {"environmentId": "remote"})
    assert info == {"shell": {"name": "bash", "path": "/bin/bash"}, "cwd": Path.cwd().as_uri()}


# ---- an executor whose credential is rejected ---------------------------------------------

_needs_rejection = pytest.mark.skipif(
    reference_version() < (0, 169), reason="older references reset the stream instead"
)
_REJECTED = "environment registry authentication error: executor credentials rejected"


def _reject_executor(service: ThreadedRelayService) -> None:
    service.faults.http.answer(Endpoint.VALIDATE, 401, times=None)


def _asked(service: ThreadedRelayService) -> tuple[int, int]:
    connects = service.requests_to(Endpoint.CONNECT)
    return len(connects), len(service.requests_to(Endpoint.VALIDATE))


@_needs_rejection
def test_codex_gives_up_when_the_executor_is_rejected(stage: Stage) -> None:
    _reject_executor(stage.service)
    with start_app_server(stage.variables) as client:
        status = client.call("environment/status", {"environmentId": "remote"})
        assert status["status"] == "disconnected"
        assert _REJECTED in status["error"]
        stage.service.faults.clear()
        _, text = client.failure("environment/info", {"environmentId": "remote"})
        assert _REJECTED in text
    assert _asked(stage.service) == (1, 1)
    assert stage.executor.process.poll() is None
    assert len(stage.service.requests_to(Endpoint.REGISTER)) == 1


@_needs_rejection
def test_our_client_gives_up_when_the_executor_is_rejected(stage: Stage) -> None:
    _reject_executor(stage.service)
    dialer = RelayDialer(stage.service.url, ENVIRONMENT, token=HARNESS_TOKEN)

    async def connect() -> None:
        async with ClientSession(dialer):
            raise AssertionError("connected")

    with pytest.raises(RegistryError, match="the registry has rejected the executor's credential"):
        bounded(connect())
    assert _asked(stage.service) == (1, 1)
    # Another credential of the executor, and a new program: all is well again.
    stage.service.faults.clear()
    assert _ended(stage.play([command("one", "echo fine")]), "one") == (0, "fine\n")


@_needs_rejection
def test_our_client_does_not_resume_at_a_rejected_executor(stage: Stage) -> None:
    dialer = RelayDialer(stage.service.url, ENVIRONMENT, token=HARNESS_TOKEN)

    async def lose() -> None:
        async with ClientSession(dialer) as session:
            _reject_executor(stage.service)
            stage.cut(harness=True)
            await until_lost(session)

    with pytest.raises(SessionLost, match="the registry has rejected the executor's credential"):
        bounded(lose())
    assert _asked(stage.service) == (2, 2)


# ---- older relays ------------------------------------------------------------------------


@pytest.fixture(params=["plain", "text"])
def older(request: pytest.FixtureRequest, home: Path, folder: Path) -> Iterator[Stage]:
    """Our executor without encryption, and where a client reaches it; the reference has no such."""
    with (
        ThreadedRelayService(plaintext=True) as relay,
        _running("ours", relay, home, "--relay-security", request.param) as executor,
    ):
        url = relay.plain_url(ENVIRONMENT)
        # This makes the client speak relay frames.
        assert ("role=harness" in url) == (request.param == "plain")
        yield Stage("ours", relay, executor, home, folder, {"CODEX_EXEC_SERVER_URL": url})
        assert f"--relay-security {request.param} is not encrypted" in executor.stderr()


def test_commands_through_an_older_relay(older: Stage) -> None:
    filler = "x" * 59 + "\n"
    (older.folder / "large.txt").write_text("first\n" + filler * 100_000)
    model = older.play(
        [command("both", "echo out; sleep 0.1; echo err >&2; exit 3")],
        [command("start", "read a; echo hi $a; exit 4", tty=True, yield_time_ms=500)],
        write("typed", "start", "Zoë\n"),
        [patch("large", "*** Update File: large.txt", "@@", "-first", "+changed")],
        [command("numbers", "seq 1 100000", max_output_tokens=100)],
    )
    assert _ended(model, "both") == (3, "out\nerr\n")
    assert _ended(model, "typed") == (4, "Zoë\r\nhi Zoë\r\n")
    assert model.outputs["large"].endswith("files:\nM large.txt\n")
    assert report(model.outputs["numbers"]).tokens == 147_224


@pytest.mark.parametrize("lost", ["harness", "executor"])
def test_connection_lost_through_an_older_relay(older: Stage, lost: str) -> None:
    script: list[Step] = [[command("c", _LINES)], [command("next", "echo after")]]
    with older.codex(script) as client:
        appears(older.folder / "mark-3")
        older.cut(harness=lost == "harness", executor=lost == "executor")
        model = client.completed()
    assert _ended(model, "c") == (5, _ALL_LINES)
    assert _ended(model, "next") == (0, "after\n")
