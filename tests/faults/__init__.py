"""Quiet faults and the command that puts each into a fit: ``python -m tests.faults``."""
