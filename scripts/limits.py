"""Writes docs/limits.md: every numeric limit of the program, from the constants and their comments.

python scripts/limits.py           rewrite the document
python scripts/limits.py --check   only compare; exit status 1 if it is out of date

A limit is a public UPPER_CASE constant at the top level of a module, a decimal number, with a
comment: above it, behind it, or above the constants directly before it. Numbers of the kernel and
of protocols have no such comment, or are hexadecimal.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "exec_server"
DOCUMENT = ROOT / "docs" / "limits.md"
HEAD = """# Limits

Every queue, buffer, cache and table has a limit, and every wait has an end. A limit is a constant
at the top of the module that enforces it; its comment says why it has this value and what happens
beyond it. `make limits` writes this document from the code, and a test compares the two.
"""

_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_OTHER_BASE = re.compile(r"\b0[xob]")
_KIB, _MIB, _GIB = 1024, 1024**2, 1024**3


@dataclass(frozen=True)
class Limit:
    """One constant: its name, its value and the comment that explains it."""

    name: str
    value: float
    reason: str


def limits(text: str) -> Iterator[Limit]:
    """The limits of a module, in the order of its source."""
    lines = text.splitlines()
    numbers: dict[str, float] = {}
    above, last_line = "", -1
    for node in ast.parse(text).body:
        name, value = _assignment(node)
        if not _NAME.fullmatch(name) or value is None:
            continue
        number = _number(value, numbers)
        if number is None or _OTHER_BASE.search(ast.get_source_segment(text, value) or ""):
            continue
        numbers[name] = number
        comment = _comment_above(lines, node.lineno - 2)
        behind = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
        if comment or node.lineno - 1 != last_line:
            above = comment
        last_line = node.end_lineno or node.lineno
        reason = " ".join(part for part in (above, behind) if part)
        if reason:
            yield Limit(name, number, reason)


def _assignment(node: ast.stmt) -> tuple[str, ast.expr | None]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return "", None


def _number(node: ast.expr, known: dict[str, float]) -> float | None:
    """The value of an arithmetic expression over numbers and constants before it."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id not in known:
            return None
        if isinstance(part, ast.Constant) and (
            isinstance(part.value, bool) or not isinstance(part.value, int | float)
        ):
            return None
        allowed = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)
        if not isinstance(part, (*allowed, ast.Name, ast.expr_context)):
            return None
    value = eval(compile(ast.Expression(node), "constant", "eval"), {}, dict(known))
    assert isinstance(value, int | float)
    return value


def _comment_above(lines: list[str], index: int) -> str:
    comment: list[str] = []
    while index >= 0 and lines[index].startswith("#"):
        comment.insert(0, lines[index].removeprefix("#").strip())
        index -= 1
    return " ".join(comment)


def shown(limit: Limit) -> str:
    """The value as people read it: with the unit that the name of the constant ends in."""
    value = limit.value
    if "BYTES" in limit.name:
        for size, unit in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
            if value >= size and value % size == 0:
                return f"{value // size:,.0f} {unit}"
        return f"{value:,.0f} bytes"
    if limit.name.endswith("SECONDS"):
        return f"{value:g} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def document() -> str:
    """The whole document as it has to be: a table for each package."""
    tables: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package, _, module = path.relative_to(PACKAGE).with_suffix("").as_posix().rpartition("/")
        for limit in limits(path.read_text()):
            cells = (module, f"`{limit.name}`", shown(limit), limit.reason.replace("|", "\\|"))
            tables.setdefault(package, []).append(f"| {' | '.join(cells)} |\n")
    parts = [HEAD]
    for package, rows in sorted(tables.items()):
        parts.append(f"\n## {package or 'exec_server'}\n\n")
        parts.append("| module | limit | value | reason |\n|---|---|---|---|\n")
        parts += rows
    return "".join(parts)


def main() -> int:
    """Rewrite or compare; returns the exit status."""
    wanted = document()
    if "--check" in sys.argv[1:]:
        return 0 if DOCUMENT.read_text() == wanted else 1
    DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
