"""Advantage estimators: small frozen objects, registered by name."""

from lightning_rl.advantages.estimator import (
    Advantages,
    Estimator,
    FunctionEstimator,
    RewardSignal,
    RowEstimator,
    RowFunction,
)
from lightning_rl.advantages.gae import GAE
from lightning_rl.advantages.gae_over_turns import GAEOverTurns
from lightning_rl.advantages.gpg import GPG
from lightning_rl.advantages.group_relative import GRPO, RLOO, DrGRPO, MaxRL
from lightning_rl.advantages.hierarchical import HierarchicalGRPO
from lightning_rl.advantages.normalized import Level, Normalized
from lightning_rl.advantages.opo import OPO
from lightning_rl.advantages.optimal_token_baseline import OptimalTokenBaseline
from lightning_rl.advantages.pass_at_k import PassAtK
from lightning_rl.advantages.raw_reward import RawReward
from lightning_rl.advantages.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from lightning_rl.advantages.remax import ReMax
from lightning_rl.advantages.trace_decay import LengthAdaptive, RelativePosition, TraceDecay

__all__ = [
    "ESTIMATORS",
    "GAE",
    "GPG",
    "GRPO",
    "OPO",
    "RLOO",
    "Advantages",
    "DrGRPO",
    "Estimator",
    "FunctionEstimator",
    "GAEOverTurns",
    "HierarchicalGRPO",
    "LengthAdaptive",
    "Level",
    "MaxRL",
    "Normalized",
    "OptimalTokenBaseline",
    "PassAtK",
    "RawReward",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "RelativePosition",
    "RewardSignal",
    "RowEstimator",
    "RowFunction",
    "TraceDecay",
    "resolve_advantages",
]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": GRPO(),
    "dr_grpo": DrGRPO(),
    "rloo": RLOO(),
    "maxrl": MaxRL(),
    "hierarchical_grpo": HierarchicalGRPO(),
    "opo": OPO(),
    "reinforce": RawReward(),
    "reinforce_plus_plus": ReinforcePlusPlus(),
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline(),
    "remax": ReMax(),
    "gae": GAE(),
    "gae_over_turns": GAEOverTurns(),
    "gpg": GPG(),
    "pass_at_k": PassAtK(),
    "optimal_token_baseline": OptimalTokenBaseline(),
}


def resolve_advantages(advantages: Estimator | RowFunction | str) -> Estimator:
    """Return the estimator for an object, a function or a registered name.

    Raises:
        ValueError: If the name is unknown, or for a class instead of an object.
    """
    if isinstance(advantages, Estimator):
        return advantages
    if isinstance(advantages, type):
        raise ValueError(f"expected an object as advantages, got the class {advantages.__name__}: call it")
    if callable(advantages):
        return FunctionEstimator(advantages)
    if not isinstance(advantages, str) or advantages not in ESTIMATORS:
        names = ", ".join(ESTIMATORS)
        raise ValueError(f"expected advantages out of {names}, an object or a function, got {advantages!r}")
    return ESTIMATORS[advantages]
