"""Evaluation: prompts whose samples measure the policy without training it."""

from lightning_rl.evaluation.evaluation import Evaluation

__all__ = ["Evaluation"]
