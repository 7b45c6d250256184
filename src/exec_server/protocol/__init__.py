"""The wire protocol: frozen structs and pure functions."""
