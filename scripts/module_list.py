"""Writes the list of modules in docs/architecture.md from the docstrings of the modules.

python scripts/module_list.py           rewrite the list
python scripts/module_list.py --check   only compare; exit status 1 if it is out of date
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.layers import layer_of  # noqa: E402

PACKAGE = ROOT / "src" / "exec_server"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: make module-list -->\n", "<!-- end of modules -->\n"
COLUMNS = 100


def _summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def _entry(path: Path) -> str:
    text = f"- `{path.stem}`: {_summary(path)}"
    return textwrap.fill(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def _package(folder: Path) -> list[str]:
    """The lines about one folder and the folders below it."""
    name = folder.relative_to(PACKAGE).as_posix()
    heading = f"**`{name}/`** {_summary(folder / '__init__.py')}"
    lines = ["", textwrap.fill(heading, COLUMNS, break_on_hyphens=False), ""]
    lines += [_entry(path) for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    for inner in sorted(folder.iterdir()):
        if (inner / "__init__.py").exists():
            lines += _package(inner)
    return lines


def module_list() -> str:
    """The list as it has to be in the document."""
    layers: dict[int, list[str]] = {}
    for path in sorted(PACKAGE.iterdir()):
        if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem[0] != "_"):
            layers.setdefault(layer_of(path.stem).number, []).append(path.stem)
    lines: list[str] = []
    for number, packages in sorted(layers.items(), reverse=True):
        lines += ["", f"### Layer {number}: {', '.join(packages)}"]
        for package in packages:
            if (PACKAGE / package).is_dir():
                lines += _package(PACKAGE / package)
            else:
                lines += ["", _entry(PACKAGE / f"{package}.py")]
    return "\n".join(lines).lstrip("\n") + "\n\n"


def updated(document: str) -> str:
    """The document with the list of today."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT} has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{module_list()}{end}{after}"


def main() -> int:
    """Rewrite or compare; returns the exit status."""
    document = DOCUMENT.read_text()
    wanted = updated(document)
    if "--check" in sys.argv[1:]:
        return 0 if document == wanted else 1
    DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
