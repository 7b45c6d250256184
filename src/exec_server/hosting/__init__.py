"""The hosted service: a registry and rendezvous of one's own, as one command on one port."""
