"""The real client of a version with a scripted model: what works with a server.

The sessions say only what every version means: no texts of a single version, and no features that
some of them lack. A session has several checks, because starting a client takes a second.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.conformance.codex import Codex, appears, command, patch, report, start_codex, write
from tests.conformance.model import Model, Step, ToolCall
from tests.conformance.proxy import Proxy
from tests.support.client import descendants, survivors
from tests.support.pictures import PICTURE
from tests.support.server_internals import is_kept_for_later
from tests.versions import places

Check = Callable[[Model, Path], None]

# Versions that do not know a model offer it no patches, and none of them knows all models.
_NEW_MODEL, _OLD_MODEL = "gpt-5.5", "gpt-5.4"
_OLD_MODEL_UNTIL = (0, 125)
_BURST_LINES = 300_000
_OUTSIDE = "/etc/exec-server-versions"
# Clients that do not reconnect wait forever for the end of their command.
_RECONNECTION_SECONDS = 12.0


@dataclass(frozen=True)
class Session:
    """A script for the model, and what has to be true after it."""

    script: tuple[Step, ...]
    checks: dict[str, Check]
    sandbox: str = "danger-full-access"


def _text(model: Model, call: str) -> str:
    assert call in model.outputs, f"no answer to {call}"
    return model.outputs[call]


def _expect(model: Model, call: str, *parts: str) -> None:
    text = _text(model, call)
    for part in parts:
        assert part in text, f"no {part!r} in {text[-300:]!r}"


def _commands(model: Model, folder: Path) -> None:
    _expect(model, "both", "exited with code 3", "out\n", "err\n")
    _expect(model, "where", f"{folder}\nend of input\n")
    killed = _text(model, "signal")
    assert "exited with code 137" in killed or "exited with code -1" in killed, killed
    _expect(model, "bytes", "ü\ufffd")


def _terminal(model: Model, folder: Path) -> None:
    _expect(model, "typed", "exited with code 4", "hi Ann")


def _burst(model: Model, folder: Path) -> None:
    # The client counts four bytes as a token, and shows the ends. On a busy machine some versions
    # drop a part themselves, of output that they have received: two of three must be whole.
    size = len("".join(f"{n}\n" for n in range(1, _BURST_LINES + 1)))
    texts = [_text(model, call.id) for call in _BURSTS]
    tokens = [report(text).tokens or 0 for text in texts]
    whole = [
        text
        for text, count in zip(texts, tokens, strict=True)
        if count >= size // 4 and "\n1\n2\n3\n" in text and text.endswith(f"\n{_BURST_LINES}\n")
    ]
    assert len(whole) >= 2, f"{tokens} tokens instead of {size // 4}"


def _patches(model: Model, folder: Path) -> None:
    _expect(model, "patch", "Success. Updated the following files")
    assert (folder / "new/added.txt").read_text() == "hello\n"
    assert (folder / "update.txt").read_text() == "one\n2\nthree\n"
    assert not (folder / "delete.txt").exists()


def _image(model: Model, folder: Path) -> None:
    assert model.images.get("image", "").endswith(base64.b64encode(PICTURE).decode()), (
        f"no image: {model.outputs.get('image', '')[-300:]!r}"
    )


def _project(model: Model, folder: Path) -> None:
    assert "Whistle while you work." in model.instructions, "AGENTS.md is not in the instructions"


def _confined_commands(model: Model, folder: Path) -> None:
    assert (folder / "inside.txt").exists(), _text(model, "inside")[-300:]
    assert not (folder / ".git/hooked").exists(), ".git is writable"
    assert not Path(_OUTSIDE).exists(), "the outside is writable"


def _confined_patches(model: Model, folder: Path) -> None:
    _patches(model, folder)
    assert "Success" not in _text(model, "escape")
    assert not Path(_OUTSIDE).exists(), "the outside is writable"


def _read_only(model: Model, folder: Path) -> None:
    _expect(model, "read", "one")
    assert not (folder / "new.txt").exists(), "the workspace is writable"
    assert (folder / "update.txt").read_text() == "one\ntwo\nthree\n"


_PATCH = patch(
    "patch",
    *("*** Add File: new/added.txt", "+hello"),
    *("*** Update File: update.txt", "@@", " one", "-two", "+2", " three"),
    "*** Delete File: delete.txt",
)
_IMAGE = ToolCall("image", "view_image", {"path": "image.png"})
_BURSTS = [command(f"burst-{n}", f"seq 1 {_BURST_LINES}", max_output_tokens=100) for n in (1, 2, 3)]

SESSIONS = (
    Session(
        (
            [command("both", "echo out; sleep 0.1; echo err >&2; exit 3")],
            [command("where", "pwd; cat; echo end of input")],
            [command("signal", "kill -9 $$"), command("bytes", r"printf 'ü\xff'")],
            [command("ask", "read a; echo hi $a; exit 4", tty=True, yield_time_ms=1000)],
            write("typed", "ask", "Ann\n"),
            *([burst] for burst in _BURSTS),
            [_PATCH],
            [_IMAGE],
            [command("left", "echo ready; sleep 1000", yield_time_ms=1000)],
        ),
        {
            "commands": _commands,
            "terminal": _terminal,
            "burst": _burst,
            "patches": _patches,
            "image": _image,
            "project files": _project,
        },
    ),
    Session(
        (
            [command("inside", "echo new > inside.txt")],
            [command("git", "touch .git/hooked")],
            [command("outside", f"touch {_OUTSIDE}")],
            [_PATCH],
            [patch("escape", f"*** Add File: {_OUTSIDE}", "+first")],
            [_IMAGE],
        ),
        {
            "confined commands": _confined_commands,
            "confined patches": _confined_patches,
            "confined image": _image,
        },
        sandbox="workspace-write",
    ),
    Session(
        (
            [command("read", "cat update.txt")],
            [command("write", "touch new.txt")],
            [_PATCH],
            [_IMAGE],
        ),
        {"read-only": _read_only, "read-only image": _image},
        sandbox="read-only",
    ),
)
RECONNECTION = "lost connection"
NAMES = (*(name for session in SESSIONS for name in session.checks), RECONNECTION, "clean end")


def play(kind: str, version: str) -> dict[str, str]:
    """Play all sessions with a server; returns the reason of each check that failed."""
    failures: dict[str, str] = {}
    for session in SESSIONS:
        failures |= _play(session, kind, version)
    return failures | _attempt(RECONNECTION, lambda: _reconnect(kind, version))


def _play(session: Session, kind: str, version: str) -> dict[str, str]:
    with places.folder() as folder, places.server(kind, folder) as server:
        _furnish(folder)
        models: list[Model] = []

        def converse() -> None:
            before = descendants(server.process.pid).items()
            with start_codex(
                session.script,
                folder,
                url=server.url,
                sandbox=session.sandbox,
                name=_model(version),
            ) as client:
                models.append(client.model)
                _finish(client)
            started = dict(descendants(server.process.pid).items() - before)
            left = survivors({pid: at for pid, at in started.items() if not is_kept_for_later(pid)})
            assert not left, f"processes left behind: {left}"

        failures = _attempt("clean end", converse)
        for name, check in session.checks.items():
            failures |= _attempt(name, partial(check, models[0], folder))
        return failures


def _reconnect(kind: str, version: str) -> None:
    lines = "for i in 1 2 3 4 5 6 7 8; do echo line-$i; touch mark-$i; sleep 0.1; done; exit 5"
    script: list[Step] = [[command("cut", lines)], [command("next", "echo after")]]
    with (
        places.folder() as folder,
        places.server(kind, folder) as server,
        Proxy(server.url) as proxy,
        start_codex(script, folder, url=proxy.url, name=_model(version)) as client,
    ):
        appears(folder / "mark-3")
        proxy.cut()
        _finish(client, _RECONNECTION_SECONDS)
        _expect(client.model, "cut", "exited with code 5", *(f"line-{n}\n" for n in range(1, 9)))
        _expect(client.model, "next", "after\n")


def _finish(client: Codex, seconds: float = 45.0) -> None:
    events = client.finish(seconds)
    assert client.process.returncode == 0, client.errors()[-300:]
    assert events[-1]["type"] == "turn.completed", str(events[-1])[-300:]


def _furnish(folder: Path) -> None:
    if os.geteuid() == 0:
        Path(_OUTSIDE).unlink(missing_ok=True)  # of an earlier run that failed
    (folder / ".git").mkdir()
    (folder / "AGENTS.md").write_text("Whistle while you work.\n")
    (folder / "update.txt").write_text("one\ntwo\nthree\n")
    (folder / "delete.txt").write_text("x\n")
    (folder / "image.png").write_bytes(PICTURE)


def _attempt(name: str, work: Callable[[], None]) -> dict[str, str]:
    try:
        work()
    except (AssertionError, OSError, KeyError) as problem:
        return {name: " ".join(str(problem).split())[:300] or repr(problem)}
    return {}


def _model(version: str) -> str:
    major, minor, _ = version.split(".")
    return _OLD_MODEL if (int(major), int(minor)) < _OLD_MODEL_UNTIL else _NEW_MODEL
