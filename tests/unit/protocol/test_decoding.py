"""Typed decoding: what the two decoders accept, and the reference's text for what they refuse."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar, Literal, NewType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.errors import InvalidParams
from exec_server.protocol import decoding
from exec_server.protocol.decoding import (
    I64,
    U16,
    U32,
    U64,
    Base64,
    NonZeroU16,
    NonZeroUsize,
    Params,
    Result,
    Usize,
    Uuid,
    decode,
    decode_unit,
    decode_value,
)

Id = NewType("Id", str)
THREAD = "67e55044-10b1-426f-9247-bb680e5fe0c8"


class Metadata(Params, frozen=True):
    wire_name: ClassVar[str] = "ExecMetadata"
    omissible: ClassVar[tuple[str, ...]] = ("thread_id", "tool_call_id")
    thread_id: Uuid | None = None
    tool_call_id: str | None = None


class Managed(Params, rename=None, tag_field="type", tag="managed", frozen=True):
    wire_name: ClassVar[str] = "Profile::Managed"
    file_system: Restricted | Unrestricted
    network: Literal["restricted", "enabled"]


class Disabled(Params, tag_field="type", tag="disabled", frozen=True):
    wire_name: ClassVar[str] = "Profile::Disabled"


class External(Params, tag_field="type", tag="external", frozen=True):
    wire_name: ClassVar[str] = "Profile::External"
    tag_aliases: ClassVar[tuple[str, ...]] = ("alien",)
    network: Literal["restricted", "enabled"]


class Restricted(Params, rename=None, tag_field="type", tag="restricted", frozen=True):
    wire_name: ClassVar[str] = "FileSystem::Restricted"
    omissible: ClassVar[tuple[str, ...]] = ("max_depth",)
    entries: list[Entry]
    max_depth: NonZeroUsize | None = None


class Unrestricted(Params, tag_field="type", tag="unrestricted", frozen=True):
    wire_name: ClassVar[str] = "FileSystem::Unrestricted"


class Entry(Params, frozen=True):
    wire_name: ClassVar[str] = "Entry"
    path: str
    access: Literal["read", "write", "deny"]


class Sandbox(Params, frozen=True):
    wire_name: ClassVar[str] = "Sandbox"
    permissions: Managed | Disabled | External


class Start(Params, kw_only=True, frozen=True):
    wire_name: ClassVar[str] = "WireExecParams"
    omissible: ClassVar[tuple[str, ...]] = ("extra", "anything")
    process_id: Id
    metadata: Metadata | None = None
    argv: list[str]
    env: dict[str, str]
    tty: bool
    pipe_stdin: bool = False
    sandbox: Sandbox | None = None
    ports: list[U16] = msgspec.field(default_factory=list)
    extra: object = None
    anything: Any = None


class Read(Params, frozen=True):
    wire_name: ClassVar[str] = "ReadParams"
    process_id: Id
    after_seq: U64 | None = None
    max_bytes: Usize | None = None
    offset: I64 | None = None


class Write(Params, frozen=True):
    wire_name: ClassVar[str] = "WriteParams"
    chunk: Base64
    signal: Literal["interrupt"] = "interrupt"


class Sized(Params, frozen=True):
    wire_name: ClassVar[str] = "Sized"
    named_only: ClassVar[tuple[str, ...]] = ("rows",)
    process_id: Id
    after_seq: U64 = 0
    rows: NonZeroU16 | None = None


class Terminate(Params, frozen=True):
    wire_name: ClassVar[str] = "TerminateParams"
    process_id: Id


START = {"processId": "p", "argv": [], "env": {}, "tty": False}


def start(**members: object) -> dict[str, object]:
    return {**START, **members}


def permissions(value: object) -> dict[str, object]:
    return {"permissions": value}


def file_system(value: object) -> dict[str, object]:
    return permissions({"type": "managed", "file_system": value, "network": "enabled"})


ACCEPTED = [
    (Read, {"processId": "p"}, Read(Id("p"))),
    (Read, {"processId": "p", "afterSeq": None, "unknown": [1]}, Read(Id("p"))),
    (Read, {"processId": "p", "afterSeq": 2**64 - 1}, Read(Id("p"), 2**64 - 1)),
    (Read, {"processId": "p", "offset": -(2**63)}, Read(Id("p"), offset=-(2**63))),
    (Read, ["p", None, 5, None], Read(Id("p"), None, 5, None)),
    (Terminate, ["p"], Terminate(Id("p"))),
    (Sized, {"processId": "p", "rows": 65535}, Sized(Id("p"), rows=65535)),
    (Sized, ["p", 5], Sized(Id("p"), 5)),
    (Write, {"chunk": "YWJj"}, Write(Base64(b"abc"))),
    (Write, {"chunk": "", "signal": {"interrupt": None}}, Write(Base64(b""))),
    (Write, ["YWJj"], Write(Base64(b"abc"))),
    (
        Start,
        start(env={"A": "b"}, argv=["x", "y"], tty=True, ports=[0, 65535], extra={"a": [1]}),
        Start(
            process_id=Id("p"),
            argv=["x", "y"],
            env={"A": "b"},
            tty=True,
            ports=[0, 65535],
            extra={"a": [1]},
        ),
    ),
    (
        Start,
        ["p", [], [], {}, True, False, None],
        Start(process_id=Id("p"), metadata=Metadata(), argv=[], env={}, tty=True),
    ),
    (Metadata, {"threadId": "{" + THREAD.upper() + "}"}, Metadata(Uuid(THREAD))),
    (Metadata, [None], Metadata()),
    (Sandbox, permissions({"type": "disabled", "zz": 5}), Sandbox(Disabled())),
    (Sandbox, permissions(["disabled"]), Sandbox(Disabled())),
    (Sandbox, permissions(["external", "enabled"]), Sandbox(External("enabled"))),
    (Sandbox, permissions({"type": "alien", "network": "enabled"}), Sandbox(External("enabled"))),
    (
        Sandbox,
        permissions({"type": "external", "network": {"enabled": {}}}),
        Sandbox(External("enabled")),
    ),
    (Sandbox, file_system({"type": 1}), Sandbox(Managed(Unrestricted(), "enabled"))),
    (
        Sandbox,
        file_system(["restricted", [["/x", "read"]]]),
        Sandbox(Managed(Restricted([Entry("/x", "read")]), "enabled")),
    ),
    (
        Sandbox,
        file_system({"type": "restricted", "entries": [], "max_depth": 3}),
        Sandbox(Managed(Restricted([], 3), "enabled")),
    ),
]


@pytest.mark.parametrize(("kind", "value", "params"), ACCEPTED)
def test_params_are_decoded(kind: type[Params], value: object, params: Params) -> None:
    assert decode(kind, value) == params
    assert decode_value(kind, value) == params


# The texts are the reference's for structs of the same shape.
REFUSED: list[tuple[type[Params], Any, str]] = [
    (Read, None, "invalid type: null, expected struct ReadParams"),
    (Read, True, "invalid type: boolean `true`, expected struct ReadParams"),
    (Read, 5, "invalid type: number, expected struct ReadParams"),
    (Read, "x", 'invalid type: string "x", expected struct ReadParams'),
    (Read, {}, "missing field `processId`"),
    (Read, {"afterSeq": 1}, "missing field `processId`"),
    (Read, {"processId": None, "afterSeq": "x"}, "invalid type: null, expected a string"),
    (Read, {"afterSeq": "x", "processId": None}, 'invalid type: string "x", expected u64'),
    (Read, {"processId": "p", "afterSeq": True}, "invalid type: boolean `true`, expected u64"),
    (Read, {"processId": "p", "maxBytes": []}, "invalid type: sequence, expected usize"),
    (Read, {"processId": "p", "offset": {}}, "invalid type: map, expected i64"),
    (Read, {"processId": "p", "afterSeq": 2**64}, "invalid number"),
    (Sized, [], "invalid length 0, expected struct Sized with 2 elements"),
    (Sized, ["p", 5, 3], "invalid length 3, expected fewer elements in array"),
    (Sized, {"processId": "p", "rows": 65536}, "invalid number"),
    (Sized, {"processId": "p", "rows": 0}, "invalid value: integer `0`, expected a nonzero u16"),
    (Read, {"processId": "p", "afterSeq": -1}, "invalid number"),
    (Read, {"processId": "p", "afterSeq": 1.0}, "invalid number"),
    (Read, {"processId": "p", "afterSeq": float("inf")}, "invalid number"),
    (Read, {"processId": "p", "offset": 2**63}, "invalid number"),
    (Read, [], "invalid length 0, expected struct ReadParams with 4 elements"),
    (Read, ["p", None], "invalid length 2, expected struct ReadParams with 4 elements"),
    (Read, ["p", "x"], 'invalid type: string "x", expected u64'),
    (Read, ["p", None, None, None, 5], "invalid length 5, expected fewer elements in array"),
    (Read, ["p", 1, 2, "x", 5], 'invalid type: string "x", expected i64'),
    (Terminate, [], "invalid length 0, expected struct TerminateParams with 1 element"),
    (Write, {"chunk": 5}, "invalid type: number, expected a string"),
    (Write, {"chunk": "!aaa"}, "Invalid symbol 33, offset 0."),
    (Write, {"signal": "x", "chunk": "!"}, "unknown variant `x`, expected `interrupt`"),
    (Write, {"chunk": "!", "signal": "x"}, "Invalid symbol 33, offset 0."),
    (Write, {"signal": None}, "invalid type: null, expected string or map"),
    (Write, {"signal": 5}, "invalid type: number, expected string or map"),
    (Write, {"signal": {}}, "invalid value: map, expected map with a single key"),
    (
        Write,
        {"signal": {"interrupt": None, "x": 1}},
        "invalid value: map, expected map with a single key",
    ),
    (Write, {"signal": {"kill": None}}, "unknown variant `kill`, expected `interrupt`"),
    (Write, {"signal": {"interrupt": 1}}, "invalid type: number, expected unit"),
    (Write, {"signal": {"interrupt": {}}}, "invalid type: map, expected unit"),
    (Start, start(argv="x"), 'invalid type: string "x", expected a sequence'),
    (Start, start(argv=["a", 5]), "invalid type: number, expected a string"),
    (Start, start(env=[]), "invalid type: sequence, expected a map"),
    (Start, start(env={"a": None}), "invalid type: null, expected a string"),
    (Start, start(tty=0), "invalid type: number, expected a boolean"),
    (Start, start(pipeStdin=None), "invalid type: null, expected a boolean"),
    (Start, start(ports=[65536]), "invalid number"),
    (Start, start(ports=None), "invalid type: null, expected a sequence"),
    (Start, start(metadata=5), "invalid type: number, expected struct ExecMetadata"),
    (Start, start(metadata=[None, 3]), "invalid type: number, expected a string"),
    (
        Start,
        start(metadata={"threadId": ""}),
        "invalid length: expected length 32 for simple format, found 0",
    ),
    (
        Start,
        ["p", None, [], {}, False],
        "invalid length 6, expected struct WireExecParams with 10 elements",
    ),
    (Sandbox, permissions(None), "invalid type: null, expected internally tagged enum Profile"),
    (Sandbox, permissions(5), "invalid type: integer `5`, expected internally tagged enum Profile"),
    (Sandbox, permissions({}), "missing field `type`"),
    (Sandbox, permissions([]), "missing field `type`"),
    (Sandbox, permissions({"type": 5}), "invalid type: number, expected variant identifier"),
    (Sandbox, permissions([True]), "invalid type: boolean `true`, expected variant identifier"),
    (
        Sandbox,
        permissions({"type": "x"}),
        "unknown variant `x`, expected one of `managed`, `disabled`, `alien`, `external`",
    ),
    (Sandbox, permissions({"type": "external"}), "missing field `network`"),
    (
        Sandbox,
        permissions({"type": "external", "network": 5}),
        "invalid type: integer `5`, expected string or map",
    ),
    (
        Sandbox,
        permissions({"network": "x", "type": "external"}),
        "unknown variant `x`, expected `restricted` or `enabled`",
    ),
    (
        Sandbox,
        permissions({"type": "external", "network": {"enabled": 5}}),
        "invalid type: integer `5`, expected unit",
    ),
    (
        Sandbox,
        permissions(["external"]),
        "invalid length 0, expected struct variant Profile::External with 1 element",
    ),
    (
        Sandbox,
        permissions(["external", "enabled", 5]),
        "invalid length 2, expected 1 element in sequence",
    ),
    (Sandbox, permissions(["disabled", 5]), "invalid length 1, expected 0 elements in sequence"),
    (
        Sandbox,
        file_system({"type": 5}),
        "invalid value: integer `5`, expected variant index 0 <= i < 2",
    ),
    (Sandbox, file_system({"type": -1}), "invalid type: integer `-1`, expected variant identifier"),
    (
        Sandbox,
        file_system({"type": "restricted", "entries": [5]}),
        "invalid type: integer `5`, expected struct Entry",
    ),
    (
        Sandbox,
        file_system({"type": "restricted", "entries": [], "max_depth": 0}),
        "invalid value: integer `0`, expected a nonzero usize",
    ),
    (
        Sandbox,
        file_system({"type": "restricted", "entries": [], "max_depth": -1}),
        "invalid value: integer `-1`, expected a nonzero usize",
    ),
    (
        Sandbox,
        file_system({"type": "restricted", "entries": [], "max_depth": 1.5}),
        "invalid type: floating point `1.5`, expected a nonzero usize",
    ),
    (
        Sandbox,
        file_system({"type": "restricted", "entries": [{"path": 5}]}),
        "invalid type: integer `5`, expected a string",
    ),
]


@pytest.mark.parametrize(("kind", "value", "message"), REFUSED)
def test_mistake_is_worded_as_the_reference_does(
    kind: type[Params], value: object, message: str
) -> None:
    with pytest.raises(InvalidParams) as caught:
        decode(kind, value)
    assert caught.value.message == message


def test_custom_values_in_a_tagged_union_know_their_numbers() -> None:
    class Left(Params, tag_field="type", tag="left", frozen=True):
        wire_name: ClassVar[str] = "Side::Left"
        chunk: Base64

    class Right(Params, tag_field="type", tag="right", frozen=True):
        wire_name: ClassVar[str] = "Side::Right"

    with pytest.raises(InvalidParams, match=r"^invalid type: integer `5`, expected a string$"):
        decode_value(Left | Right, {"type": "left", "chunk": 5})


def test_zero_outside_a_union_is_no_nonzero_integer() -> None:
    with pytest.raises(InvalidParams, match=r"^invalid value: integer `0`, expected a nonzero"):
        decode_value(NonZeroUsize, 0)


def test_single_values_are_decoded() -> None:
    assert decode_value(U32, 2**32 - 1) == 2**32 - 1
    assert decode_value(str, "x") == "x"
    with pytest.raises(InvalidParams, match=r"^invalid number$"):
        decode_value(U32, 2**32)


@pytest.mark.parametrize("kind", [float, Disabled, Result, list[bytes]])
def test_other_annotations_are_not_decoded(kind: object) -> None:
    # A tagged struct outside a union is one of them: msgspec would not insist on its tag.
    with pytest.raises(TypeError, match="cannot be decoded"):
        decode_value(kind, {})


@pytest.mark.parametrize("value", [None, {}])
def test_methods_without_params_accept_nothing(value: object) -> None:
    decode_unit(value)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([], "sequence"),
        ({"a": 1}, "map"),
        ("x", 'string "x"'),
        (5, "number"),
        (0, "number"),
        (False, "boolean `false`"),
    ],
)
def test_methods_without_params_refuse_anything_else(value: object, got: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        decode_unit(value)
    assert caught.value.message == f"invalid type: {got}, expected unit"


def test_results_are_written_in_camel_case() -> None:
    class Exited(Result, frozen=True):
        exit_code: int

    assert msgspec.json.encode(Exited(3)) == b'{"exitCode":3}'


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([2**16, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1])
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "x", "YWJj", "YQ=", THREAD, "interrupt", "enabled", "read", "disabled"])
)
NAMES = st.sampled_from(
    [
        "processId",
        "afterSeq",
        "maxBytes",
        "offset",
        "chunk",
        "signal",
        "interrupt",
        "metadata",
        "threadId",
        "toolCallId",
        "argv",
        "env",
        "tty",
        "pipeStdin",
        "sandbox",
        "permissions",
        "type",
        "file_system",
        "network",
        "entries",
        "max_depth",
        "path",
        "access",
        "ports",
        "extra",
        "x",
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)


def value_for(kind: str) -> st.SearchStrategy[object]:
    """Values that are mostly of the shape of one member, so that decoding gets far."""
    return {
        "tty": st.booleans(),
        "argv": st.lists(st.just("x"), max_size=2),
        "env": st.dictionaries(st.just("x"), st.just("y")),
        "afterSeq": st.integers(-1, 2**65),
        "metadata": st.fixed_dictionaries({}, optional={"threadId": SCALARS, "x": SCALARS}),
        "sandbox": st.sampled_from([permissions({"type": "disabled"}), permissions(["external"])]),
    }.get(kind, SCALARS)


def objects_like(*names: str) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries(
        {}, optional={name: value_for(name) | VALUES for name in (*names, "x")}
    )


@given(
    st.sampled_from([Read, Write, Start, Metadata, Sandbox]),
    VALUES
    | objects_like("processId", "afterSeq", "maxBytes", "offset")
    | objects_like("processId", "metadata", "argv", "env", "tty", "pipeStdin", "sandbox", "ports")
    | objects_like("permissions", "threadId", "chunk", "signal"),
)
def test_msgspec_accepts_nothing_that_the_exact_decoder_refuses(
    kind: type[Params], value: object
) -> None:
    try:
        converted = msgspec.convert(value, kind, dec_hook=decoding._from_wire)
    except (msgspec.ValidationError, InvalidParams):
        return
    exact = decode_value(kind, value)
    assert exact == converted
    assert decode(kind, value) == converted


@given(VALUES)
def test_any_value_is_decoded_or_refused(value: object) -> None:
    for kind in (Read, Write, Start, Metadata, Sandbox):
        with contextlib.suppress(InvalidParams):
            assert type(decode(kind, value)) is kind
