"""Transfers of files and trees between this machine and the server's."""
