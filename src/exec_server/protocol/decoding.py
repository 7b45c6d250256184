"""JSON texts to values, and values to typed params, with the reference's rules and error texts.

In `parse` msgspec decodes a text, and counting characters outside strings proves the rules that
msgspec does not check; both take a third of the standard library's time (`python -m
bench.alternatives`). Params that msgspec refuses are decoded by plans from the same annotations,
which know the reference's other forms and error texts. msgspec must never accept more than the
plans: so all integers are bounded (`U64` and similar), and a plan refuses a tagged struct outside a
union.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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

from exec_server.errors import InvalidParams, MalformedMessage

# The limits of the reference for one message; both are on the wire as error texts, and they
# keep a message of 64 MiB from becoming gigabytes of Python objects.
MAX_VALUES = 262_144
MAX_DEPTH = 127

# Up to this size, encoding the value again is the cheapest proof. A value takes at least one
# byte, so short texts never have too many of them.
_SHORT = 65_536

# Up to this number of quotes, finding each one is faster than splitting a large text.
_FEW_QUOTES = 1_000
# Bytes that are split at a time: other threads wait for the interpreter's lock meanwhile.
_STEP = 65_536

_decode_text = msgspec.json.Decoder().decode
# `1e999` is infinity here and an error there. Calling `float` for each number takes 2.8x the time.
_decode_any_float = msgspec.json.Decoder(float_hook=float).decode
_encode_text = msgspec.json.Encoder().encode
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_TOO_DEEP = "recursion limit exceeded"
_SHORT_ESCAPES = {"\0": "\\0", "\t": "\\t", "\n": "\\n", "\r": "\\r", '"': '\\"', "\\": "\\\\"}

# The last symbols whose unused bits are zero, by the padding after them.
_LAST_BEFORE_ONE = frozenset("AEIMQUYcgkosw048")
_LAST_BEFORE_TWO = frozenset("AQgw")

ParamsType = TypeVar("ParamsType")
ResultType = TypeVar("ResultType")
N_co = TypeVar("N_co", covariant=True)


def parse(data: bytes) -> object:
    """Decode one JSON text, integers exactly (at most 4,300 digits); raises MalformedMessage."""
    if len(data) <= _SHORT:
        try:
            value = _decode_text(data)
            again = _encode_text(value)
            # Most clients write without spaces, as the encoder does: then nothing was lost.
            if again == data and (len(data) <= MAX_DEPTH or has_few_containers(data)):
                return value
            # Without \u escapes decoding a string neither adds nor removes colons, so a member
            # that its duplicate has overwritten is a colon missing from the encoded value.
            if (
                b"\\u" not in data
                and again.count(b":") == data.count(b":")
                and has_few_containers(data)
            ):
                return value
        except _UNDECODABLE:
            pass  # the error is raised below
    return _decode_long(data)


def has_few_containers(data: bytes) -> bool:
    """Whether there are too few containers for nesting above the limit."""
    return data.count(b"[") + data.count(b"{") <= MAX_DEPTH


def _decode_long(data: bytes) -> object:
    """Decode after checking the number of values, before any is built."""
    outside = _outside_strings(data)
    if _has_too_many_values(outside):
        raise _too_many_values()
    try:
        value = _decode_numbers(data)
    except RecursionError:
        raise MalformedMessage(_TOO_DEEP) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage(str(error)) from None
    members = _members_within_depth(value)
    if members < 0:
        raise MalformedMessage(_TOO_DEEP)
    if members != outside.count(b":"):
        raise MalformedMessage(f"duplicate JSON object key `{_first_duplicate(data)}`")
    return value


def _decode_numbers(data: bytes) -> object:
    try:
        return _decode_text(data)
    except msgspec.ValidationError:  # a number that is out of range: nothing else has a type
        return _decode_any_float(data)


def _without_escapes(data: bytes) -> bytes:
    # Backslashes pair up from the left of a run, so after removing the pairs a backslash before a
    # quote is the escape of that quote.
    return data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data


def _outside_strings(data: bytes) -> bytes:
    """The text with `"` in the place of each string, up to the first one that does not end."""
    data = _without_escapes(data)
    quotes = data.count(b'"')
    if quotes > 4 * MAX_VALUES:
        raise _too_many_values()  # each string is a value or the name of one
    if quotes > _FEW_QUOTES:
        return b"".join(_outside_steps(data))
    # Few strings are skipped, not copied: one may hold megabytes of base64.
    pieces = []
    start = 0
    while (end := data.find(b'"', start)) >= 0:
        pieces.append(data[start:end])
        start = data.find(b'"', end + 1) + 1
        if start == 0:
            return b'"'.join([*pieces, b""])
    pieces.append(data[start:])
    return b'"'.join(pieces)


def _outside_steps(data: bytes) -> Iterator[bytes]:
    """The result of `_outside_strings` in steps, none of which takes long."""
    is_inside = False
    for start in range(0, len(data), _STEP):
        parts = data[start : start + _STEP].split(b'"')
        if is_inside:
            parts[0] = b""
            yield b'"'.join(parts[:1] + parts[1::2])
        else:
            yield b'"'.join(parts[::2])
        is_inside ^= len(parts) % 2 == 0


def _has_too_many_values(outside: bytes) -> bool:
    # A value is the outermost one, the first of its container, or follows a comma.
    count = 1 + outside.count(b",") + outside.count(b"[") + outside.count(b"{")
    if count > MAX_VALUES:
        outside = outside.translate(None, b" \t\n\r")
        count -= outside.count(b"[]") + outside.count(b"{}")
    return count > MAX_VALUES


def _too_many_values() -> MalformedMessage:
    return MalformedMessage(f"JSON-RPC message exceeds the limit of {MAX_VALUES} JSON values")


def _members_within_depth(value: object) -> int:
    """The number of members of all objects in `value`, or -1 if it is nested too deep."""
    members = 0
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for container in level:
            if type(container) is dict:
                members += len(container)
                inner += [v for v in container.values() if type(v) is dict or type(v) is list]
            elif type(container) is list:
                inner += [v for v in container if type(v) is dict or type(v) is list]
        if not inner:
            return members
        level = inner
    return -1


class _DuplicateError(Exception):
    """The first object with two members of the same name; its argument is the name."""


def _refuse_duplicate(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise _DuplicateError(Counter(name for name, _ in pairs).most_common(1)[0][0])


def _first_duplicate(data: bytes) -> str:
    import json

    try:
        json.loads(data.decode(), parse_int=str, object_pairs_hook=_refuse_duplicate)
    except _DuplicateError as duplicate:
        return str(duplicate)
    raise AssertionError("no member occurs twice")


def describe(value: object, buffered: bool = False) -> str:
    """The description of a value of the wrong type in an error text.

    Inside internally tagged objects (`buffered`) the reference shows numbers.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f"string {quote(value)}"
    if isinstance(value, list):
        return "sequence"
    if isinstance(value, dict):
        return "map"
    if not buffered:
        return "number"
    if isinstance(value, int):
        return f"integer `{value}`"
    return f"floating point `{value!r}`"


