"""The service of examples/cloud_agents with a double of the API, and attacks on it.

The container program only notes its starts, so that hundreds of sessions fit into a test. Most
tests share one service, because the import of `openai` takes seconds.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.adapters.cloud_agents import (
    EXAMPLE,
    EXECUTOR_KEY,
    PAGE,
    Api,
    Container,
    Service,
    as_json,
    deep_json,
    start_api,
    start_service,
)
from tests.support.server_internals import eventually

URL = "https://api.openai.com/v1/agents/api?region=eu&x=%2F"
_HEAD = b"POST /webhook HTTP/1.1\r\nhost: a\r\n"
# Nothing here happens by the clock, if an event does not cause it.
CALM = ("--idle-seconds", "3600", "--check-seconds", "3600", "--confirm-seconds", "0.05")


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with start_api() as running:
        yield running


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    return Container(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def service(api: Api, container: Container) -> Iterator[Service]:
    folder = container.program.with_name("sessions")
    flags = (*CALM, "--executors", "40")
    with start_service(api, folder, container.program, *flags) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def slow_senders(api: Api, service: Service, container: Container) -> Iterator[list[socket.socket]]:
    """Requests that do not get on, and an executor that does not end; see the last tests."""
    session = api.open_session("sess_stubborn", URL)
    service.send(api.connection_event("sess_stubborn"))
    container.wait_started(1, "sess_stubborn")
    session.status = "failed"
    service.send(api.failed_event("sess_stubborn"))
    links = [service.dial() for _ in range(20)]
    for link in links:
        link.sendall(_HEAD + b"content-length: 9\r\n\r\n1")
    yield links
    for link in links:
        link.close()


# ---- one executor for each session --------------------------------------------------------


def test_a_session_gets_an_executor_and_its_end_takes_it_away(
    api: Api, service: Service, container: Container
) -> None:
    session = api.open_session("sess_plain", URL)
    event = api.connection_event("sess_plain")
    headers = api.signed(event)
    assert service.send(event, headers) == 200
    container.wait_started(1, "sess_plain")
    assert container.starts("sess_plain") == [f"env-sess_plain {EXECUTOR_KEY}"]
    assert len(service.places("sess_plain")) == 1
    session.status = "failed"
    assert service.send(api.failed_event("sess_plain")) == 200
    service.wait_logged("sess_plain: removed")
    assert container.ends("sess_plain") == ["env-sess_plain"]
    assert service.places("sess_plain") == []
    assert service.send(event, headers) == 200  # replayed
    service.wait_logged("sess_plain: removed", times=2)
    assert len(container.starts("sess_plain")) == 1


def test_repeated_and_simultaneous_events_start_one_executor(
    api: Api, service: Service, container: Container
) -> None:
    session = api.open_session("sess_twice", URL)
    body = api.connection_event("sess_twice")
    headers = api.signed(body)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: service.send(body, headers), range(48)))
    assert answers == [200] * 48
    container.wait_started(1, "sess_twice")
    session.status = "failed"
    service.send(api.failed_event("sess_twice"))
    service.wait_logged("sess_twice: removed")
    assert len(container.starts("sess_twice")) == len(container.ends("sess_twice")) == 1


def test_a_restarted_service_has_one_executor_for_each_session(api: Api, tmp_path: Path) -> None:
    folder, container = tmp_path / "sessions", Container(tmp_path)
    session = api.open_session("sess_1", URL)
    with start_service(api, folder, container.program, *CALM) as service:
        service.send(api.connection_event("sess_1"))
        container.wait_started(1)
        (service.places()[0] / "workspace/kept").touch()
        (folder / "damaged").mkdir()
        (folder / "damaged/session.json").touch()
        service.stop(signal.SIGKILL)  # the executor ends with it: it sees the end of its stdin
    container.wait_ended(1)
    session.status, session.required_actions = "in_progress", []
    with start_service(api, folder, container.program, *CALM) as service:
        container.wait_started(2)  # without an event
        assert service.send(api.connection_event("sess_1")) == 200
        assert "damaged/session.json is no record" in service.stop()
    assert len(container.starts()) == len(container.ends()) == 2
    assert [path.name for path in folder.glob("*/workspace/*")] == ["kept"]


def test_two_services_cannot_share_a_folder(api: Api, service: Service) -> None:
    with pytest.raises(AssertionError, match="another service uses"):
        Service(api, service.folder, "bwrap")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--folder", "/proc/none"), "--folder: .*/proc/none"),
        (("--listen", "8080"), "invalid IP:PORT value: '8080'"),
        (("--listen", "192.0.2.1:80"), "--listen: .*192.0.2.1"),
        (("--read-only", "/nonexistent"), "--read-only: /nonexistent is not a directory"),
    ],
)
def test_a_start_that_cannot_work_says_why(
    flags: tuple[str, str], text: str, api: Api, container: Container, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=text) as caught:
        Service(api, tmp_path, container.program, *flags)
    assert "Traceback" not in str(caught.value)


def test_a_webhook_secret_that_is_none(api: Api, container: Container, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "secret", "sk-not-a-webhook-secret")
        with pytest.raises(AssertionError, match="is not of the form whsec_"):
            Service(api, tmp_path, container.program)


def test_idle_and_deleted_sessions_lose_their_executors(api: Api, tmp_path: Path) -> None:
    container = Container(tmp_path)
    session = api.open_session("sess_1", URL)
    api.open_session("sess_2", URL)
    flags = ("--idle-seconds", "0", "--check-seconds", "0.05", "--confirm-seconds", "0.05")
    with start_service(api, tmp_path / "sessions", container.program, *flags) as service:
        service.send(api.connection_event("sess_1"))
        service.send(api.connection_event("sess_2"))
        container.wait_started(2)
        actions = session.required_actions
        session.status, session.required_actions = "idle", []
        service.send(api.idle_event("sess_1"))
        container.wait_ended(1, "sess_1")
        assert len(service.places("sess_1")) == 1
        session.status, session.required_actions = "requires_action", actions
        service.send(api.connection_event("sess_1"))
        container.wait_started(2, "sess_1")
        del api.sessions["sess_2"]  # no event says so
        service.wait_logged("sess_2: removed")
        assert len(container.ends("sess_2")) == 1
        assert service.places("sess_2") == []


def test_an_expired_environment_ends_its_session(
    api: Api, service: Service, container: Container
) -> None:
    api.open_session("sess_expired", URL)
    service.send(api.connection_event("sess_expired"))
    container.wait_started(1, "sess_expired")
    assert service.send(api.expired_event("env-of-another-service")) == 200
    api.states["env-sess_expired"] = "expired"
    assert service.send(api.expired_event("env-sess_expired")) == 200
    service.wait_logged("sess_expired: removed")
    assert container.ends("sess_expired") == ["env-sess_expired"]


@pytest.mark.parametrize("state", ["connected", "failed", "disconnected", "missing", "?"])
def test_an_event_about_an_environment_is_only_a_question(
    state: str, api: Api, service: Service, container: Container
) -> None:
    name = f"sess_environment_{len(api.sessions)}"
    environment = f"env-{name}"
    api.open_session(name, URL)
    service.send(api.connection_event(name))
    container.wait_started(1, name)
    api.states[environment] = state
    for event in (api.expired_event, api.environment_failed_event):
        first = len(api.questions)
        assert service.send(event(environment)) == 200
        eventually("it is asked about", partial(_is_asked, api, first, environment))
        eventually("so is its session", partial(_is_asked, api, first, name))
    assert (container.ends(name), len(service.places(name))) == ([], 1)


def _is_asked(api: Api, first: int, name: str) -> bool:
    return name in api.questions[first:]


def test_sessions_that_need_no_environment_get_none(
    api: Api, service: Service, container: Container
) -> None:
    session = api.open_session("sess_late", URL)
    session.required_actions = []  # it has gone on meanwhile
    service.send(api.connection_event("sess_late"))
    assert service.send(api.connection_event("sess_of_another_project")) == 200
    service.wait_logged("sess_of_another_project: removed")
    eventually("the other is asked about", lambda: "sess_late" in api.questions)
    assert container.starts("sess_late") == container.starts("sess_of_another_project") == []


def test_files_of_all_kinds_are_removed(
    api: Api, service: Service, container: Container, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    session = api.open_session("sess_files", URL)
    service.send(api.connection_event("sess_files"))
    container.wait_started(1, "sess_files")
    workspace = service.places("sess_files")[0] / "workspace"
    (workspace / "link").symlink_to(tmp_path)
    (workspace / "closed/inner").mkdir(parents=True)
    (workspace / "closed").chmod(0)
    _make_deep(workspace, 1500)  # longer than a path can be, and than Python's recursion goes
    session.status = "failed"
    service.send(api.failed_event("sess_files"))
    service.wait_logged("sess_files: removed")
    assert not workspace.parent.exists()
    assert (tmp_path / "file").exists()


def _make_deep(folder: Path, depth: int) -> None:
    level = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("ddddd", dir_fd=level)
        below = os.open("ddddd", os.O_RDONLY, dir_fd=level)
        os.close(level)
        level = below
    os.close(level)


# ---- attacks ------------------------------------------------------------------------------


def _refusals(api: Api) -> dict[str, tuple[bytes, dict[str, str]]]:
    body = api.connection_event("sess_forged")
    good = api.signed(body)
    name, stamp, signature = good
    return {
        "no signature": (body, {}),
        "no id": (body, {key: good[key] for key in (stamp, signature)}),
        "another secret": (body, api.signed(body, secret=Api().secret)),
        "another body": (body.replace(b"required", b"REQUIRED"), good),
        "another id": (body, {**good, name: "wh_other"}),
        "another time": (body, {**good, stamp: str(int(good[stamp]) + 1)}),
        "old": (body, api.signed(body, age=302)),
        "from the future": (body, api.signed(body, age=-400)),
        "no number": (body, {**good, stamp: "now"}),
        "a long number": (body, {**good, stamp: "9" * 4000}),
        "not ASCII": (body, {**good, signature: "v1,\xe9"}),
        "many signatures": (body, {**good, signature: "v1,AAAA " * 500}),
        "two signature headers": (body, {**good, "Webhook-Signature": "v1,AAAA"}),
        "not UTF-8": (b"\xff\xfe", api.signed(b"x")),
        "not JSON": (b"sess_forged", api.signed(b"sess_forged")),
        "deep JSON": (deep_json(30_000), api.signed(deep_json(30_000))),
    }


@pytest.mark.parametrize("name", list(_refusals(Api())))
def test_a_forged_event_is_refused(
    name: str, api: Api, service: Service, container: Container
) -> None:
    api.open_session("sess_forged", URL)
    body, headers = _refusals(api)[name]
    assert service.send(body, headers) == 400
    assert "sess_forged" not in api.questions
    assert (container.starts("sess_forged"), service.places("sess_forged")) == ([], [])


@pytest.mark.parametrize(
    "session_id",
    ["../../etc", "/etc", "", ".", "a/b", "a\0b", "a b", "é", "x" * 129, 7, None, ["a"], {}],
    ids=repr,
)
def test_a_hostile_session_id_is_no_path(session_id: object, service: Service) -> None:
    data = {"id": session_id, "required_action": {"type": "environment_connection"}}
    body = as_json({"type": "agent.session.action_required", "data": data})
    before = sorted(service.folder.parent.iterdir())
    assert service.send(body) == 400
    assert service.places(str(session_id) or "none") == []
    assert sorted(service.folder.parent.iterdir()) == before


def test_an_id_like_a_flag_is_a_value(api: Api, service: Service, container: Container) -> None:
    session = api.open_session("--help", URL)
    assert session.environment.type == "self_hosted"
    session.environment.id = "--version"
    service.send(api.connection_event("--help"))
    eventually("it is started", lambda: f"--version {EXECUTOR_KEY}" in container.starts())


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.completed", "data": {"id": "resp_1"}},
        {"type": "agent.session.unheard_of", "data": {"id": "sess_other"}},
        {"type": "agent.session.action_required", "data": {"id": "sess_other"}},
        {"type": "safety.alert.created"},
        {"type": 7, "data": 8},
        [],
        "text",
        None,
    ],
    ids=repr,
)
def test_other_events_have_no_effect(
    event: object, api: Api, service: Service, container: Container
) -> None:
    api.open_session("sess_other", URL)
    assert service.send(as_json(event)) == 200
    assert (container.starts("sess_other"), service.places("sess_other")) == ([], [])


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /webhook HTTP/1.1\r\nhost: a\r\n\r\n", 405),
        (b"POST /other HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n", 404),
        (_HEAD + b"content-length: 99999999\r\n\r\n", 413),
        (_HEAD + b"content-length: -1\r\n\r\n", 400),
        (_HEAD + b"x: " + b"y" * 66_000, 431),
        (_HEAD + b"transfer-encoding: chunked\r\n\r\n10001\r\n" + b"y" * 0x10001, 413),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    ],
    ids=["method", "path", "huge", "negative", "headers", "chunks", "TLS"],
)
def test_a_request_that_is_no_webhook(request_: bytes, status: int, service: Service) -> None:
    assert service.request(request_).status == status


def test_more_requests_than_there_may_be_are_refused(api: Api, service: Service) -> None:
    body = api.idle_event("sess_nowhere")
    links = [service.dial() for _ in range(64)]
    try:
        for link in links:
            link.sendall(_HEAD)
        eventually("all places are taken", lambda: service.send(body) == 503)
    finally:
        for link in links:
            link.close()
    eventually("places are free", lambda: service.send(body) == 200)


def test_hundreds_of_sessions_share_a_few_executors(api: Api, tmp_path: Path) -> None:
    folder, container = tmp_path / "sessions", Container(tmp_path)
    for number in range(300):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "session.json").write_text(f'{{"id": "old_{number}"}}')
        api.open_session(f"old_{number}", URL).required_actions = []
    names = [f"new_{number}" for number in range(200)]
    for name in names:
        api.open_session(name, URL)
    flags = (*CALM, "--executors", "3")
    with start_service(api, folder, container.program, *flags) as service:
        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(lambda name: service.send(api.connection_event(name)), names)
            assert list(answers) == [200] * 200
        assert len(service.places()) == 500
        assert service.send(api.connection_event("one_more")) == 503
        container.wait_started(3)
        first = [line.split()[0].removeprefix("env-") for line in container.starts()]
        assert len(first) == 3
        for name in first:
            api.sessions[name].status = "failed"
            service.send(api.failed_event(name))
        container.wait_started(6)
        service.stop()
    assert len(container.starts()) == len(container.ends()) == 6


def test_an_executor_that_dies_is_started_again(
    api: Api, service: Service, container: Container
) -> None:
    api.open_session("sess_broken", URL)
    broken = container.program.with_name("broken")
    broken.touch()
    try:
        service.send(api.connection_event("sess_broken"))
        container.wait_started(2, "sess_broken")
        assert service.send(api.connection_event("sess_broken")) == 200  # changes nothing
    finally:
        broken.unlink()
    container.wait_started(3, "sess_broken")
    assert "sess_broken: executor ended, exit code 3: it is broken" in service.log()
    assert container.ends("sess_broken") == []


def test_an_api_that_is_away_ends_no_executor(
    api: Api, service: Service, container: Container
) -> None:
    api.open_session("sess_there", URL)
    service.send(api.connection_event("sess_there"))
    container.wait_started(1, "sess_there")
    api.is_away = True
    service.send(api.idle_event("sess_there"))
    api.open_session("sess_away", URL)
    assert service.send(api.connection_event("sess_away")) == 200
    service.wait_logged("sess_away: the API does not answer")
    service.wait_logged("sess_there: the API does not answer")
    assert container.ends("sess_there") == []
    api.is_away = False
    container.wait_started(1, "sess_away")


_NO_TYPE = b'{"id": "a", "status": "idle", "required_actions": [], "environment": {"type": "new"}}'


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"null", b"{}", b'"x"', b"not JSON", _NO_TYPE])
def test_an_answer_that_is_no_session_removes_no_files(
    body: bytes, api: Api, service: Service, container: Container
) -> None:
    """Such as that of a proxy that asks its user for a password."""
    name = f"sess_kept_{len(api.sessions)}"
    api.open_session(name, URL)
    service.send(api.connection_event(name))
    container.wait_started(1, name)
    (file := service.places(name)[0] / "workspace/file").touch()
    api.nonsense = body
    try:
        service.send(api.idle_event(name))
        eventually("it is asked", lambda: api.questions.count(name) >= 3)
        service.send(api.idle_event(name))
        eventually("it is asked again", lambda: api.questions.count(name) >= 4)
    finally:
        api.nonsense = None
    assert (container.ends(name), file.exists()) == ([], True)


def test_a_404_that_passes_removes_no_files(
    api: Api, service: Service, container: Container
) -> None:
    """Such as that of a proxy which does not know its route for two seconds."""
    api.open_session("sess_passing", URL)
    service.send(api.connection_event("sess_passing"))
    container.wait_started(1, "sess_passing")
    before = api.questions.count("sess_passing")
    api.is_misrouted = True
    try:
        service.send(api.idle_event("sess_passing"))
        eventually("it is asked", lambda: api.questions.count("sess_passing") > before)
    finally:
        api.is_misrouted = False
    service.send(api.idle_event("sess_passing"))
    eventually("it is asked again", lambda: api.questions.count("sess_passing") >= before + 3)
    assert container.ends("sess_passing") == []
    assert len(service.places("sess_passing")) == 1


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        (None, "it is missing, but listed"),
        (b"{}", "it is missing, and the list of sessions is none"),
        (b'{"data": {}}', "it is missing, and the list of sessions is none"),
        (b"<html>", "it is missing, and the list of sessions is none"),
        (b"null", "it is missing, and the list of sessions is none"),
        (b"[]", ""),
    ],
    ids=repr,
)
def test_a_deletion_needs_a_list_without_the_session(
    listed: bytes | None, reason: str, api: Api, service: Service, container: Container
) -> None:
    name = f"sess_listed_{len(api.sessions)}"
    api.open_session(name, URL)
    service.send(api.connection_event(name))
    container.wait_started(1, name)
    api.missing.add(name)
    api.listed = listed
    try:
        service.send(api.idle_event(name))
        service.wait_logged(f"{name}: the API does not answer: {reason}")
    finally:
        api.listed = None
        api.missing.discard(name)
    assert (container.ends(name), len(service.places(name))) == ([], 1)


def test_a_listing_of_several_pages_is_read_to_its_end(
    api: Api, service: Service, container: Container
) -> None:
    api.open_session("sess_deleted", URL)
    service.send(api.connection_event("sess_deleted"))
    container.wait_started(1, "sess_deleted")
    for number in range(2 * PAGE):
        api.open_session(f"sess_elsewhere_{number}", URL)
    del api.sessions["sess_deleted"]  # no event says so
    service.send(api.idle_event("sess_deleted"))
    service.wait_logged("sess_deleted: removed")
    pages = {question for question in api.questions if "?limit=100&" in question}
    assert len(pages) >= 2


def test_the_key_of_a_launcher_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    launcher = importlib.import_module("executors").Launcher("bwrap", EXECUTOR_KEY)
    assert EXECUTOR_KEY not in repr(launcher)


def test_a_disk_without_room_ends_no_service(
    api: Api, service: Service, container: Container
) -> None:
    name = hashlib.sha256(b"sess_full").hexdigest()[:32]
    (service.folder / name).touch()  # no directory can be made there
    api.open_session("sess_full", URL)
    assert service.send(api.connection_event("sess_full")) == 503
    (service.folder / name).unlink()
    assert service.send(api.connection_event("sess_full")) == 200
    container.wait_started(1, "sess_full")


@pytest.mark.parametrize(
    "directory",
    ["/", "/etc", "/usr/x", "/proc/1", "relative", "/a/../etc", "//a", "/a\nb", "/home", ""],
    ids=repr,
)
def test_a_workspace_that_would_cover_the_system_is_refused(
    directory: str, api: Api, service: Service, container: Container
) -> None:
    name = f"sess_covers_{len(api.sessions)}"
    api.open_session(name, URL, directory=directory)
    service.send(api.connection_event(name))
    service.wait_logged(f"{name}: failed: the workspace directory")
    assert container.starts(name) == []


def test_slow_senders_are_cut_off(slow_senders: list[socket.socket]) -> None:
    """They came before all others: the events of the other tests have been answered meanwhile."""
    assert [link.recv(1) for link in slow_senders] == [b""] * len(slow_senders)


def test_an_executor_that_does_not_end_is_killed(service: Service) -> None:
    service.wait_logged("sess_stubborn: executor ended, exit code -9")
    service.wait_logged("sess_stubborn: removed")


def test_an_executor_that_does_not_end_is_not_left_by_a_service_that_ends(
    api: Api, tmp_path: Path
) -> None:
    container = Container(tmp_path)
    with start_service(api, tmp_path / "sessions", container.program, *CALM) as service:
        session = api.open_session("sess_too_stubborn", URL)
        service.send(api.connection_event("sess_too_stubborn"))
        container.wait_started(1, "sess_too_stubborn")
        session.status, asked = "failed", len(api.questions)
        service.send(api.failed_event("sess_too_stubborn"))
        eventually("the API is asked", lambda: "sess_too_stubborn" in api.questions[asked:])
        # Its end takes five seconds. The service ends before, and leaves no process.


def test_a_wrong_key_is_noticed_before_files_are_removed(tmp_path: Path) -> None:
    with start_api() as api:
        api.is_away = True
        with pytest.raises(AssertionError, match="the API cannot be asked"):
            Service(api, tmp_path, "bwrap")
