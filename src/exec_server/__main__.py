"""python -m exec_server"""

import sys
from os import getcwd  # the interpreter has loaded both

# The directory in which `python -m` is typed is often a workspace, from which nothing is imported.
# This is before the first import, that of `__future__` included, which any file there could be.
if not sys.flags.safe_path and sys.path[0] in ("", getcwd()):
    del sys.path[0]

from exec_server.cli.main import main

main()
