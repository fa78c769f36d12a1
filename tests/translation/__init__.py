"""Comparison with TRL, which is installed in a separate environment."""
