"""The processes that confine: building views, dropping privileges, running commands."""
