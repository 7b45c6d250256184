"""initialize, and the environment on the wire."""

from __future__ import annotations

import msgspec
import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import decode, decode_unit
from exec_server.protocol.session import (
    CLOSE,
    INFO,
    INITIALIZE,
    STATUS,
    Capabilities,
    EnvironmentInfo,
    EnvironmentStatus,
    InitializeParams,
    InitializeResult,
    SessionId,
    Shell,
)


@pytest.mark.parametrize(
    ("value", "params"),
    [
        ({"clientName": "c"}, InitializeParams("c")),
        ({"clientName": "", "resumeSessionId": None, "more": 1}, InitializeParams("")),
        ({"clientName": "c", "resumeSessionId": "s"}, InitializeParams("c", "s")),
        ({"clientName": "c", "sessionRetentionSeconds": 60}, InitializeParams("c", None, 60)),
        (["c"], InitializeParams("c")),
        (["c", "s"], InitializeParams("c", "s")),
    ],
)
def test_initialize_params(value: object, params: InitializeParams) -> None:
    assert decode(InitializeParams, value) == params


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "invalid type: null, expected struct InitializeParams"),
        ({}, "missing field `clientName`"),
        ([], "invalid length 0, expected struct InitializeParams with 2 elements"),
        ({"clientName": 5}, "invalid type: number, expected a string"),
        ({"clientName": "c", "resumeSessionId": 5}, "invalid type: number, expected a string"),
    ],
)
def test_initialize_params_of_the_wrong_shape(value: object, text: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        decode(InitializeParams, value)
    assert caught.value.message == text


def test_initialize_result_on_the_wire() -> None:
    info = EnvironmentInfo(
        shell=Shell("bash", "/bin/bash"),
        executor_version="1",
        provider_id="local",
        cwd=None,
        user_home_dir="file:///root",
        platform_os="linux",
        prepend_path_dirs=[],
        temporary_directories=["file:///tmp"],
        temp_dir="file:///tmp",
        capabilities=Capabilities(file_write_streaming=True),
    )
    written = msgspec.json.decode(msgspec.json.encode(InitializeResult(SessionId("s"), info)))
    environment = written["environmentInfo"]
    assert written["sessionId"] == "s"
    assert (environment["shell"], environment["cwd"]) == (
        {"name": "bash", "path": "/bin/bash"},
        None,
    )
    flags = environment["capabilities"]
    assert [name for name, value in flags.items() if value] == ["fileWriteStreaming"]
    assert len(flags) == len(Capabilities.__struct_fields__)


def test_methods_without_params() -> None:
    assert (INITIALIZE.name, CLOSE.name, INFO.name, STATUS.name) == (
        "initialize",
        "session/close",
        "environment/info",
        "environment/status",
    )
    assert CLOSE.params is INFO.params is STATUS.params is None
    decode_unit(None)
    decode_unit({})
    with pytest.raises(InvalidParams, match="invalid type: sequence, expected unit"):
        decode_unit([])
    assert msgspec.json.encode(EnvironmentStatus("ready")) == b'{"status":"ready"}'
