"""A command as on another system: `python -m tests.support.command_elsewhere SYSTEM WORDS`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from tests.support import other_system


def main() -> None:
    system, *words = sys.argv[1:]
    other_system.install(system)
    from exec_server.cli.main import main as run_command

    genuine_exit = os._exit

    def checked_exit(status: int) -> NoReturn:
        other_system.check_no_linux_part()
        genuine_exit(status)

    os._exit = checked_exit
    sys.argv = ["exec-server", *words]
    run_command()


if __name__ == "__main__":
    main()
