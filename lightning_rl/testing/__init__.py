"""Property checks of user code: rewards, advantages, losses, corrections and environments, on generated inputs.

Each function raises a :class:`PropertyError`, an AssertionError with the broken property, the smallest failing batch
and the fix. Requires hypothesis: ``pip install 'lightning-rl[testing]'``.
"""

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as error:
    raise ImportError("lightning_rl.testing needs hypothesis: pip install 'lightning-rl[testing]'") from error

from lightning_rl.testing.check_environment import check_environment
from lightning_rl.testing.check_reward import check_reward
from lightning_rl.testing.random_batches import Row, rollout_of_rows
from lightning_rl.testing.shrinking import PropertyError
from lightning_rl.testing.signals import check_advantage, check_callback, check_loss

__all__ = [
    "PropertyError",
    "Row",
    "check_advantage",
    "check_callback",
    "check_environment",
    "check_loss",
    "check_reward",
    "rollout_of_rows",
]
