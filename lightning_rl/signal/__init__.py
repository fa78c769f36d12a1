"""Pure functions on ``[B, T]`` tensors: the mathematics of the training signal, without a model, a trainer or a log."""
