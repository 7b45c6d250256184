"""The exec-server command."""
