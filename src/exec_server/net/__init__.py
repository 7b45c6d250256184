"""Message streams over sockets, pipes and relays; nothing here knows a method."""
