"""The stages of a rollout, each a function of the one before: draw, score, signal, update; and the checks at setup."""
