"""JSON form of an algorithm: the parts that turn a rollout into advantages, a loss and its gradient."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback

from lightning_rl.advantages import Estimator
from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import CONTRIBUTIONS, ReplayCorrections, RLCallback
from lightning_rl.losses import PolicyLoss, ValueLoss
from lightning_rl.recording.serialize import from_json, not_ours, opaque_places, to_json

PARTS: dict[str, Any] = {"advantages": Estimator, "loss": PolicyLoss, "reduction": Callable, "value_loss": ValueLoss}
BENDING = {name for name, entry in CONTRIBUTIONS.items() if entry.affects in ("rows", "rewards", "policy loss", "loss")}


def replayable(algorithm: Algorithm, callbacks: Iterable[Callback]) -> Algorithm:
    """Return the algorithm with the callbacks that change a reward, an advantage or the loss of a finished rollout."""
    bending = [
        callback for callback in callbacks if isinstance(callback, RLCallback) and callback.contributes & BENDING
    ]
    return algorithm.replace(corrections=ReplayCorrections(bending))


def algorithm_to_json(algorithm: Algorithm) -> dict[str, Any]:
    """Return the algorithm as JSON values: the import path and the state of each part."""
    callbacks = {callback.name: to_json(callback) for callback in algorithm.corrections.callbacks}
    return {**{name: to_json(getattr(algorithm, name)) for name in PARTS}, "callbacks": callbacks}


def algorithm_from_json(description: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm of a JSON description, built from parts of this library only.

    State of a correction that a replay does not use, such as a teacher, may be user code.

    Raises:
        ValueError: Naming the part that is user code or not valid there.
    """
    for place, text in opaque_places(description):
        if not place.startswith("callbacks.") or place.count(".") < 2:
            raise ValueError(not_ours(text, place))
    parts = {name: _require(name, from_json(description[name]), kind) for name, kind in PARTS.items()}
    callbacks = [_require(f"callbacks.{key}", from_json(item), RLCallback) for key, item in _callbacks(description)]
    return Algorithm(**parts, corrections=ReplayCorrections(callbacks))


def _callbacks(description: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    callbacks = description["callbacks"]
    if not isinstance(callbacks, Mapping):
        raise ValueError(
            f"expected a mapping from names to callbacks of an algorithm, got a {type(callbacks).__name__}"
        )
    return callbacks.items()


def _require(place: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected a {kind.__name__} as {place} of a recorded algorithm, got a {type(value).__name__}")
    return value
