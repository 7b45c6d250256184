"""Runs the adapters in their frameworks: the frameworks' own suites, and runs with scripted models.

usage: adapter_suites.py [--install] PYTHON [NAME...]

Each framework has a virtual environment of its own, which is kept in $EXEC_SERVER_ADAPTERS
(default: ~/.cache/exec-server-adapters) until its versions change. A framework that the package
index lacks is skipped with a word, and so are the rows of the reference if it is not installed.
Three frameworks are tried at a time. With --install the environments are made and nothing is run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/adapters"
# The tests wait for processes and connections half of the time.
AT_ONCE = 3
# A row that takes longer hangs: the longest one takes two minutes on a busy machine.
ROW_SECONDS = 600
# litellm, which some frameworks import, would fetch the prices of models in a thread that disturbs
# its own imports.
VARIABLES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
REFERENCE = ("--server", "reference")

# Tests of langchain-tests 1.1.9 that ask for the opposite of what deepagents 0.7 documents, and
# that its own BaseSandbox fails: globs have absolute paths and no directories, and a write
# replaces a file.
CONTRADICTIONS = (
    "test_glob test_glob_basic_pattern test_glob_with_directories "
    "test_glob_hidden_files_explicitly test_glob_with_character_class "
    "test_glob_with_question_mark test_write_existing_file_fails"
)
# Tests of Inspect that need another user than the one of the server, which the reference has not:
# a command as a user, and three files that root may read and write all the same.
NEEDS_USERS = (
    "test_exec_as_user test_read_file_not_allowed test_write_binary_file_without_permissions "
    "test_write_text_file_without_permissions"
)
# A sample's processes that have closed their output cannot be found on the reference.
NEEDS_LIST = "test_the_directory_of_a_busy_sample_is_deleted"
# Tests of Pydantic AI: the reference does not list links that lead nowhere, and one test is skipped
# on a server of root.
NEEDS_LINKS = "test_symlink_loop_does_not_break_listing"
NEEDS_ORDINARY_USER = "test_permission_denied_uses_builtin_error"
# The reference kills the process group of a command: a job in the background of a session's bash,
# which has another one, stays.
NEEDS_DESCENDANTS = "test_a_cancelled_session"
# Tests of Claude Managed Agents: the reference has no fs/glob, and a process that leaves the group
# of its command stays.
NEEDS_GLOB = (
    "test_every_tool test_much_output_and_large_files test_links_out_of_the_directory "
    "test_commands_that_attack_their_shell test_a_late_command_keeps_its_output "
    "test_a_given_up_session_kills_its_command[lost] "
    "test_a_given_up_session_kills_its_command[stopping] "
    "test_a_given_up_session_kills_its_command[cancelled] "
    # It does not tell links from directories, and refuses the path.
    "test_nothing_is_written_where_a_command_put_another_skills[link]"
)
# The tests of every_adapter.py for which the reference is a server like ours.
EVERYWHERE = (
    "test_a_target",
    "test_confined",
    "test_a_connection_lost_in_the_middle",
    "test_a_cancelled_command_is_killed",
)
EVERY_TESTS = 12


class Row(NamedTuple):
    """A run of pytest in the environment of a framework; all of its tests have to pass."""

    name: str
    requirements: str
    tests: int
    modules: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @property
    def needs_reference(self) -> bool:
        return "reference" in self.flags or self.modules[0].endswith("_codex")

    @property
    def needs_claude(self) -> bool:
        return self.modules == ("run_mcp_claude",)

    @property
    def needs_own_root(self) -> bool:
        return self.modules == ("run_harbor_trial",)

    @property
    def needs_bubblewrap(self) -> bool:
        return self.modules == ("run_cloud_agents_codex",)

    @property
    def framework(self) -> str:
        """Rows of one framework come one after the other: some suites have a fixed directory."""
        return self.requirements.partition("==")[0]

    @property
    def title(self) -> str:
        if self.needs_claude:
            return f"{self.name} with Claude Code"
        return f"{self.name} with the reference" if self.needs_reference else self.name


def _adapter(
    name: str, requirements: str, tests: int, module: str, flags: tuple[str, ...] = ()
) -> Row:
    """A suite or a run, and the tests that all adapters have in common."""
    driver = module.partition("_")[2]
    flags = ("--adapter", driver, *flags)
    return Row(name, requirements, tests + EVERY_TESTS, (module, "every_adapter"), flags)


def _on_reference(row: Row, tests: int, without: str = "") -> Row:
    """The same with the reference, as far as that goes; `tests` are those of the suite."""
    modules = (row.modules[0], *(f"every_adapter.py::{name}" for name in EVERYWHERE))
    flags = [*row.flags, *REFERENCE]
    if without and "--without" in flags:
        flags[flags.index("--without") + 1] += f" {without}"
    elif without:
        flags += ["--without", without]
    return row._replace(tests=tests + len(EVERYWHERE), modules=modules, flags=tuple(flags))


_AUTO = ("-o", "asyncio_mode=auto")
_LANGCHAIN = "langchain-tests==1.1.9 pytest-asyncio"
_FSSPEC = _adapter("fsspec", "fsspec==2026.9.0", 137, "suite_fsspec")
_PYDANTIC = _adapter("pydantic-ai", "pydantic-ai-slim==2.66.0 anyio", 38, "suite_pydantic_ai")
_INSPECT = _adapter("inspect", "inspect-ai==0.3.285 anyio", 44, "suite_inspect")
_DEEPAGENTS = _adapter(
    "deepagents",
    f"deepagents==0.7.32 {_LANGCHAIN}",
    82,
    "suite_deepagents",
    (*_AUTO, "--without", CONTRADICTIONS),
)
_OPENAI = _adapter("openai-agents", "openai-agents==0.24.0", 10, "run_openai_agents")
_HARBOR = _adapter("harbor", "harbor==0.24.0", 3, "run_harbor")
_TRIAL = Row("harbor", "harbor==0.24.0", 2, ("run_harbor_trial",))
_OPENHANDS = _adapter("openhands", "openhands-sdk==1.58.0", 5, "run_openhands")
_MINI = _adapter("mini-swe-agent", "mini-swe-agent==2.4.6", 6, "run_mini_swe_agent")
_CLAUDE = _adapter("claude-managed-agents", "anthropic==2.10.0", 46, "run_claude_managed_agents")
_REX = _adapter("swe-rex", "swe-rex==1.4.0", 7, "run_swe_rex")

# The lower bound of each extra in pyproject.toml is one of these versions; a unit test compares.
ROWS = (
    _INSPECT,
    _on_reference(_INSPECT, 40, NEEDS_USERS),
    Row("inspect", "inspect-ai==0.3.285 anyio", 4, ("run_inspect",)),
    Row(
        "inspect",
        "inspect-ai==0.3.285 anyio",
        3,
        ("run_inspect",),
        (*REFERENCE, "--without", NEEDS_LIST),
    ),
    _DEEPAGENTS,
    _on_reference(_DEEPAGENTS, 82),
    _adapter("deepagents-0.6", f"deepagents==0.6.12 {_LANGCHAIN}", 89, "suite_deepagents", _AUTO),
    _OPENHANDS,
    _on_reference(_OPENHANDS, 5),
    _FSSPEC,
    _on_reference(_FSSPEC, 137),
    Row("fsspec", "fsspec==2026.9.0", 6, ("run_fsspec",)),
    _adapter("fsspec-2026.6", "fsspec==2026.6.0", 137, "suite_fsspec"),
    _OPENAI,
    _on_reference(_OPENAI, 10),
    _HARBOR,
    _on_reference(_HARBOR, 3),
    _TRIAL,
    _PYDANTIC,
    Row("pydantic-ai", "pydantic-ai-slim==2.66.0 anyio", 4, ("run_pydantic_ai",)),
    _on_reference(_PYDANTIC, 36, f"{NEEDS_LINKS} {NEEDS_ORDINARY_USER}"),
    _MINI,
    _on_reference(_MINI, 6),
    _adapter("mini-swe-agent-2.4", "mini-swe-agent==2.4.0", 6, "run_mini_swe_agent"),
    _CLAUDE,
    _on_reference(_CLAUDE, 37, NEEDS_GLOB),
    _adapter("claude-managed-agents-2.0", "anthropic==2.0.0", 46, "run_claude_managed_agents"),
    _REX,
    _on_reference(_REX, 6, NEEDS_DESCENDANTS),
    Row("jupyter", "ipython==9.18.1 ipykernel==7.4.0 nbclient==0.11.0", 9, ("run_jupyter",)),
    Row("jupyter-8", "ipython==8.18.0 ipykernel==6.29.0 nbclient==0.11.0", 9, ("run_jupyter",)),
    Row("mcp", "mcp==2.3.0", 26, ("run_mcp", "run_mcp_hostile")),
    Row("mcp", "mcp==2.3.0", 1, ("run_mcp_codex",)),
    Row("mcp", "mcp==2.3.0", 1, ("run_mcp_claude",)),
    Row("cloud-agents", "openai==3.51.0", 98, ("run_cloud_agents",)),
    Row("cloud-agents", "openai==3.51.0", 7, ("run_cloud_agents_codex",)),
)


class Environments:
    """The virtual environments of the frameworks."""

    def __init__(self, python: str) -> None:
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        named = os.environ.get("EXEC_SERVER_ADAPTERS")
        self.folder = Path(named) if named else default / "exec-server-adapters"
        self.folder.mkdir(parents=True, exist_ok=True)
        # Any `claude` of the machine, or one that only these tests use.
        self.claude_folder = self.folder / "claude-code"
        found = shutil.which("claude")
        self.claude = Path(found or self.claude_folder / "node_modules/.bin/claude")
        # That of the machine, or the one that the reference brings along.
        bwrap = shutil.which("bwrap") or next(
            map(str, reference_files("codex-resources/bwrap")), ""
        )
        self.bubblewrap = Path(bwrap) if bwrap else None
        self._python = python
        self._uv = self.folder / "tools/bin/uv"

    def install_tools(self) -> bool:
        """Whether uv is there, or could be installed."""
        if self._uv.exists():
            return True
        tools = self.folder / "tools"
        return _succeeds(self._python, "-m", "venv", str(tools)) and _succeeds(
            str(tools / "bin/pip"), "install", "--quiet", "uv"
        )

    def install(self, row: Row) -> bool:
        """Make the environment of a row, unless it is there; false if the index lacks it."""
        venv = self.folder / row.name
        pyproject = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
        wanted = f"{self._python} {row.requirements} {pyproject} {ROOT}"
        stamp = venv / "installed"
        if stamp.exists() and stamp.read_text() == wanted:
            return True
        uv, python = str(self._uv), str(venv / "bin/python")
        packages = [*row.requirements.split(), "pytest>=8.3", "--editable", str(ROOT)]
        if not _succeeds(uv, "venv", "--quiet", "--clear", "--python", self._python, str(venv)):
            return False
        if not _succeeds(uv, "pip", "install", "--quiet", "--python", python, *packages):
            return False
        stamp.write_text(wanted)
        return True


def _succeeds(*argv: str) -> bool:
    return subprocess.run(argv, check=False, cwd=ROOT).returncode == 0


def run(environments: Environments, row: Row) -> str:
    """Run a row; returns its log if it fails."""
    python = environments.folder / row.name / "bin/python"
    argv = [str(python), "-m", "pytest", "-c", "/dev/null", "--rootdir", TESTS]
    argv += ["--confcutdir", TESTS, "-p", "no:cacheprovider", "-q", *row.flags]
    argv += [f"{TESTS}/{name}" if "::" in name else f"{TESTS}/{name}.py" for name in row.modules]
    programs = {
        "EXEC_SERVER_CLAUDE": str(environments.claude),
        "EXEC_SERVER_BUBBLEWRAP": str(environments.bubblewrap),
    }
    try:
        ended = subprocess.run(
            argv,
            cwd=ROOT,
            env=os.environ | VARIABLES | programs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ROW_SECONDS,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return f"{late.output or ''}\nadapters: {row.title}: failed, it takes {ROW_SECONDS} s"
    last = ended.stdout.rstrip().rpartition("\n")[2]
    passed = re.match(r"(\d+) passed(, \d+ (warnings?|deselected))* in ", last)
    if passed is None or int(passed[1]) != row.tests or ended.returncode:
        return f"{ended.stdout}\nadapters: {row.title}: failed, {row.tests} tests should pass"
    print(f"adapters: {row.title}: {last}", flush=True)
    return ""


def _fails(environments: Environments, row: Row) -> bool:
    """Run a row and print its log if it fails."""
    if log := run(environments, row):
        print(log, flush=True)
    return bool(log)


def run_framework(environments: Environments, rows: Iterable[Row]) -> list[Row]:
    """Run the rows of one framework; returns those that failed."""
    failed = []
    for row in rows:
        if row.needs_reference and not has_reference():
            print(f"adapters: {row.title} is skipped, because it is not installed", flush=True)
        elif row.needs_claude and not environments.claude.exists():
            words = f"npm install --prefix {environments.claude_folder} @anthropic-ai/claude-code"
            print(f"adapters: {row.title} is skipped, because it is not installed: {words}")
        elif row.needs_own_root and not can_have_own_root():
            words = "a trial needs tmux, and a mount namespace that this machine does not allow"
            print(f"adapters: {row.title} is skipped in part: {words}", flush=True)
        elif row.needs_bubblewrap and environments.bubblewrap is None:
            words = "because bubblewrap is not installed"
            print(f"adapters: {row.title} is skipped, {words}", flush=True)
        elif not environments.install(row):
            words = f"because the index does not have {row.requirements}"
            print(f"adapters: {row.title} is skipped, {words}", flush=True)
        elif _fails(environments, row):
            failed.append(row)
    return failed


def has_reference() -> bool:
    return any(reference_files("bin/codex"))


def reference_files(name: str) -> Iterator[Path]:
    """The files of this name in the package of the reference, or beside the one that is chosen."""
    if chosen := os.environ.get("EXEC_SERVER_REFERENCE"):
        found = [Path(chosen) if name == "bin/codex" else Path(chosen).parents[1] / name]
        return (path for path in found if path.exists())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache.glob(f"exec-server-reference/node_modules/@openai/codex-*/vendor/*/{name}")


def can_have_own_root() -> bool:
    """Whether tests/adapters/private_root.sh works here, as it does not in some containers."""
    with tempfile.TemporaryDirectory() as folder:
        argv = ["sh", str(ROOT / TESTS / "private_root.sh"), folder, "true"]
        ended = subprocess.run(argv, check=False, capture_output=True)
    return shutil.which("tmux") is not None and ended.returncode == 0


def main() -> int:
    words = sys.argv[1:]
    is_install = words[:1] == ["--install"]
    python, *names = words[is_install:]
    environments = Environments(python)
    if not environments.install_tools():
        print("adapters: skipped, because uv cannot be installed")
        return 0
    rows = [row for row in ROWS if not names or row.name in names]
    if is_install:
        for row in {row.name: row for row in rows}.values():
            environments.install(row)  # one that the index lacks is mentioned when it is tried
        return 0
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.framework, []).append(row)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(lambda rows: run_framework(environments, rows), groups.values())
        failed = [row for rows in results for row in rows]
    if failed and os.environ.get("CI"):
        # As in run-pytest.sh: a machine that pauses for seconds can fail a test that is right.
        print("adapters: the failed suites once more, alone", flush=True)
        failed = [row for row in failed if _fails(environments, row)]
    if failed:
        print(f"adapters: failed: {', '.join(row.title for row in failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
