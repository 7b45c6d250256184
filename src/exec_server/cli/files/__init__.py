"""The commands for files of a target, from `cp` to `watch`."""
