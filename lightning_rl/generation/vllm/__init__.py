"""Engines on vLLM: in this process, or on servers of their own."""