def quote(text: str) -> str:
    """A string as Rust's Debug prints it, which is how error texts show strings."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    import unicodedata

    # Combining marks are escaped although printable, so that they cannot join the quote.
    characters = (
        _SHORT_ESCAPES.get(each)
        or (each if each.isprintable() and unicodedata.category(each) not in ("Mn", "Me") else "")
        or f"\\u{{{ord(each):x}}}"
        for each in text
    )
    return f'"{"".join(characters)}"'


class Uuid(str):
    """A UUID in its canonical form: lower case, with hyphens."""

    __slots__ = ()

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Accept a JSON string in any form the reference accepts; raises InvalidParams."""
        if not isinstance(value, str):
            raise invalid_type(value, "a string")
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


class Base64(bytes):
    """Bytes that are base64 on the wire: padded, without white space, unused bits zero."""

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Decode a JSON string; raises InvalidParams."""
        if not isinstance(value, str):
            raise invalid_type(value, "a string")
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
    remainder = len(data) % 4
    if remainder == 1 and data[-1] != 0x3D and not _symbols(data[-1:]):
        _fail_symbol(data, len(data) - 1)
    tail = max(len(data) - (remainder or 4), 0)
    if (bad := _symbols(data[:tail])) < tail:
        _fail_symbol(data, bad)
    symbols = _symbols(data[tail:])
    end = tail + symbols
    if data[end:].strip(b"=") or (symbols < 2 and end < len(data)):
        _fail_symbol(data, end)
    if symbols < 2:
        raise InvalidParams(f"Invalid input length: {end}")
    if remainder:
        raise InvalidParams("Invalid padding")
    raise InvalidParams(f"Invalid last symbol {data[end - 1]}, offset {end - 1}.")


def _symbols(data: bytes) -> int:
    match = re.match(rb"[A-Za-z0-9+/]*+", data)
    assert match is not None
    return match.end()


def _fail_symbol(data: bytes, offset: int) -> NoReturn:
    raise InvalidParams(f"Invalid symbol {data[offset]}, offset {offset}.")


# Called with the object before it is decoded, and with the `server_cwd` of `decode`; returns the
# object to decode or raises InvalidParams.
Prepare = Callable[[dict[str, Any], str | None], dict[str, Any]]


class Params(msgspec.Struct, frozen=True, rename="camel"):
    """Params from a client; the order of the members is that of positional params."""

    # The name in error texts, if it is not that of the class; a variant of a tagged union is
    # "Union::Variant".
    wire_name: ClassVar[str] = ""
    # Members with the default None that may be missing at the end of an array. Members with
    # other defaults always may.
    omissible: ClassVar[tuple[str, ...]] = ()
    # Members that arrays do not have, because the reference does not have them.
    named_only: ClassVar[tuple[str, ...]] = ()
    # Other values of the tag for this variant.
    tag_aliases: ClassVar[tuple[str, ...]] = ()
    prepare: ClassVar[Prepare | None] = None


class Result(msgspec.Struct, frozen=True, rename="camel"):
    """A result for a client; the members are encoded in this order."""


class EmptyResult(Result, frozen=True):
    """The result `{}`."""


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
        raise invalid_type(value, "unit")


def _from_wire(kind: type[Any], value: object) -> object:
    """The hook of msgspec for annotations of other types."""
    return value if kind is object else kind.from_wire(value)


# A plan decodes one annotation. Its second argument is whether the value is inside a tagged
# union: the reference buffers such values, and its error texts then show numbers.
_Plan = Callable[[Any, bool], Any]


@cache
def _plan(kind: Any) -> _Plan:
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
        return _exact_type_plan(str, "a string", kind.from_wire)
    if issubclass(kind, Params) and kind.__struct_config__.tag is None:
        return _struct_plan(kind)
    raise TypeError(f"{kind!r} cannot be decoded")


def _exact_type_plan(
    kind: type, word: str, convert: Callable[[Any], object] | None = None
) -> _Plan:
    def plan(value: object, buffered: bool) -> object:
        if type(value) is not kind:
            raise invalid_type(value, word, buffered)
        return value if convert is None else convert(value)

    return plan


def _integer_plan(word: str, low: int, high: int) -> _Plan:
    def plan(value: object, buffered: bool) -> object:
        if type(value) is int and low <= value <= high:
            return value
        if type(value) is int and (buffered or (low == 1 and value == 0)):
            raise InvalidParams(f"invalid value: integer `{value}`, expected {word}")
        if not buffered and type(value) in (int, float):
            raise InvalidParams("invalid number")
        raise invalid_type(value, word, buffered)

    return plan


def _list_plan(item: Any) -> _Plan:
    item_plan = _plan(item)

    def plan(value: object, buffered: bool) -> object:
        if not isinstance(value, list):
            raise invalid_type(value, "a sequence", buffered)
        return [item_plan(item, buffered) for item in value]

    return plan


def _dict_plan(item: Any) -> _Plan:
    item_plan = _plan(item)

    def plan(value: object, buffered: bool) -> object:
        if not isinstance(value, dict):
            raise invalid_type(value, "a map", buffered)
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
            raise invalid_type(value, "string or map", buffered)
        if name not in names:
            raise _unknown_variant(name, names)
        if isinstance(value, dict) and content is not None and not (buffered and content == {}):
            raise invalid_type(content, "unit", buffered)
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
        raise invalid_type(tag, "variant identifier", buffered)

    def decode_tagged(value: object, buffered: bool) -> object:
        if isinstance(value, dict) and tag_field in value:
            return variant(value[tag_field], buffered)(value, True)
        if isinstance(value, list) and value:
            return variant(value[0], buffered)(value[1:], True)
        if isinstance(value, dict | list):
            raise InvalidParams(f"missing field `{tag_field}`")
        raise invalid_type(value, f"internally tagged enum {union_name}", buffered=True)

    return decode_tagged


def _struct_plan(kind: type[Params]) -> _Plan:
    """A struct, from an object or from an array of its members in order."""
    fields = msgspec.structs.fields(kind)
    plans = {field.encode_name: (field.name, _plan(field.type)) for field in fields}
    required = [field for field in fields if field.required]
    positional = [field for field in fields if field.name not in kind.named_only]
    struct_kind = "struct variant" if "::" in kind.wire_name else "struct"
    expected = f"{struct_kind} {kind.wire_name or kind.__name__}"

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
                described = f"{expected} with {_elements(len(positional))}"
                raise InvalidParams(f"invalid length {index}, expected {described}")
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
        raise invalid_type(value, expected, buffered)

    return plan


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


def invalid_type(value: object, expected: str, buffered: bool = False) -> InvalidParams:
    return InvalidParams(f"invalid type: {describe(value, buffered)}, expected {expected}")


def _unknown_variant(name: object, names: tuple[str, ...]) -> InvalidParams:
    return InvalidParams(f"unknown variant `{name}`, expected {_one_of(names)}")


def _one_of(names: Iterable[str]) -> str:
    quoted = [f"`{known}`" for known in names]
    return f"one of {', '.join(quoted)}" if len(quoted) > 2 else " or ".join(quoted)


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
