"""Small YAML documents as plain values, read without recursion.

Scalars stay text, as the file has them: `yes`, `010` and `2020-01-01` are names like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # slow imports stay out of start-up
    from collections.abc import Iterator

# A document: real ones have less than 1 KiB. A longer one is refused.
DOCUMENT_CHARACTERS: Final = 65_536
# Levels of lists and mappings; real documents have four. A deeper one is refused.
DEPTH: Final = 32

_NULLS: Final = ("~", "null", "Null", "NULL")
_BOOLEANS: Final = {"true": True, "True": True, "TRUE": True} | {
    "false": False,
    "False": False,
    "FALSE": False,
}


class YamlFault(Exception):
    """A text is not the document that was expected."""


class Null:
    """A null that is written as such; None is the one where nothing is written."""


NULL: Final = Null()


class Plain(str):
    """A scalar without quotes, which may mean a number or a boolean."""

    __slots__ = ()


class Pairs(list[tuple[Any, Any]]):
    """A mapping; keys may be repeated."""

    def get(self, *names: str) -> Any:
        """The value of a key that has these spellings, None if it is absent or null."""
        values = [value for key, value in self if isinstance(key, str) and key in names]
        if len(values) > 1:
            raise YamlFault(f"duplicate field `{names[0]}`")
        return None if not values or values[0] is NULL else values[0]

    def has(self, name: str) -> bool:
        return any(key == name for key, _ in self)

    def has_null(self, name: str) -> bool:
        """Whether the value of a key is written as null; one without a value is not."""
        return any(key == name and value is NULL for key, value in self)


def parse(text: str) -> Any:
    """The only document of a text: None, a text, a list or Pairs; raises YamlFault."""
    import yaml

    if len(text) > DOCUMENT_CHARACTERS:
        raise YamlFault(f"the document exceeds {DOCUMENT_CHARACTERS} characters")
    # The events of libyaml need no recursion, unlike everything that is built upon them.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Builder().build(yaml.parse(text, Loader=loader))
    except yaml.YAMLError as error:
        raise YamlFault(str(error)) from None


class _Builder:
    """Values from events: a stack of lists, of which the first holds the documents."""

    def __init__(self) -> None:
        self._stack: list[list[Any]] = [[]]
        self._are_pairs: list[bool] = [False]
        self._anchors: dict[str, Any] = {}

    def build(self, events: Iterator[Any]) -> Any:
        for event in events:
            self._take(event)
        documents = self._stack[0]
        if len(documents) > 1:
            raise YamlFault("more than one document")
        return None if not documents or documents[0] is NULL else documents[0]

    def _take(self, event: Any) -> None:
        match type(event).__name__:
            case "ScalarEvent":
                self._add(_scalar(event), event.anchor)
            case "SequenceStartEvent":
                self._open([], event.anchor)
            case "MappingStartEvent":
                self._open(Pairs(), event.anchor)
            case "SequenceEndEvent" | "MappingEndEvent":
                self._close()
            case "AliasEvent":
                if event.anchor not in self._anchors:
                    raise YamlFault(f"unknown anchor {event.anchor}")
                self._add(self._anchors[event.anchor], None)

    def _add(self, value: Any, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = value
        self._stack[-1].append(value)

    def _open(self, value: list[Any], anchor: str | None) -> None:
        if len(self._stack) > DEPTH:
            raise YamlFault(f"the document is more than {DEPTH} levels deep")
        self._add(value, anchor)
        self._stack.append(value)

    def _close(self) -> None:
        done = self._stack.pop()
        if isinstance(done, Pairs):
            done[:] = zip(done[::2], done[1::2], strict=True)


def _scalar(event: Any) -> str | Null | None:
    if event.style or event.tag:  # quoted, a block, or with a tag
        return str(event.value)
    if not event.value:
        return None
    return NULL if event.value in _NULLS else Plain(event.value)


def mapping(value: Any) -> Pairs:
    """The value as a mapping; raises YamlFault."""
    if not isinstance(value, Pairs):
        raise YamlFault("expected a mapping")
    return value


def sequence(value: Any) -> list[Any]:
    """The value as a list; raises YamlFault."""
    if not isinstance(value, list) or isinstance(value, Pairs):
        raise YamlFault("expected a sequence")
    return value


def text(value: Any) -> str | None:
    """The value as text, None if it is null; raises YamlFault."""
    if value is None or isinstance(value, str):
        return value
    raise YamlFault("expected a string")


def boolean(value: Any) -> bool | None:
    """The value as a boolean, None if it is null; raises YamlFault."""
    if value is None:
        return None
    if isinstance(value, Plain) and value in _BOOLEANS:
        return _BOOLEANS[value]
    raise YamlFault("expected a boolean")


def port(value: Any) -> int | None:
    """The value as the number of a port, None if it is null; raises YamlFault."""
    if value is None:
        return None
    if isinstance(value, Plain) and value.isascii() and value.isdigit() and int(value) < 65_536:
        return int(value)
    raise YamlFault("expected the number of a port")
