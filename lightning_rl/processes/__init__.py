"""Processes for user code: workers with deadlines that are killed with all that they started, and time limits here."""
