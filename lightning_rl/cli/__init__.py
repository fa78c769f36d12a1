"""Command-line interface ``lightning-rl``."""
