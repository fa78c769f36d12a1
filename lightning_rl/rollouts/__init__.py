"""Steps that make a rollout (collect, logprobs, signal), and the run state between them."""
