"""The machinery of the client: connections, sessions, flow control, recovery."""
