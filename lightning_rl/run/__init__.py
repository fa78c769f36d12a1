"""Typed parts of a run, the training of its rollouts, and the callbacks and estimates that read it."""
