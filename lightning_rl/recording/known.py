"""Parts of this library that a recording may name; the table cannot be extended.

A name in a file is looked up here and never imported. User functions and classes come from the recipe.
"""

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

from lightning_rl import advantages, callbacks, losses
from lightning_rl.advantages import Estimator, TraceDecay
from lightning_rl.corrections import RLCallback
from lightning_rl.losses import PolicyLoss, ValueLoss
from lightning_rl.signal.kl import KL_ESTIMATORS, Clamped
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.reductions import REDUCTIONS, SequenceSumNorm

KINDS = (PolicyLoss, ValueLoss, Estimator, TraceDecay, RLCallback)


def place_of(value: Any) -> str:
    """Return the name of a class or function in a recording, such as ``lightning_rl.losses.cispo:CISPO``."""
    return f"{value.__module__}:{value.__qualname__}"


def _by_place(values: Iterable[Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType({place_of(value): value for value in values})


_EXPORTED = [vars(room)[name] for room in (losses, advantages, callbacks) for name in room.__all__]

CLASSES: MappingProxyType[str, type] = _by_place(
    [*(kind for kind in _EXPORTED if isinstance(kind, type) and issubclass(kind, KINDS)), SequenceSumNorm, Clamped]
)
FUNCTIONS: MappingProxyType[str, Callable[..., Any]] = _by_place(
    [*REDUCTIONS.values(), *KL_ESTIMATORS.values(), local_sum]
)
