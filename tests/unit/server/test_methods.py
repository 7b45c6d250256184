"""Method.invoke: decodes the params, calls the handler, returns its outcome as it is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol import files, process
from exec_server.protocol.decoding import U32, Call, Params, Result
from exec_server.protocol.jsonrpc import Attached
from exec_server.server.context import ConnectionContext, Encoded
from exec_server.server.methods import DecodedParams, Method, load_all

CONTEXT = cast(
    ConnectionContext,
    SimpleNamespace(server=SimpleNamespace(environment=SimpleNamespace(cwd=None))),
)


class _Number(Params, frozen=True):
    wire_name = "Number"
    number: U32


class _Doubled(Result, frozen=True):
    number: int


def _double(context: ConnectionContext, params: _Number) -> _Doubled:
    assert context is CONTEXT
    return _Doubled(2 * params.number)


def test_the_handler_gets_decoded_params() -> None:
    method = Method(Call("double", _Number, _Doubled), _double, "test")
    assert method.invoke(CONTEXT, {"number": 4}) == _Doubled(8)
    assert method.decode_params({"number": 4}, None) == _Number(4)


@pytest.mark.parametrize("raw_params", [None, {}, {"number": "4"}, 4])
def test_the_handler_does_not_run_with_invalid_params(raw_params: object) -> None:
    def handler(context: ConnectionContext, params: _Number) -> _Doubled:
        raise AssertionError

    method = Method(Call("double", _Number, _Doubled), handler, "test")
    with pytest.raises(InvalidParams):
        method.invoke(CONTEXT, raw_params)
    with pytest.raises(InvalidParams):
        method.decode_params(raw_params, None)


@pytest.mark.parametrize("raw_params", [None, {}])
def test_a_method_without_params_accepts_none(raw_params: object) -> None:
    given: list[object] = []

    def handler(context: ConnectionContext, params: None) -> _Doubled:
        given.append(params)
        return _Doubled(0)

    call: Call[None, _Doubled] = Call("nothing", None, _Doubled)
    assert Method(call, handler, "test").invoke(CONTEXT, raw_params) == _Doubled(0)
    assert given == [None]


@pytest.mark.parametrize("raw_params", [[], {"x": 1}, 0, ""])
def test_a_method_without_params_refuses_others(raw_params: object) -> None:
    call: Call[None, _Doubled] = Call("nothing", None, _Doubled)
    method = Method(call, lambda context, params: _Doubled(0), "test")
    with pytest.raises(InvalidParams, match="expected unit"):
        method.invoke(CONTEXT, raw_params)


def test_outcomes_are_passed_on() -> None:
    encoded = Encoded(b"{}")

    async def waiting(context: ConnectionContext, params: _Number) -> _Doubled:
        return _double(context, params)

    call = Call("double", _Number, _Doubled)
    method = Method(call, lambda context, params: encoded, "test")
    assert method.invoke(CONTEXT, {"number": 1}) is encoded
    outcome = Method(call, waiting, "test").invoke(CONTEXT, {"number": 1})
    assert asyncio.run(cast(Any, outcome)) == _Doubled(2)


def test_errors_of_the_handler_are_passed_on() -> None:
    def handler(context: ConnectionContext, params: _Number) -> _Doubled:
        raise FileNotFoundError(2, "text")

    with pytest.raises(FileNotFoundError):
        Method(Call("double", _Number, _Doubled), handler, "test").invoke(CONTEXT, {"number": 1})


def test_params_that_were_decoded_earlier() -> None:
    method = Method(Call("double", _Number, _Doubled), _double, "test")
    assert DecodedParams(method, {"number": 4}, None).get() == _Number(4)
    with_data = DecodedParams(method, {"number": 4}, None)
    with_data.attach(memoryview(b"data"))
    assert with_data.get() == Attached(_Number(4), memoryview(b"data"))
    invalid = DecodedParams(method, {"number": "4"}, None)
    invalid.attach(memoryview(b"data"))
    with pytest.raises(InvalidParams):
        invalid.get()


# ---- the table ------------------------------------------------------------------------


def test_every_method_is_found_by_its_name() -> None:
    assert all(name == method.name for name, method in load_all().items())
    assert {process.START.name, files.COPY.name, "http/request"} <= set(load_all())


def test_control_requests_wait_for_the_methods_that_name_a_new_process() -> None:
    starting = [method.name for method in load_all().values() if method.starts_process]
    assert starting == [process.START.name, process.ATTACH.name]


def test_methods_that_take_data() -> None:
    taking = [method.name for method in load_all().values() if method.takes_data]
    assert taking == ["process/writeBinary", "fs/writeBinary", "fs/writeFiles"]


def test_how_methods_are_scheduled() -> None:
    control = {method.name for method in load_all().values() if method.control}
    parked = {method.name for method in load_all().values() if method.yields_slot}
    assert control == {
        "environment/info",
        "environment/status",
        "session/close",
        "process/resize",
        "process/setFlow",
        "process/signal",
        "process/terminate",
        "fs/close",
        "fs/unwatch",
        "port/probe",
        "port/open",
        "port/listen",
        "port/closeListener",
        "port/data",
        "port/credit",
        "port/end",
        "port/reset",
    }
    assert parked == {
        "process/read",
        "process/write",
        "process/writeBinary",
        "process/closeStdin",
        "capabilities/discoverV2",
        "capabilityRoots/discoverV1",
        "fs/grep",
        "http/request",
        "port/probe",
        "port/open",
        "port/listen",
    }
