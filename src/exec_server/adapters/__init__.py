"""Adapters for agent frameworks, one module each; importing one needs its framework's extra."""
