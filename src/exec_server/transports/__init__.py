"""Message streams over something real."""
