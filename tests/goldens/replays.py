"""Every module that registers replays."""

import goldens.averages
import goldens.entropy
import goldens.further_losses
import goldens.further_rewards
import goldens.kl
import goldens.normalization
import goldens.off_policy
import goldens.outcome
import goldens.pipeline
import goldens.policy
import goldens.ppo_pipelines
import goldens.pull_requests
import goldens.shaping
import goldens.special_losses
import goldens.token_advantages

__all__ = ["goldens"]
