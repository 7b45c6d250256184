"""What goes to a server and what comes back, as text."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from msgspec import Raw

from exec_server.client.engine import messages
from exec_server.errors import InvalidParams, MalformedMessage
from exec_server.protocol import decoding, files, process
from exec_server.protocol.decoding import Base64, Uuid
from exec_server.protocol.jsonrpc import head
from exec_server.protocol.paths import PathUri
from exec_server.protocol.process import ProcessId
from exec_server.protocol.session import Capabilities, EnvironmentInfo, Shell

_ID = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    "params",
    [
        process.WriteParams(ProcessId("p"), Base64(b"\x00\xff"), "1"),
        files.ReadFileParams(PathUri.from_wire("/a b/ü"), follow_symlinks=False),
        process.StartParams(
            process_id=ProcessId("p"),
            metadata=process.Metadata(Uuid.from_wire(_ID)),
            argv=["a"],
            cwd=PathUri.from_wire("/"),
            env={"A": "ü"},
            tty=True,
        ),
    ],
    ids=lambda params: type(params).__name__,
)
def test_params_are_what_a_server_reads(params: Any) -> None:
    message = json.loads(b'{"id":1,' + messages.request_body("a/b", params))
    assert message["method"] == "a/b"
    assert decoding.decode(type(params), message["params"]) == params


def test_a_value_without_a_form_on_the_wire_is_a_mistake() -> None:
    with pytest.raises(NotImplementedError, match="object has no form"):
        messages.encode({"a": object()})


def test_params_of_the_server_may_hold_paths() -> None:
    text = Raw(b'{"watchId":1,"missing":["file:///a"],"present":null}')
    expected = files.WatchMissingParams(1, [PathUri.from_wire("/a")])
    assert messages.decode_as(files.WatchMissingParams, text, "") == expected


def test_paths_are_native_for_servers_without_uris() -> None:
    params = files.ReadFileParams(PathUri.from_wire("/a b/ü"))
    body = messages.request_body("a/b", params, has_uri_paths=False)
    assert json.loads(b"{" + body)["params"]["path"] == "/a b/ü"
    write = process.WriteParams(ProcessId("p"), Base64(b"x"), "1")
    native = messages.request_body("a/b", write, has_uri_paths=False)
    assert native == messages.request_body("a/b", write)


def test_what_cannot_be_sent_is_a_mistake_of_the_caller() -> None:
    for params, text in (({"a": object()}, "object has no form"), ("\ud800", "not UTF-8")):
        with pytest.raises(InvalidParams, match=text):
            messages.request_body("a/b", params)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (process.StartResult, '{"processId":"p"}', {"sandbox_type": "none", "pid": None}),
        (
            process.ReadResult,
            '{"chunks":[],"nextSeq":3,"exited":true,"exitCode":0,"closed":true,"failure":null}',
            {"sandbox_denied": False, "next_seq": 3},
        ),
        (
            process.ExitedParams,
            '{"processId":"p","seq":1,"exitCode":3}',
            {"sandbox_denied": False, "exit_code": 3},
        ),
        (
            files.GetMetadataResult,
            '{"isDirectory":false,"isFile":true,"createdAtMs":0,"modifiedAtMs":5}',
            {"size": 0, "is_symlink": False, "modified_at_ms": 5},
        ),
    ],
)
def test_members_that_older_servers_do_not_send_have_defaults(
    kind: Any, text: str, expected: dict[str, Any]
) -> None:
    found = messages.decode_as(kind, Raw(text.encode()), "")
    assert isinstance(found, kind)
    assert {name: getattr(found, name) for name in expected} == expected
    with pytest.raises(MalformedMessage):
        messages.decode_as(kind, Raw(b"{}"), "")


def test_an_environment_may_say_little() -> None:
    text = Raw(b'{"shell":{"name":"sh","path":"/bin/sh"},"cwd":null,"platformOs":null,"new":1}')
    assert messages.decode_environment(text) == EnvironmentInfo(
        Shell("sh", "/bin/sh"), "", "", None, None, "", [], [], "/tmp", Capabilities()
    )


def test_what_an_environment_says_counts() -> None:
    said = {
        "shell": {"name": "sh", "path": "/bin/sh"},
        "executorVersion": "1",
        "providerId": "local",
        "cwd": "file:///w",
        "userHomeDir": "file:///h",
        "platformOs": "linux",
        "prependPathDirs": ["/x"],
        "temporaryDirectories": ["file:///t"],
        "tempDir": "/t",
        "capabilities": {"fsWatchMissing": True, "unheardOf": True},
    }
    assert messages.decode_environment(Raw(json.dumps(said).encode())) == EnvironmentInfo(
        Shell("sh", "/bin/sh"),
        "1",
        "local",
        "file:///w",
        "file:///h",
        "linux",
        ["/x"],
        ["file:///t"],
        "/t",
        Capabilities(fs_watch_missing=True),
    )


@pytest.mark.parametrize("text", [b"5", b"[]", b'{"shell":{}}', b'{"shell":null}', b"{"])
def test_an_environment_without_a_shell_is_none(text: bytes) -> None:
    with pytest.raises(MalformedMessage, match="environment: "):
        messages.decode_environment(Raw(text))


def test_nesting_without_end_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        messages.decode(b'{"method":"x","params":' + b"[" * 100_000)


def _notice(data: bytes, method: str = "process/output", **params: Any) -> bytes:
    params = {"processId": "p", "seq": 7, "stream": "stdout"} | params
    return head(json.dumps({"method": method, "params": params}).encode()) + data


@pytest.mark.parametrize(
    ("size", "last"), [(1, 7), (process.CHUNK_BYTES, 7), (process.CHUNK_BYTES + 1, 8)]
)
def test_output_comes_as_a_binary_message_too(size: int, last: int) -> None:
    envelope = messages.decode(_notice(bytes(size)))
    event = messages.decode_params(process.OUTPUT, envelope.params)
    assert (event.process_id, event.seq, event.stream) == ("p", 7, "stdout")
    assert (event.chunk, event.last_seq) == (bytes(size), last)


@pytest.mark.parametrize(
    "message",
    [
        b"\0",
        b"\0\0\0\x09{}",
        head(b"{") + b"x",
        head(b'{"id":1,"method":"process/output","params":{}}') + b"x",
        head(b'{"id":1,"error":{"code":1,"message":""}}') + b"x",
        head(b"{}") + b"x",
        head(head(b'{"method":"a"}') + b"x") + b"x",
        functools.reduce(lambda text, _: head(text), range(2000), b"{}"),
    ],
)
def test_other_binary_messages_are_malformed(message: bytes) -> None:
    with pytest.raises(MalformedMessage):
        messages.decode(message)


@pytest.mark.parametrize(
    "message",
    [
        _notice(b""),
        _notice(bytes(process.RUN_BYTES + 1)),
        _notice(b"x", seq="7"),
        _notice(b"x", stream="stdin"),
        _notice(b"x", processId=None),
        head(b'{"method":"process/output"}') + b"x",
        _notice(b"x", "process/closed"),
    ],
)
def test_data_of_a_notification_that_is_wrong(message: bytes) -> None:
    envelope = messages.decode(message)
    notice = messages.find_notice(str(envelope.method))
    assert notice is not None
    with pytest.raises(MalformedMessage):
        messages.decode_params(notice, envelope.params)


def test_without_binary_messages_their_capabilities_are_off() -> None:
    known = Capabilities(fs_binary=True, process_binary=True, fs_list=True)
    info = EnvironmentInfo(Shell("sh", "/"), "", "", None, None, "", [], [], "", known)
    assert messages.without_binary(info).capabilities == Capabilities(fs_list=True)
