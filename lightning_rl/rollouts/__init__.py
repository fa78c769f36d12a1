"""Steps that make a rollout (prefetch, sample, logprobs, signal), and the progress between them."""
