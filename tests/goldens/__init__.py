"""Recorded calls of other systems, replayed with our functions: ``pytest tests/test_goldens.py``."""
