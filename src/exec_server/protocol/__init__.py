"""What is on the wire: frozen structs and pure functions."""
