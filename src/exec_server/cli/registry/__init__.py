"""`exec-server registry`: run a registry, and administer its database."""
