"""Hooks: which methods of a user's callbacks Lightning calls while a rollout trains, and what messages call them."""

from collections.abc import Iterable

from lightning.pytorch import Callback

from lightning_rl.corrections.base import RLCallback

STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
)
OWN = ("lightning", "lightning_rl")


def name_of_callback(callback: Callback) -> str:
    """How messages call it."""
    return callback.name if isinstance(callback, RLCallback) else type(callback).__name__


def is_own(part: object) -> bool:
    """Whether a class comes with this library or with Lightning."""
    return type(part).__module__.partition(".")[0] in OWN


def overrides(part: object, hook: str, base: type) -> bool:
    """Whether an object has another method than its base, be it of its class, of its own, or put into the base."""
    method = getattr(part, hook)
    function = getattr(method, "__func__", method)
    home = str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
    return function is not getattr(base, hook) or home not in OWN


def writers_among(callbacks: Iterable[Callback]) -> list[str]:
    """The methods of a user's callbacks that run while a rollout is held, so that they could write to it."""
    names = list[str]()
    for callback in callbacks:
        if is_own(callback):
            continue
        methods = [hook for hook in STEP_HOOKS if overrides(callback, hook, Callback)]
        if isinstance(callback, RLCallback) and "observe_step" in callback.contributes:
            methods.append("observe_step")
        names += [f"callback {name_of_callback(callback)}.{method}" for method in methods]
    return names
