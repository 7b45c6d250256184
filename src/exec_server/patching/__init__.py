"""Changes of text files: exact edits, unified diffs and patches in the format of Codex. Pure."""
