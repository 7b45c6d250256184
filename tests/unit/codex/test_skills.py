"""The meaning of SKILL.md and agents/openai.yaml; every case was seen on the reference."""

from __future__ import annotations

import pytest

from exec_server.codex.skills import (
    FrontMatter,
    SkillFault,
    SkillMetadata,
    front_matter,
    skill_metadata,
)
from exec_server.protocol.codex import SkillDependencies, SkillPolicy, SkillTool


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("name: n\ndescription: d", ("n", "d", None)),
        ("description: d", (None, "d", None)),
        ("name: 5\ndescription: yes", ("5", "yes", None)),
        ("name: null\ndescription: 'null'", (None, "null", None)),
        ('name: "  x  y "\ndescription: "  d  e\n f"', ("x y", "d e f", None)),
        ("name: n\ndescription: >\n  l1\n  l2", ("n", "l1 l2", None)),
        ("description: d\nmetadata:\n  short-description: ' s  t '", (None, "d", "s t")),
        ("description: d\nmetadata:\n  short-description: ''", (None, "d", None)),
        ("description: d\nmetadata:\n  short-description: ~", (None, "d", None)),
        ("description: d\nname: null\nmetadata:", (None, "d", None)),
        ("description: d\nmetadata: # none", (None, "d", None)),
        ("description: d\nmetadata: {}", (None, "d", None)),
        ("description: d\nother: [1, 2]", (None, "d", None)),
        ("x: &a foo\nname: *a\ndescription: d", ("foo", "d", None)),
        (f"name: {'é' * 64}\ndescription: d", ("é" * 64, "d", None)),
        # What YAML refuses is read as people mean it.
        ("name: [n\ndescription: d", ("[n", "d", None)),
        ("name: n\ndescription: a: b", ("n", "a: b", None)),
        ("name: n\ndescription: {a: b}", ("n", "{a: b}", None)),
        ("name: n\ndescription: Use when: x # y", ("n", "Use when: x", None)),
        ("  name: n\n  description: `d`", ("n", "`d`", None)),
        ("description: @x\nname: 'q'", ("q", "@x", None)),
        ("description: d\nother: a: b: c", (None, "d", None)),
        ("description: d\nmetadata:\n  short-description: a: b", (None, "d", "a: b")),
    ],
)
def test_front_matter(header: str, expected: tuple[str | None, str, str | None]) -> None:
    assert front_matter(f"---\n{header}\n---\nbody") == FrontMatter(*expected)


@pytest.mark.parametrize(
    "contents",
    ["---\r\nname: n\r\ndescription: d\r\n---\r\n", " --- \nname: n\ndescription: d\n --- "],
)
def test_lines_of_dashes(contents: str) -> None:
    assert front_matter(contents) == FrontMatter("n", "d", None)


@pytest.mark.parametrize(
    "contents",
    [
        "",
        "no header",
        "\n---\ndescription: d\n---",
        "---\ndescription: d\n",
        "----\ndescription: d\n---\n",
        "---\n---\ndescription: d\n---\n",
        "---\nname: n\n---",
        "---\nname: n\ndescription: ''\n---",
        "---\nname: n\nname: m\ndescription: d\n---",
        "---\ndescription: d\nmetadata: x\n---",
        "---\ndescription: d\nmetadata: null\n---",
        "---\n- a\n---",
        "---\ndescription: [x]\n---",
        "---\ndescription: 'x' y\n---",
        "---\ndescription: x\n  y: z\n---",
        f"---\nname: {'x' * 65}\ndescription: d\n---",
    ],
)
def test_invalid_skills(contents: str) -> None:
    with pytest.raises(SkillFault):
        front_matter(contents)


def _tool(**members: object) -> SkillTool:
    plain: dict[str, object] = dict.fromkeys(
        ("description", "transport", "command", "url", "oauth_callback_port")
    )
    return SkillTool(**(plain | {"type": "mcp", "value": "v"} | members))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (
            "- {type: mcp, value: v, description: 5, transport: t}",
            _tool(description="5", transport="t"),
        ),
        ("- {type: mcp, value: ' v ', command: ' c  d ', url: ''}", _tool(command="c d")),
        ("- {type: mcp, value: v, oauth: {callback_port: 9}}", _tool(oauth_callback_port=9)),
        ("- {type: mcp, value: v, oauth: {callbackPort: 0}}", _tool(oauth_callback_port=0)),
        ("- {type: mcp, value: v, oauth: null}", _tool()),
        (f"- {{type: mcp, value: v, url: {'x' * 1025}}}", _tool()),
        ("- {type: mcp}", None),
        ("- {value: v}", None),
        (f"- {{type: {'x' * 65}, value: v}}", None),
        ("- {type: mcp, value: [v]}", None),
        ("- {type: mcp, value: v, oauth: {callback_port: 70000}}", None),
        ("- {type: mcp, value: v, value: w}", None),
        ("- 5", None),
    ],
)
def test_tools(tools: str, expected: SkillTool | None) -> None:
    dependencies = None if expected is None else SkillDependencies([expected])
    found = skill_metadata(f"dependencies:\n  tools:\n  {tools}\n")
    assert found == SkillMetadata(dependencies, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("policy: {}", SkillPolicy(None, [])),
        ("policy:\n  allow_implicit_invocation: TRUE", SkillPolicy(True, [])),
        (
            "policy:\n  products: [CHATGPT, atlas, codex]",
            SkillPolicy(None, ["chatgpt", "atlas", "codex"]),
        ),
        ("policy: {}\ninterface: {display_name: 5}", SkillPolicy(None, [])),
        ("policy: {}\ndependencies: {}", SkillPolicy(None, [])),
        ("", None),
        ("policy: null", None),
        ("policy: 5", None),
        ("policy:\n  products: [Codex]", None),
        ("policy:\n  products: [[]]", None),
        ("policy:\n  products: null", None),
        ("policy:\n  allow_implicit_invocation: yes", None),
        ("policy: {}\npolicy: {}", None),
        ("policy: {}\ninterface: 5", None),
        ("policy: {}\ninterface: {icon_small: [x]}", None),
        ("policy: {}\ndependencies: []", None),
        ("policy: {}\n---\npolicy: {}", None),
        ("- x", None),
    ],
)
def test_policies_and_faults_anywhere(text: str, expected: SkillPolicy | None) -> None:
    assert skill_metadata(text) == SkillMetadata(None, expected)
