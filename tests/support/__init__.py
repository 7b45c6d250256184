"""Shared by tests: servers, clients, peers and terminals."""
