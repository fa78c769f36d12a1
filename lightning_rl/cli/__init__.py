"""The command ``lightning-rl``."""
