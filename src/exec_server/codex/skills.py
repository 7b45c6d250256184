"""The meaning of a skill's files: SKILL.md and agents/openai.yaml."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from exec_server.protocol.codex import SkillDependencies, SkillPolicy, SkillTool

if TYPE_CHECKING:
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

# The reference's limits of texts. A longer name is an error, another text counts as absent.
NAME_CHARACTERS: Final = 64
TEXT_CHARACTERS: Final = 1024
_INTERFACE: Final = (
    *("display_name", "short_description", "icon_small", "icon_large"),
    *("brand_color", "default_prompt"),
)
# A line `key: value` whose value is read as written if YAML cannot read the line.
_LINE: Final = re.compile(r"(\s*[\w.-]+:[ \t]+)(.*)")


# Scalars stay text: `yes`, `010` and `2020-01-01` are names like any other. A value that is
# referred to a thousand times is one node, so aliases cannot grow a document.
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
    if node is not None and text is not None and (node.style or text not in _BOOLEANS):
        raise YamlFault("expected a boolean")
    return None if text is None else _BOOLEANS[text]


def as_port(node: Node | None) -> int | None:
    """The port number of a scalar without quotes, None if it is null; raises YamlFault."""
    text = as_text(node)
    if node is None or text is None:
        return None
    if node.style or not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise YamlFault("expected the number of a port")
    return int(text)


_PRODUCTS: Final = {
    spelling: product
    for product in ("chatgpt", "codex", "atlas")
    for spelling in (product, product.upper())
}


class SkillFault(Exception):
    """A skill has no valid front matter."""


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """What SKILL.md says about its skill."""

    name: str | None
    description: str
    short_description: str | None


def front_matter(contents: str) -> FrontMatter:
    """The header of SKILL.md; raises SkillFault."""
    text = _header(contents)
    with suppress(YamlFault):
        return _front_matter(text)
    try:
        # With quotes around values that people write without, such as `Use when: asked`.
        return _front_matter("\n".join(map(_quoted_line, text.split("\n"))))
    except YamlFault as fault:
        raise SkillFault(str(fault)) from None


def _header(contents: str) -> str:
    first, *lines = contents.split("\n")
    if first.strip() != "---":
        raise SkillFault("missing front matter")
    for index, line in enumerate(lines):
        if line.strip() == "---":
            return "\n".join(lines[:index])
    raise SkillFault("missing front matter")


def _front_matter(text: str) -> FrontMatter:
    header = as_mapping(parse(text))
    name = _one_line(header.get("name"))
    description = _one_line(header.get("description"))
    metadata = header.get("metadata")
    short = None
    # As in the reference, `metadata:` is an empty mapping and `metadata: null` is none.
    if metadata is not None or header.has_null("metadata"):
        short = _one_line(as_mapping(metadata).get("short-description"))
    if description is None:
        raise YamlFault("missing field `description`")
    if name is not None and len(name) > NAME_CHARACTERS:
        raise YamlFault(f"name exceeds {NAME_CHARACTERS} characters")
    return FrontMatter(name, description, short)


def _quoted_line(line: str) -> str:
    match = _LINE.fullmatch(line)
    value = "" if match is None else match[2].split(" #", 1)[0].strip()
    if match is None or value.startswith(('"', "'", "|", ">")):
        return line
    is_open = value.startswith(("[", "{")) and not value.endswith(("]", "}"))
    if ": " in value or value.endswith(":") or value.startswith(("@", "`")) or is_open:
        return f"{match[1]}{json.dumps(value, ensure_ascii=False)}"
    return line


def _one_line(value: Node | None, limit: int | None = None) -> str | None:
    text = " ".join((as_text(value) or "").split())
    return text if text and (limit is None or len(text) <= limit) else None


@dataclass(frozen=True, slots=True)
class SkillMetadata:
    """What agents/openai.yaml says about its skill."""

    dependencies: SkillDependencies | None = None
    policy: SkillPolicy | None = None


def skill_metadata(contents: str) -> SkillMetadata:
    """The meaning of agents/openai.yaml; a file with any fault has none."""
    try:
        document = parse(contents)
        return SkillMetadata() if document is None else _metadata(as_mapping(document))
    except YamlFault:
        return SkillMetadata()


def _metadata(document: Pairs) -> SkillMetadata:
    interface = document.get("interface")
    if interface is not None:
        for name in _INTERFACE:
            as_text(as_mapping(interface).get(name))
    policy = document.get("policy")
    return SkillMetadata(
        _dependencies(document.get("dependencies")), None if policy is None else _policy(policy)
    )


def _dependencies(value: Node | None) -> SkillDependencies | None:
    if value is None:
        return None
    table = as_mapping(value)
    tools = as_sequence(table.get("tools")) if table.has("tools") else []
    known = [tool for tool in map(_tool, tools) if tool is not None]
    return SkillDependencies(known) if known else None


def _tool(value: Node | None) -> SkillTool | None:
    table = as_mapping(value)
    kind = _one_line(table.get("type"), NAME_CHARACTERS)
    named = _one_line(table.get("value"), TEXT_CHARACTERS)
    description = _one_line(table.get("description"), TEXT_CHARACTERS)
    transport = _one_line(table.get("transport"), NAME_CHARACTERS)
    command = _one_line(table.get("command"), TEXT_CHARACTERS)
    url = _one_line(table.get("url"), TEXT_CHARACTERS)
    oauth = table.get("oauth")
    names = ("callback_port", "callbackPort")
    port = None if oauth is None else as_port(as_mapping(oauth).get(*names))
    if kind is None or named is None:
        return None
    return SkillTool(kind, named, description, transport, command, url, port)


def _policy(value: Node | None) -> SkillPolicy:
    table = as_mapping(value)
    names = as_sequence(table.get("products")) if table.has("products") else []
    allowed = as_boolean(table.get("allow_implicit_invocation"))
    products = [_PRODUCTS.get(as_text(name) or "") for name in names]
    if None in products:
        raise YamlFault("unknown product")
    return SkillPolicy(allowed, [product for product in products if product is not None])
