"""Every Codex since the first exec-server, both ways: see `python -m tests.versions --help`."""
