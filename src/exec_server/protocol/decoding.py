"""Generic JSON values to typed params, with the reference's rules and error texts.

`decode` lets msgspec convert the value, which succeeds for the params of real clients. Values
that msgspec refuses are decoded again by plans built from the same annotations. Plans accept the
other forms that the reference accepts (positional params, enums as maps) and raise the first
error that the reference finds, with its text.

msgspec must never accept more than the plans. It would in two places: an integer without bounds
(so all integers here are `U64` and similar types), and a tagged struct outside of a union, whose
tag may be missing (so a plan refuses such an annotation).
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NewType,
    NoReturn,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
)
from uuid import UUID

import msgspec
import pybase64

from exec_server.errors import InvalidParams
from exec_server.protocol.json_text import describe

_ALPHABET = re.compile(rb"[A-Za-z0-9+/]*+")

# The last symbols whose unused bits are zero, by the padding after them.
_LAST_BEFORE_ONE = frozenset("AEIMQUYcgkosw048")
_LAST_BEFORE_TWO = frozenset("AQgw")


__all__ = [
    "I64",
    "U16",
    "U32",
    "U64",
    "Base64",
    "NonZeroU16",
    "NonZeroUsize",
    "Params",
    "Result",
    "Usize",
    "Uuid",
    "decode",
    "decode_unit",
    "decode_value",
]

ParamsType = TypeVar("ParamsType")
ResultType = TypeVar("ResultType")
N_co = TypeVar("N_co", covariant=True)


# UUID members, in the forms that the reference accepts.
class Uuid(str):
    """A UUID in its canonical form: lower case, with hyphens."""

    __slots__ = ()

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Accept a JSON string in any form the reference accepts; raises InvalidParams."""
        if not isinstance(value, str):
            raise InvalidParams(f"invalid type: {describe(value)}, expected a string")
        digits = value.removeprefix("urn:uuid:")
        try:
            uuid = UUID(digits)
        except ValueError:
            raise InvalidParams(_error_text(value, digits)) from None
        # UUID() also accepts hyphens anywhere, and any form after the prefix.
        forms = {str(uuid)} if digits != value else {str(uuid), uuid.hex, f"{{{uuid}}}"}
        if digits.lower() not in forms:
            raise InvalidParams(_error_text(value, digits))
        return cls(uuid)


def _error_text(value: str, digits: str) -> str:
    if bad := re.search("[^0-9a-fA-F-]", digits):
        at = len(value) - len(digits) + bad.start() + 1
        return (
            "invalid character: expected an optional prefix of `urn:uuid:` followed by "
            f"[0-9a-fA-F-], found `{bad[0]}` at {at}"
        )
    if "-" in digits:
        return "invalid group length: expected groups of 8, 4, 4, 4 and 12 digits"
    return f"invalid length: expected length 32 for simple format, found {len(value)}"


# Base64 members: strict decoding with the error texts of the reference.
class Base64(bytes):
    """Bytes that are base64 on the wire: padded, without white space, unused bits zero."""

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Decode a JSON string; raises InvalidParams."""
        if not isinstance(value, str):
            raise InvalidParams(f"invalid type: {describe(value)}, expected a string")
        return cls(decode_base64(value))


def decode_base64(text: str) -> bytes:
    """The bytes of a text; raises InvalidParams."""
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is one; characters beyond U+00FF raise another
        _fail_base64(text.encode())
    # The C decoder ignores the unused bits of the last symbol, one of the last four.
    if text.endswith("=") and text[-4:].rstrip("=")[-1] not in (
        _LAST_BEFORE_TWO if text.endswith("==") else _LAST_BEFORE_ONE
    ):
        _fail_base64(text.encode())
    return data


def _fail_base64(data: bytes) -> NoReturn:
    """Raise the error of invalid base64, checked in the order of the reference's decoder."""
    rest = len(data) % 4
    if rest == 1 and data[-1] != 0x3D and not _symbols(data[-1:]):
        _fail_symbol(data, len(data) - 1)
    tail = max(len(data) - (rest or 4), 0)
    if (bad := _symbols(data[:tail])) < tail:
        _fail_symbol(data, bad)
    symbols = _symbols(data[tail:])
    end = tail + symbols
    if data[end:].strip(b"=") or (symbols < 2 and end < len(data)):
        _fail_symbol(data, end)
    if symbols < 2:
        raise InvalidParams(f"Invalid input length: {end}")
    if rest:
        raise InvalidParams("Invalid padding")
    raise InvalidParams(f"Invalid last symbol {data[end - 1]}, offset {end - 1}.")


