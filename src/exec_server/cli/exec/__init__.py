"""The commands that run commands on a target: `exec`, `shell`, detached ones, `port`."""
