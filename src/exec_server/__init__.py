"""A daemon that runs processes and file operations for a coding agent."""

__version__ = "0.1.0"
