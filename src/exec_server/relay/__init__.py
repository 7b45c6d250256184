"""The encrypted relay without a socket: frames, handshake, records, streams."""
