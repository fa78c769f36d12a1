"""Algorithms as plain JSON: what turns a recorded rollout into advantages, a loss and its gradient."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback

from lightning_rl.advantages import Estimator
from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import CONTRIBUTIONS, ReplayCorrections, RLCallback
from lightning_rl.losses import PolicyLoss, ValueLoss
from lightning_rl.recording.serialize import from_json, not_ours, opaque_places, to_json

PARTS: dict[str, Any] = {"advantages": Estimator, "loss": PolicyLoss, "reduction": Callable, "value_loss": ValueLoss}
BENDING = {name for name, entry in CONTRIBUTIONS.items() if entry.bends in ("rows", "rewards", "policy loss", "loss")}


def replayable(algorithm: Algorithm, callbacks: Iterable[Callback]) -> Algorithm:
    """The same with those callbacks that change a reward, an advantage or the loss of a finished rollout."""
    bending = [
        callback for callback in callbacks if isinstance(callback, RLCallback) and callback.contributes & BENDING
    ]
    return algorithm.replace(corrections=ReplayCorrections(bending))


def algorithm_to_json(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm as plain JSON, by the place of each part and what it holds."""
    callbacks = {callback.name: to_json(callback) for callback in algorithm.corrections.callbacks}
    return {**{name: to_json(getattr(algorithm, name)) for name in PARTS}, "callbacks": callbacks}


def algorithm_from_json(description: Mapping[str, Any]) -> Algorithm:
    """The inverse of :func:`algorithm_to_json`, of parts of this library alone.

    What a correction keeps for stages that a replay has no part in, such as a teacher, may be somebody's own.

    Raises:
        ValueError: naming the part that is somebody's own, or that is no such part.
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
        raise ValueError(f"expected the callbacks of an algorithm by their names, got a {type(callbacks).__name__}")
    return callbacks.items()


def _require(place: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected a {kind.__name__} as {place} of a recorded algorithm, got a {type(value).__name__}")
    return value
