"""Weights on their way from the trainer to an engine: the stream, the sync, the canary that proves it, files."""
