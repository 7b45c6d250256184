"""Exchanges that our server and the reference both have to pass."""
