"""One function per method, one module per family."""