def _symbols(data: bytes) -> int:
    """The number of bytes at the start of `data` that are in the alphabet."""
    match = _ALPHABET.match(data)
    assert match is not None
    return match.end()


def _fail_symbol(data: bytes, offset: int) -> NoReturn:
    raise InvalidParams(f"Invalid symbol {data[offset]}, offset {offset}.")


class Params(msgspec.Struct, frozen=True, rename="camel"):
    """Params from a client; the order of the members is that of positional params."""

    # The name in error texts; a variant of a tagged union is "Union::Variant".
    wire_name: ClassVar[str] = ""
    # Members with the default None that may be missing at the end of an array. Members with
    # other defaults always may.
    omissible: ClassVar[tuple[str, ...]] = ()
    # Members that arrays do not have, because the reference does not have them.
    named_only: ClassVar[tuple[str, ...]] = ()
    # Other values of the tag for this variant.
    tag_aliases: ClassVar[tuple[str, ...]] = ()
    # Called with the object before it is decoded, and with the flag of `decode`; returns the
    # object to decode or raises InvalidParams.
    prepare: ClassVar[Callable[[dict[str, Any], str | None], dict[str, Any]] | None] = None


class Result(msgspec.Struct, frozen=True, rename="camel"):
    """A result for a client; the members are encoded in this order."""


def _integer(word: str, low: int, high: int) -> msgspec.Meta:
    # Bounds of msgspec are signed 64-bit numbers; the plan decodes larger ones.
    return msgspec.Meta(
        ge=low, le=min(high, 2**63 - 1), extra={"word": word, "low": low, "high": high}
    )


U16 = Annotated[int, _integer("u16", 0, 2**16 - 1)]
U32 = Annotated[int, _integer("u32", 0, 2**32 - 1)]
U64 = Annotated[int, _integer("u64", 0, 2**64 - 1)]
Usize = Annotated[int, _integer("usize", 0, 2**64 - 1)]
NonZeroU16 = Annotated[int, _integer("a nonzero u16", 1, 2**16 - 1)]
NonZeroUsize = Annotated[int, _integer("a nonzero usize", 1, 2**64 - 1)]
I64 = Annotated[int, _integer("i64", -(2**63), 2**63 - 1)]

P = TypeVar("P", bound=Params)


def decode(kind: type[P], value: object, server_cwd: str | None = None) -> P:
    """The params in `value`; raises InvalidParams with the reference's text.

    `server_cwd`, a URI, is what the oldest form of a `sandbox` is relative to.
    """
    if kind.prepare is not None and isinstance(value, dict):
        value = kind.prepare(value, server_cwd)
    try:
        return msgspec.convert(value, kind, dec_hook=_from_wire)
    except (msgspec.ValidationError, InvalidParams):
        params: P = decode_value(kind, value)
        return params


def decode_value(kind: Any, value: object) -> Any:
    """The value of any annotation, without trying msgspec first; raises InvalidParams."""
    return _plan(kind)(value, False)


def decode_unit(value: object) -> None:
    """Accept the params of a method that takes none; raises InvalidParams."""
    if value is not None and value != {}:
        raise _invalid_type(value, "unit", buffered=False)


def _from_wire(kind: type[Any], value: object) -> object:
    """The hook of msgspec for annotations of other types."""
    return value if kind is object else kind.from_wire(value)


# A plan decodes one annotation. Its second argument is whether the value is inside a tagged
# union: the reference buffers such values, and its error texts then show numbers.
_Plan = Callable[[Any, bool], Any]


