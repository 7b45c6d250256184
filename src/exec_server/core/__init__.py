"""The work itself: processes, terminals and files of this machine."""
