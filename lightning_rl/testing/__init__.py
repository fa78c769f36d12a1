"""Property checks of user code: rewards, advantages, losses, corrections and environments, on generated inputs.

Each function raises a :class:`PropertyError`, an AssertionError with the broken property, the smallest failing batch
and the fix. Requires hypothesis: ``pip install 'lightning-rl[testing]'``. Exports are imported on first access, so
:mod:`lightning_rl.testing.properties` needs no hypothesis.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_rl.testing.environments import check_environment
    from lightning_rl.testing.properties.rows import Row, rollout_of_rows
    from lightning_rl.testing.rewards import check_reward
    from lightning_rl.testing.shrinking import PropertyError
    from lightning_rl.testing.signals import check_advantage, check_callback, check_loss

EXPORTS = {
    "environments": "check_environment",
    "properties.rows": "Row rollout_of_rows",
    "rewards": "check_reward",
    "shrinking": "PropertyError",
    "signals": "check_advantage check_callback check_loss",
}
MODULE_OF = {name: f"{__name__}.{module}" for module, names in EXPORTS.items() for name in names.split()}

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


if not TYPE_CHECKING:  # a type checker would take any name for an export

    def __getattr__(name: str) -> Any:
        """Import an export from its module (PEP 562)."""
        if name not in MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=None)
        try:
            value = getattr(import_module(MODULE_OF[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "hypothesis":
                raise
            raise ImportError("lightning_rl.testing needs hypothesis: pip install 'lightning-rl[testing]'") from error
        globals()[name] = value
        return value
