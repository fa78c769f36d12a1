"""Recorded calls of other systems, replayed with our functions: ``python -m tests.goldens FOLDER``."""
