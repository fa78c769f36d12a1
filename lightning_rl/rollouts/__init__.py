"""What makes a rollout, one file for each step: sample, prefetch, logprobs, signal; and the state of a run between."""
