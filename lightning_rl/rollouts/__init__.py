"""Steps that make a rollout (collect, logprobs, signal), and the progress between them."""
