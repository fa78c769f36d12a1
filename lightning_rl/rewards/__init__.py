"""Verifiable rewards: functions of completions, called on each rank for its own rows after generation."""

from lightning_rl.rewards.scoring import Reward, RewardCall, Rewards, RewardSource, Scores

__all__ = ["Reward", "RewardCall", "RewardSource", "Rewards", "Scores"]
