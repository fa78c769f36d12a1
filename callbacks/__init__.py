"""Corrections: each one idea, one file, switched on by adding it to ``Trainer(callbacks=[...])``."""

from lightning_rl.callbacks.no_eos_mask import NoEOSMask
from lightning_rl.callbacks.off_policy_is import OffPolicyIS
from lightning_rl.callbacks.opsm import OPSM
from lightning_rl.callbacks.reference_kl import ReferenceKL
from lightning_rl.callbacks.rollout_kl import RolloutKL

__all__ = ["OPSM", "NoEOSMask", "OffPolicyIS", "ReferenceKL", "RolloutKL"]
