"""Description of an algorithm: the parts that turn a rollout into advantages, a loss and its gradient."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from lightning.pytorch import Callback

from lightning_rl.advantages import Estimator
from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import CONTRIBUTIONS, ReplayCorrections, RLCallback
from lightning_rl.losses import PolicyLoss, ValueLoss
from lightning_rl.serialization import describe, restore
from lightning_rl.utils.terminal import visible

PARTS: dict[str, Any] = {"advantages": Estimator, "loss": PolicyLoss, "reduction": Callable, "value_loss": ValueLoss}
CHANGES_SIGNAL = {
    name for name, entry in CONTRIBUTIONS.items() if entry.affects in ("rows", "rewards", "policy loss", "loss")
}


def replayable(algorithm: Algorithm, callbacks: Iterable[Callback]) -> Algorithm:
    """Return the algorithm with the callbacks that change a reward, an advantage or the loss of a finished rollout."""
    changing = [
        callback for callback in callbacks if isinstance(callback, RLCallback) and callback.contributes & CHANGES_SIGNAL
    ]
    return algorithm.replace(corrections=ReplayCorrections(changing))


class Opaque:
    """Placeholder for an object that a recording holds by name only.

    Args:
        name: Import path of the object.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise a ValueError, because the recording holds only the name."""
        raise ValueError(not_ours(self.name))


def not_ours(name: str, place: str = "") -> str:
    """Return the error message for a part that a recording names but does not hold."""
    return (
        f"expected a part of lightning_rl, got {visible(name)}{place and f' as {visible(place)}'}, of which a "
        "recording holds only the name: pass --recipe with the script that made the run"
    )


def describe_algorithm(algorithm: Algorithm) -> dict[str, Any]:
    """Return the algorithm as plain values: the import path and the options of each part."""
    callbacks = {callback.name: describe(callback) for callback in algorithm.corrections.callbacks}
    return {**{name: describe(getattr(algorithm, name)) for name in PARTS}, "callbacks": callbacks}


def restore_algorithm(description: Mapping[str, Any]) -> Algorithm:
    """Return the described algorithm, built from parts of this library only.

    Options of a correction that a replay does not use, such as a teacher, may be user code.

    Raises:
        ValueError: Naming the part that is user code or not valid there.
    """
    parts = {name: _restore(name, description[name], kind) for name, kind in PARTS.items()}
    callbacks = []
    for name, described in description["callbacks"].items():
        callbacks.append(_restore(f"callbacks.{name}", described, RLCallback, Opaque))
        callbacks[-1].name = name
    return Algorithm(**parts, corrections=ReplayCorrections(callbacks))


def _restore(place: str, description: Any, kind: Any, unknown: Callable[[str], Any] | None = None) -> Any:
    try:
        value = restore(description, unknown)
    except ValueError as lost:
        raise ValueError(not_ours(str(lost), place)) from lost
    if isinstance(value, Opaque):
        raise ValueError(not_ours(value.name, place))
    if not isinstance(value, kind):
        raise ValueError(f"expected a {kind.__name__} as {place} of a recorded algorithm, got a {type(value).__name__}")
    return value
