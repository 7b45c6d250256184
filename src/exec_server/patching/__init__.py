"""Changes of text files: exact edits, unified diffs and patches in the format of Codex. Pure.

Hand-written because unidiff only parses, and whatthepatch applies unified diffs at their exact
lines; no library has the format of Codex.
"""
