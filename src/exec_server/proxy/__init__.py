"""The managed network: the proxies of a process, and the rules by which they let it out."""
