"""The registry as its clients see it: HTTP requests, and what proves who is asking."""
