"""The commands that serve clients: `serve`, `forward` and `up`."""
