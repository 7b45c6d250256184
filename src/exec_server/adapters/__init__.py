"""Environments for agent frameworks, one module for each; docs/adapters.md describes them.

Nothing is imported here: a module needs its framework, which an extra of the package installs.
"""
