"""WebSockets (RFC 6455): frames, handshake, server and client."""
