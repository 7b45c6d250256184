"""`exec-server sandbox`: test the sandbox of this machine."""
