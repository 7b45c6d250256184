"""Imports modules as on another system: `python -m tests.support.import_elsewhere SYSTEM NAMES`.

A package is imported with all modules below it. Prints the modules that need another system.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

from tests.support import other_system


def main() -> None:
    system, *names = sys.argv[1:]
    other_system.install(system)
    for name in names:
        package = import_module(name)
        for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            try:
                import_module(module.name)
            except (ImportError, AttributeError):
                print(module.name)
    other_system.check_no_linux_part()


if __name__ == "__main__":
    main()
