"""Confines processes and file operations by means of the kernel; begin with `sandboxes`."""
