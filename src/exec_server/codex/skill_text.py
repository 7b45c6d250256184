"""The meaning of a skill's files: SKILL.md and agents/openai.yaml."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from exec_server.codex import yaml_text
from exec_server.codex.yaml_text import Pairs, YamlFault
from exec_server.protocol.codex import SkillDependencies, SkillPolicy, SkillTool

if TYPE_CHECKING:  # slow imports stay out of start-up
    from yaml import Node

# The reference's limits of texts. A longer name is an error, another text counts as absent.
NAME_CHARACTERS: Final = 64
TEXT_CHARACTERS: Final = 1024

_PRODUCTS: Final = {
    spelling: product
    for product in ("chatgpt", "codex", "atlas")
    for spelling in (product, product.upper())
}
_INTERFACE: Final = (
    "display_name",
    "short_description",
    "icon_small",
    "icon_large",
    "brand_color",
    "default_prompt",
)
# A line `key: value` whose value is read as written if YAML cannot read the line.
_LINE: Final = re.compile(r"(\s*[\w.-]+:[ \t]+)(.*)")


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
    try:
        return _front_matter(text)
    except YamlFault:
        pass
    try:
        return _front_matter(_quoted(text))
    except YamlFault as fault:
        raise SkillFault(str(fault)) from None


def _header(contents: str) -> str:
    """The lines between two lines of three dashes."""
    first, *lines = contents.split("\n")
    if first.strip() != "---":
        raise SkillFault("missing front matter")
    for index, line in enumerate(lines):
        if line.strip() == "---":
            return "\n".join(lines[:index])
    raise SkillFault("missing front matter")


def _front_matter(text: str) -> FrontMatter:
    header = yaml_text.as_mapping(yaml_text.parse(text))
    name = _one_line(header.get("name"))
    description = _one_line(header.get("description"))
    metadata = header.get("metadata")
    short = None
    # As in the reference, `metadata:` is an empty mapping and `metadata: null` is none.
    if metadata is not None or header.has_null("metadata"):
        short = _one_line(yaml_text.as_mapping(metadata).get("short-description"))
    if description is None:
        raise YamlFault("missing field `description`")
    if name is not None and len(name) > NAME_CHARACTERS:
        raise YamlFault(f"name exceeds {NAME_CHARACTERS} characters")
    return FrontMatter(name, description, short)


def _quoted(text: str) -> str:
    """The text with quotes around values that people write without, such as `Use when: asked`."""
    return "\n".join(map(_quoted_line, text.split("\n")))


def _quoted_line(line: str) -> str:
    match = _LINE.fullmatch(line)
    if match is None:
        return line
    value = match[2].split(" #", 1)[0].strip()
    is_open = value.startswith(("[", "{")) and not value.endswith(("]", "}"))
    if value.startswith(('"', "'", "|", ">")):
        return line
    if ": " in value or value.endswith(":") or value.startswith(("@", "`")) or is_open:
        return f"{match[1]}{json.dumps(value, ensure_ascii=False)}"
    return line


def _one_line(value: Node | None, limit: int | None = None) -> str | None:
    """A text with single spaces, None if it is empty or too long."""
    text = " ".join((yaml_text.as_text(value) or "").split())
    return text if text and (limit is None or len(text) <= limit) else None


@dataclass(frozen=True, slots=True)
class SkillMetadata:
    """What agents/openai.yaml says about its skill."""

    dependencies: SkillDependencies | None = None
    policy: SkillPolicy | None = None


def skill_metadata(contents: str) -> SkillMetadata:
    """The meaning of agents/openai.yaml; a file with any fault has none."""
    try:
        document = yaml_text.parse(contents)
        if document is None:
            return SkillMetadata()
        return _metadata(yaml_text.as_mapping(document))
    except YamlFault:
        return SkillMetadata()


def _metadata(document: Pairs) -> SkillMetadata:
    interface = document.get("interface")
    if interface is not None:
        for name in _INTERFACE:
            yaml_text.as_text(yaml_text.as_mapping(interface).get(name))
    policy = document.get("policy")
    return SkillMetadata(
        _dependencies(document.get("dependencies")), None if policy is None else _policy(policy)
    )


def _dependencies(value: Node | None) -> SkillDependencies | None:
    if value is None:
        return None
    table = yaml_text.as_mapping(value)
    tools = yaml_text.as_sequence(table.get("tools")) if table.has("tools") else []
    known = [tool for tool in map(_tool, tools) if tool is not None]
    return SkillDependencies(known) if known else None


def _tool(value: Node | None) -> SkillTool | None:
    table = yaml_text.as_mapping(value)
    kind = _one_line(table.get("type"), NAME_CHARACTERS)
    named = _one_line(table.get("value"), TEXT_CHARACTERS)
    description = _one_line(table.get("description"), TEXT_CHARACTERS)
    transport = _one_line(table.get("transport"), NAME_CHARACTERS)
    command = _one_line(table.get("command"), TEXT_CHARACTERS)
    url = _one_line(table.get("url"), TEXT_CHARACTERS)
    oauth = table.get("oauth")
    port = None
    if oauth is not None:
        port = yaml_text.as_port(yaml_text.as_mapping(oauth).get("callback_port", "callbackPort"))
    if kind is None or named is None:
        return None
    return SkillTool(kind, named, description, transport, command, url, port)


def _policy(value: Node | None) -> SkillPolicy:
    table = yaml_text.as_mapping(value)
    names = yaml_text.as_sequence(table.get("products")) if table.has("products") else []
    allowed = yaml_text.as_boolean(table.get("allow_implicit_invocation"))
    products = [_PRODUCTS.get(yaml_text.as_text(name) or "") for name in names]
    if None in products:
        raise YamlFault("unknown product")
    return SkillPolicy(allowed, [product for product in products if product is not None])
