"""Adapters in their frameworks: foreign suites and runs with scripted models (make adapters)."""
