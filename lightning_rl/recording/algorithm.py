"""Algorithms as plain JSON: what turns a recorded rollout into advantages, a loss and its gradient."""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback

from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import CONTRIBUTIONS, ReplayCorrections, RLCallback
from lightning_rl.recording.serialize import from_json, to_json

PARTS = ("advantages", "loss", "reduction", "value_loss")
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
    """The inverse of :func:`algorithm_to_json`."""
    parts = {name: from_json(description[name]) for name in PARTS}
    return Algorithm(**parts, corrections=ReplayCorrections(list(from_json(description["callbacks"]).values())))
