"""Requests to a registry over HTTP, and the credentials for them."""
