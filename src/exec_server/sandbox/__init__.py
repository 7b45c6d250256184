"""Confines processes and file operations with namespaces, Landlock and seccomp.

Begin with `sandboxes`.
"""
