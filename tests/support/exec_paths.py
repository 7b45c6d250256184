"""Runs `exec-server` with or without its shortcut: `python -m tests.support.exec_paths PATH WORDS`.

PATH is `quick` or `whole`. The file named by EXEC_PATH_TAKEN is created if the command has taken
the whole path, which imports asyncio.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from exec_server.cli.commands.table import COMMANDS
from exec_server.cli.main import main

_leave = os._exit


def _exit(code: int) -> NoReturn:
    if "asyncio" in sys.modules:
        Path(os.environ["EXEC_PATH_TAKEN"]).touch()
    _leave(code)


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        COMMANDS["exec"].shortcut = None
    del sys.argv[1]
    os._exit = _exit  # type: ignore[assignment]
    main()
