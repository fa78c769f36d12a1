"""Shared code of tests: tiny policies, scripted servers, processes as ranks."""
