"""Steps that make a rollout (prefetch, sample, logprobs, signal), and the run state between them."""
