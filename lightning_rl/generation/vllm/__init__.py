"""Engines on vLLM, in this process or on servers."""