@cache
def _plan(kind: Any) -> _Plan:
    """The plan for an annotation."""
    if isinstance(kind, NewType):
        return _plan(kind.__supertype__)
    origin = get_origin(kind)
    if origin is Annotated:
        return _integer_plan(**get_args(kind)[1].extra)
    if origin is Literal:
        return _enum_plan(get_args(kind))
    if origin is list:
        return _list_plan(*get_args(kind))
    if origin is dict:
        return _dict_plan(get_args(kind)[1])
    if origin is Union or origin is types.UnionType:
        return _union_plan(get_args(kind))
    if kind is str:
        return _exact_type_plan(str, "a string")
    if kind is bool:
        return _exact_type_plan(bool, "a boolean")
    if kind is object or kind is Any:
        return lambda value, buffered: value
    if hasattr(kind, "from_wire"):
        return _custom_plan(kind)
    if issubclass(kind, Params) and kind.__struct_config__.tag is None:
        return _struct_plan(kind)
    raise TypeError(f"{kind!r} cannot be decoded")


def _exact_type_plan(kind: type, word: str) -> _Plan:
    def plan(value: object, buffered: bool) -> object:
        if type(value) is not kind:
            raise _invalid_type(value, word, buffered)
        return value

    return plan


def _custom_plan(kind: Any) -> _Plan:
    def plan(value: object, buffered: bool) -> object:
        if not isinstance(value, str):
            raise _invalid_type(value, "a string", buffered)
        return kind.from_wire(value)

    return plan


def _integer_plan(word: str, low: int, high: int) -> _Plan:
    def plan(value: object, buffered: bool) -> object:
        if type(value) is int and low <= value <= high:
            return value
        if type(value) is int and (buffered or (low == 1 and value == 0)):
            raise InvalidParams(f"invalid value: integer `{value}`, expected {word}")
        if not buffered and type(value) in (int, float):
            raise InvalidParams("invalid number")
        raise _invalid_type(value, word, buffered)

    return plan


def _list_plan(item: Any) -> _Plan:
    item_plan = _plan(item)

    def plan(value: object, buffered: bool) -> object:
        if not isinstance(value, list):
            raise _invalid_type(value, "a sequence", buffered)
        return [item_plan(item, buffered) for item in value]

    return plan


def _dict_plan(item: Any) -> _Plan:
    item_plan = _plan(item)

    def plan(value: object, buffered: bool) -> object:
        if not isinstance(value, dict):
            raise _invalid_type(value, "a map", buffered)
        return {name: item_plan(item, buffered) for name, item in value.items()}

    return plan


def _enum_plan(names: tuple[str, ...]) -> _Plan:
    def plan(value: object, buffered: bool) -> object:
        name = value
        if isinstance(value, dict):
            # Enums of the reference can carry data, so `{"name":null}` is also accepted.
            if len(value) != 1:
                raise InvalidParams("invalid value: map, expected map with a single key")
            [(name, content)] = value.items()
        elif not isinstance(value, str):
            raise _invalid_type(value, "string or map", buffered)
        if name not in names:
            raise _unknown_variant(name, names)
        if isinstance(value, dict) and content is not None and not (buffered and content == {}):
            raise _invalid_type(content, "unit", buffered)
        return name

    return plan


def _union_plan(kinds: tuple[Any, ...]) -> _Plan:
    variants = [kind for kind in kinds if kind is not types.NoneType]
    tagged = len(variants) > 1
    inner_plan = _tagged_plan(variants) if tagged else _plan(variants[0])
    if len(variants) == len(kinds):
        return inner_plan
    return lambda value, buffered: None if value is None else inner_plan(value, buffered)


