"""Pure functions on ``[B, T]`` tensors that compute the training signal."""
