"""The parts of `exec_server.jupyter` that need no IPython."""
