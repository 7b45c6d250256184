"""Processes of this machine: start them, follow them, end them with all their descendants."""
