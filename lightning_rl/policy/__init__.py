"""Policy, critic and reference: log-probabilities and values of action tokens from a transformers model."""

from lightning_rl.corrections import Outputs
from lightning_rl.policy.model import FrozenModel, PolicyModel
from lightning_rl.policy.model_options import ModelOptions
from lightning_rl.policy.packing import Layout, pack
from lightning_rl.policy.plan import Microbatch, Plan, make_plan

__all__ = ["FrozenModel", "Layout", "Microbatch", "ModelOptions", "Outputs", "Plan", "PolicyModel", "make_plan", "pack"]
