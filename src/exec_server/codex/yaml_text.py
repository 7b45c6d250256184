"""Small YAML documents, read as the nodes of PyYAML.

Scalars stay text, as the file has them: `yes`, `010` and `2020-01-01` are names like any other.
A value that is referred to a thousand times is one node, so aliases cannot grow a document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # slow imports stay out of start-up
    from yaml import Node

# A document: real ones have less than 1 KiB. A longer one is refused.
DOCUMENT_CHARACTERS: Final = 65_536
# Levels of lists and mappings; real documents have four. A deeper one is refused.
DEPTH: Final = 32

_NULL: Final = "tag:yaml.org,2002:null"
_BOOLEANS: Final = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class YamlFault(Exception):
    """A text is not the document that was expected."""


class Pairs(list[tuple["Node", "Node"]]):
    """A mapping; keys may be repeated."""

    def get(self, *names: str) -> Node | None:
        """The value of a key that has these spellings, None if it is absent or null."""
        values = [value for key, value in self if key.value in names]
        if len(values) > 1:
            raise YamlFault(f"duplicate field `{names[0]}`")
        return values[0] if values and values[0].tag != _NULL else None

    def has(self, name: str) -> bool:
        return any(key.value == name for key, _ in self)

    def has_null(self, name: str) -> bool:
        """Whether the value of a key is written as null; one without a value is not."""
        return any(key.value == name and value.tag == _NULL and value.value for key, value in self)


def parse(text: str) -> Node | None:
    """The only document of a text, None if it is empty or null; raises YamlFault."""
    import yaml

    if len(text) > DOCUMENT_CHARACTERS:
        raise YamlFault(f"the document exceeds {DOCUMENT_CHARACTERS} characters")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        # Composing recurses, in C without a limit; events do not.
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:
                raise YamlFault(f"the document is more than {DEPTH} levels deep")
        document: Node | None = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        raise YamlFault(str(error)) from None
    return None if document is None or document.tag == _NULL else document


def as_mapping(node: Node | None) -> Pairs:
    """The pairs of a mapping; raises YamlFault."""
    if node is None or node.id != "mapping":
        raise YamlFault("expected a mapping")
    return Pairs(node.value)


def as_sequence(node: Node | None) -> list[Node]:
    """The values of a list; raises YamlFault."""
    if node is None or node.id != "sequence":
        raise YamlFault("expected a sequence")
    return list(node.value)


def as_text(node: Node | None) -> str | None:
    """The text of a scalar, None if it is null; raises YamlFault."""
    if node is None or node.tag == _NULL:
        return None
    if node.id != "scalar":
        raise YamlFault("expected a string")
    return str(node.value)


def as_boolean(node: Node | None) -> bool | None:
    """The boolean of a scalar without quotes, None if it is null; raises YamlFault."""
    text = as_text(node)
    if node is None or text is None:
        return None
    if node.style or text not in _BOOLEANS:
        raise YamlFault("expected a boolean")
    return _BOOLEANS[text]


def as_port(node: Node | None) -> int | None:
    """The port number of a scalar without quotes, None if it is null; raises YamlFault."""
    text = as_text(node)
    if node is None or text is None:
        return None
    if node.style or not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise YamlFault("expected the number of a port")
    return int(text)
