"""Verifiable rewards: functions of completions, called on each rank for its own rows after generation."""

from lightning_rl.rewards.scoring import Reward, Rewards, Scores

__all__ = ["Reward", "Rewards", "Scores"]
