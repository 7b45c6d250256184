"""The meaning of a sandbox policy, computed without I/O."""
