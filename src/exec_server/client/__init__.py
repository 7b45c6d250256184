"""The client: dialers that open a connection to a server, and sessions that outlive it."""
