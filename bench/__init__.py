"""Measures this server and the reference side by side, over the wire, in one run."""
