"""Replays recorded exchanges about the files of Codex: configuration and discovery.

A server of its own for each, with a Codex home and a user home below the folder of the test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.replay import RECORDED_ROOT, Replay, Rules
from tests.conformance.scene import place
from tests.conformance.test_transcripts import OUR_EXTENSIONS, TRANSCRIPTS
from tests.support.client import start_server

pytestmark = pytest.mark.skipif(not TRANSCRIPTS.is_dir(), reason="no transcripts")

Message = dict[str, Any]
Hook = Callable[[Path], None]


def write_files(contents: Mapping[str, Any]) -> Hook:
    """A hook that writes files, in whose texts {dir} is the folder of the test."""

    def write(root: Path) -> None:
        place(root, contents)

    return write


def _normal_config(answer: Message) -> Message:
    """Varying parts: the host, the writer's style, and a parser's words for a fault."""
    import tomli

    text = json.dumps(answer)
    if "error" in answer:
        fault = r"(\.toml:).*?(\"})"
        return dict(json.loads(re.sub(fault, r"\1\2", text)))
    answer = json.loads(text)
    answer["result"]["hostname"] = "host"
    for stack in ("config", "requirements"):
        for layer in answer["result"][stack]["layers"]:
            layer["toml"] = tomli.loads(layer["toml"])
    return answer


_CONFIG_37 = """
model = "m1"
[mcp_servers.a]
url = "https://a.example/mcp"
[mcp_servers.b]
command = "b"
["quoted.key"]
z = 1
[projects."{dir}/cfg/proj"]
trust_level = "trusted"
"""
_USER_CONFIG = """
model = "u"
[mcp_servers.docs]
url = "https://docs.example/mcp"
[projects."{dir}/config/proj"]
trust_level = "trusted"
[projects."{dir}/config/proj/blocked"]
trust_level = "untrusted"
"""
_PROJECT_CONFIG = """
model = "root"
openai_base_url = "https://elsewhere.example"
[mcp_servers.build]
url = "http://127.0.0.1:9999/mcp"
bearer_token_env_var = "BUILD_TOKEN"
[hooks]
note = "of the main checkout"
"""
_HOOKS: dict[str, dict[int, Hook]] = {
    "37_environment_config_read": {
        1: write_files(
            {
                "codex-home/config.toml": _CONFIG_37,
                "cfg/proj/.git/HEAD": "",
                "cfg/proj/.codex/config.toml": 'model = "m2"',
            }
        ),
        11: write_files({"codex-home/config.toml": "broken=[\n"}),
    },
    "surface_config": {
        1: write_files(
            {
                "codex-home/config.toml": _USER_CONFIG,
                "config/proj/.git/HEAD": "",
                "config/proj/.codex/config.toml": _PROJECT_CONFIG,
                "config/proj/svc/.codex/config.toml": 'model = "svc"',
                "config/proj/blocked/.codex/config.toml": 'model = "blocked"',
            }
        ),
        10: write_files(
            {
                "config/wt/.git": "gitdir: {dir}/config/proj/.git/worktrees/wt",
                "config/proj/.git/worktrees/wt/gitdir": "{dir}/config/wt/.git",
                "config/proj/.git/worktrees/wt/commondir": "../..",
                "config/wt/.codex/config.toml": 'model = "worktree"\n[hooks]\nnote = "own"',
            }
        ),
        11: write_files({"config/proj/.codex/config.toml": "model = \n"}),
        12: write_files({"codex-home/config.toml": "a = 1\na = 2\n"}),
        13: write_files({"codex-home/config.toml": "project_root_markers = [1]\n"}),
    },
}
_NORMALIZE = {"environmentConfig/read": _normal_config}


def _skill(name: str, metadata: str = "") -> str:
    return f"---\n{name}\n{metadata}---\n"


# Files that the recorded answers do not show.
_MORE_FILES: dict[str, dict[str, Any]] = {
    "38_capability_roots_discover_v1": {
        "cap/afile": "",
        "cap/big/SKILL.md": {"size": 1_048_577},
        "cap/bin/SKILL.md": {"hex": "ff"},
    },
    "surface_discover_v1": {"discover_v1/deep/a/b/c/d/e/f/g/SKILL.md": "seven"},
    "39_capabilities_discover_v2": {
        "codex-home/plugins/cache/mkt/plug/1.0.0/skills/ps/SKILL.md": _skill(
            "name: ps\ndescription: Desc ps", "metadata:\n  short-description: Short ps\n"
        ),
        "codex-home/skills/ch1/SKILL.md": _skill(
            "name: ch1\ndescription: Desc ch1", "metadata:\n  short-description: Short ch1\n"
        ),
        "codex-home/skills/ch1/agents/openai.yaml": "policy: {allow_implicit_invocation: false}\n"
        "dependencies:\n  tools:\n  - {type: mcp, value: github, description: GH, "
        "transport: streamable_http, url: 'https://x.example/mcp'}\n",
        "demo-home/.agents/skills/ua1/SKILL.md": _skill(
            "name: ua1\ndescription: Desc ua1", "metadata:\n  short-description: Short ua1\n"
        ),
    },
    "surface_discover_v2": {
        "codex-home/plugins/cache/market/tool/1.1.0/.codex-plugin/plugin.json": "{}",
        "codex-home/plugins/cache/market/tool/1.2.0/skills/run/SKILL.md": _skill(
            "name: run\ndescription: What run does"
        ),
        "codex-home/skills/fmt/SKILL.md": _skill(
            "name: fmt\ndescription: What fmt does", "metadata:\n  short-description: Formats\n"
        ),
        "codex-home/skills/fmt/agents/openai.yaml": "policy: {allow_implicit_invocation: true}\n"
        "dependencies:\n  tools:\n  - {type: mcp, value: docs, transport: streamable_http, "
        "url: 'https://docs.example/mcp'}\n",
        "codex-home/skills/unnamed/SKILL.md": _skill("description: Named by its directory"),
        "codex-home/skills/broken/SKILL.md": "no header",
        "demo-home/.agents/skills/mine/SKILL.md": _skill("name: mine\ndescription: What mine does"),
    },
}


def _recorded_files(value: Any) -> Iterator[tuple[str, str]]:
    """The names and contents of all files in recorded answers, manifests after their parts."""
    if isinstance(value, dict) and value.keys() == {"path", "contents"}:
        yield value["path"].removeprefix("file://"), value["contents"]
    elif isinstance(value, dict):
        for name in sorted(value, reverse=True):
            yield from _recorded_files(value[name])
    elif isinstance(value, list):
        for each in value:
            yield from _recorded_files(each)


def _place_recorded(root: Path, entries: list[Message], places: Mapping[str, str]) -> None:
    for entry in entries:
        if entry["dir"] == "recv":
            for name, contents in _recorded_files(entry["msg"]):
                for recorded, actual in {RECORDED_ROOT: str(root), **places}.items():
                    name = name.replace(recorded, actual)  # noqa: PLW2901
                place(root, {str(Path(name).relative_to(root)): contents})


_PROFILE = "echo x >> $HOME/runs; echo chatty; export FROM=profile KEEP=1; plain=1\n"
_PROFILE += "hello() { echo hello $1; }; set -o noclobber; shopt -s nullglob\n"
_MORE_FILES |= {
    "41_shell_snapshot": {
        "snap/.bash_profile": "echo x >> ~/count; export FROM_PROFILE=yes; myfn() { echo fn-$1; }\n"
    },
    "surface_shell_snapshot": {
        "shell_snapshot/.bash_profile": _PROFILE,
        "shell_snapshot/.bashrc": "echo rc >> $HOME/runs\n",
    },
}
# Entries that are not played: when the reference notices a change is a matter of luck, and it waits
# 10 s for a profile that hangs.
_CUT = {"surface_discover_v2": 5, "surface_shell_snapshot": -4}


@pytest.mark.parametrize("name", [*_HOOKS, *_MORE_FILES])
def test_transcript(name: str, kind: str, folder: Path) -> None:
    homes = {"/opt/codex-home": folder / "codex-home", "/opt/demo-home": folder / "demo-home"}
    for home in homes.values():
        home.mkdir()
    rules = Rules(
        extensions=frozenset() if kind == "reference" else OUR_EXTENSIONS,
        places={recorded: str(home) for recorded, home in homes.items()},
        normalize_answers=_NORMALIZE,
        hooks={(0, number): hook for number, hook in _HOOKS.get(name, {}).items()},
    )
    env = {"HOME": str(folder / "demo-home"), "CODEX_HOME": str(folder / "codex-home")}
    lines = (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    del entries[_CUT.get(name, len(entries)) :]
    if name in _MORE_FILES:
        _place_recorded(folder, entries, rules.places)
        place(folder, _MORE_FILES[name])
    with start_server(kind, env=env, cwd=folder) as server:
        Replay(server, folder, rules, None).play(entries)
