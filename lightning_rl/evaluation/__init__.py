"""Evaluation: prompts whose samples measure the policy and never train it."""

from lightning_rl.evaluation.evaluation import Evaluation

__all__ = ["Evaluation"]
