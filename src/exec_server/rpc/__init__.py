"""From message to method: connections, sessions and the method table."""
