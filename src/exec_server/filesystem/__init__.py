"""File operations of this machine, one module per concern."""