def _tagged_plan(kinds: list[type[Params]]) -> _Plan:
    """One of several structs, distinguished by a tag."""
    union_name = kinds[0].wire_name.partition("::")[0]
    tag_field = kinds[0].__struct_config__.tag_field
    by_tag: dict[str, _Plan] = {}
    plans = [_struct_plan(kind) for kind in kinds]
    for kind, plan in zip(kinds, plans, strict=True):
        # Aliases are listed in this order in the text for an unknown variant.
        for tag in sorted({str(kind.__struct_config__.tag), *kind.tag_aliases}):
            by_tag[tag] = plan

    def variant(tag: object, buffered: bool) -> _Plan:
        if isinstance(tag, str):
            if tag not in by_tag:
                raise _unknown_variant(tag, tuple(by_tag))
            return by_tag[tag]
        if buffered and type(tag) is int and tag >= 0:
            # A buffered tag may also be the number of the variant.
            if tag >= len(plans):
                text = f"expected variant index 0 <= i < {len(plans)}"
                raise InvalidParams(f"invalid value: integer `{tag}`, {text}")
            return plans[tag]
        raise _invalid_type(tag, "variant identifier", buffered)

    def decode_tagged(value: object, buffered: bool) -> object:
        if isinstance(value, dict) and tag_field in value:
            return variant(value[tag_field], buffered)(value, True)
        if isinstance(value, list) and value:
            return variant(value[0], buffered)(value[1:], True)
        if isinstance(value, dict | list):
            raise InvalidParams(f"missing field `{tag_field}`")
        raise _invalid_type(value, f"internally tagged enum {union_name}", buffered=True)

    return decode_tagged


def _struct_plan(kind: type[Params]) -> _Plan:
    """A struct, from an object or from an array of its members in order."""
    fields = msgspec.structs.fields(kind)
    plans = {field.encode_name: (field.name, _plan(field.type)) for field in fields}
    required = [field for field in fields if field.required]
    positional = [field for field in fields if field.name not in kind.named_only]
    struct_kind = "struct variant" if "::" in kind.wire_name else "struct"

    def from_object(value: dict[str, object], buffered: bool) -> Params:
        members: dict[str, object] = {}
        for wire_name, item in value.items():
            if wire_name in plans:
                name, plan = plans[wire_name]
                members[name] = plan(item, buffered)
            elif kind.__struct_config__.forbid_unknown_fields:
                raise InvalidParams(f"unknown field `{wire_name}`, expected {_one_of(plans)}")
        for field in required:
            if field.name not in members:
                raise InvalidParams(f"missing field `{field.encode_name}`")
        return kind(**members)

    def from_array(value: list[object], buffered: bool) -> Params:
        members: dict[str, object] = {}
        for field, item in zip(positional, value, strict=False):
            name, plan = plans[field.encode_name]
            members[name] = plan(item, buffered)
        for index, field in enumerate(positional[len(value) :], len(value)):
            if field.required or (field.default is None and field.name not in kind.omissible):
                expected = f"{struct_kind} {kind.wire_name} with {_elements(len(positional))}"
                raise InvalidParams(f"invalid length {index}, expected {expected}")
        if len(value) > len(positional):
            # The two decoders of the reference have different texts for this.
            counted = f"{_elements(len(positional))} in sequence"
            fewer = counted if buffered else "fewer elements in array"
            raise InvalidParams(f"invalid length {len(value)}, expected {fewer}")
        return kind(**members)

    def plan(value: object, buffered: bool) -> object:
        if isinstance(value, dict):
            return from_object(value, buffered)
        if isinstance(value, list):
            return from_array(value, buffered)
        raise _invalid_type(value, f"{struct_kind} {kind.wire_name}", buffered)

    return plan


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


def _invalid_type(value: object, expected: str, buffered: bool) -> InvalidParams:
    got = describe(value, buffered=buffered)
    return InvalidParams(f"invalid type: {got}, expected {expected}")


def _unknown_variant(name: object, names: tuple[str, ...]) -> InvalidParams:
    return InvalidParams(f"unknown variant `{name}`, expected {_one_of(names)}")


def _one_of(names: Iterable[str]) -> str:
    quoted = [f"`{known}`" for known in names]
    return f"one of {', '.join(quoted)}" if len(quoted) > 2 else " or ".join(quoted)


# Descriptions of methods: the name, and the structs of both directions.
class Call(msgspec.Struct, Generic[ParamsType, ResultType], frozen=True):
    """A request with a response; `params` is None for methods without params."""

    name: str
    params: type[ParamsType] | None
    result: type[ResultType]


class Notice(msgspec.Struct, Generic[N_co], frozen=True):
    """A notification, without a response; `encode` makes the JSON text of its params."""

    name: str
    params: type[N_co]
    encode: Callable[[Any], bytes] = msgspec.json.encode
