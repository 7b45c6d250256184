"""Files that Codex keeps on this machine: layers of configuration, skills, plugins."""
