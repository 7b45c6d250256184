"""Comments and docstrings are plain engineering English, as far as that can be counted.

Free relatives ("what has come") and actors without a name ("somebody") make a reader decode a
sentence. Both are rare in the prose of well-kept projects; the limits leave room for real uses.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_COLUMNS = 100
# Occurrences per 1,000 words.
LIMITS = {r"\bwhat(?:ever)?\b": 6.0, r"\b(?:nobody|somebody|anybody|whoever)\b": 0.5}


@functools.cache
def _folder_prose(folder: str) -> str:
    """The comments and docstrings of all modules in a folder."""
    return "\n".join(_prose(path) for path in sorted((ROOT / folder).rglob("*.py")))


def _prose(path: Path) -> str:
    """The comments and docstrings of a module."""
    source = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(ast.get_docstring(node) or "")
    return "\n".join(found)


@pytest.mark.parametrize("folder", ["src", "tests/support"])
@pytest.mark.parametrize("pattern", LIMITS, ids=["what", "nobody"])
def test_prose_names_its_subjects(folder: str, pattern: str) -> None:
    text = _folder_prose(folder)
    words = len(re.findall(r"[A-Za-z']+", text))
    assert words > 1_000
    found = len(re.findall(pattern, text, re.IGNORECASE))
    assert 1_000 * found / words <= LIMITS[pattern]


def _wrapped_lines(document: Path) -> list[str]:
    """Lines of a document outside code blocks and tables, which cannot be wrapped."""
    lines, in_code = [], False
    for line in document.read_text().splitlines():
        in_code ^= line.lstrip().startswith("```")
        if not in_code and not line.lstrip().startswith(("|", "```")):
            lines.append(line)
    return lines


@pytest.mark.parametrize("document", sorted(ROOT.glob("docs/*.md")), ids=lambda path: path.name)
def test_documents_are_wrapped(document: Path) -> None:
    assert [line for line in _wrapped_lines(document) if len(line) > MAX_COLUMNS] == []
