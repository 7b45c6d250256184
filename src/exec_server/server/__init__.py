"""From message to method: connections, sessions, handlers and the method table."""
