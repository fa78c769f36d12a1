"""Transfer of weights from the trainer to an engine: stream, sync, canary and files."""
