"""Descriptions of methods and notifications."""

from __future__ import annotations

import pytest

from exec_server.protocol import files, http, process, session
from exec_server.protocol.decoding import Call, Notice, Params, Result

CALLS = [
    value
    for module in (session, process, files, http)
    for value in vars(module).values()
    if isinstance(value, Call)
]
NOTICES = [
    value
    for module in (process, files, http)
    for value in vars(module).values()
    if isinstance(value, Notice)
]


def test_names_are_unique() -> None:
    names = [call.name for call in CALLS] + [notice.name for notice in NOTICES]
    assert len(names) >= 32
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_params_and_result_of_a_call(call: Call[object, object]) -> None:
    assert call.params is None or issubclass(call.params, Params)
    assert issubclass(call.result, Result)


def test_default_encoding_of_a_notification() -> None:
    assert files.MISSING_CHANGED.encode(files.MissingChangedParams(4)) == b'{"watchId":4}'
