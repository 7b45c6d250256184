"""Plays published versions of Codex with our server, and our client with their servers."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.versions import client_sessions, installed, matrix, server_checks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="default: all generations")
    parser.add_argument("--few", action="store_true", help="three versions, for a quick look")
    parser.add_argument(
        "--skip-missing", action="store_true", help="leave out versions that cannot be installed"
    )
    arguments = parser.parse_args()
    chosen = arguments.versions or (installed.FEW if arguments.few else installed.GENERATIONS)
    rows = []
    for version in chosen:
        began = time.monotonic()
        try:
            program = installed.install(version)
        except OSError as problem:
            print(problem, file=sys.stderr)
            if arguments.skip_missing:
                continue
            return 1
        rows.append(row := _try(version, program))
        print(f"{version}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        for line in matrix.reasons(row):
            print(f"  {line}", file=sys.stderr)
    print("\n".join(matrix.table(rows)))
    return 0 if all(row.is_good for row in rows) else 1


def _try(version: str, program: Path) -> matrix.Row:
    # Its own server and ours at the same time: most of the time is waiting.
    with installed.as_reference(program), ThreadPoolExecutor(2) as threads:
        own = threads.submit(client_sessions.play, "reference", version)
        ours = threads.submit(client_sessions.play, "ours", version)
        with_own, with_ours = own.result(), ours.result()
        return matrix.Row(version, with_own, with_ours, *server_checks.check("reference"))


if __name__ == "__main__":
    sys.exit(main())
