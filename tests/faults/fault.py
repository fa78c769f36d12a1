"""Fault that goes wrong quietly, and the expected finding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kit.support import callback_of, tiny_prompts
from lightning.pytorch import Callback

from faults.patches import change_rows
from lightning_rl import GAE, PromptDataModule, RLCallback, Rollout
from lightning_rl.audit.live import name_of_callback

STEPS: dict[str, Any] = {"minibatches_per_rollout": 2, "epochs_per_rollout": 1}
SMALL: dict[str, Any] = {"max_tokens_per_microbatch": 24}
PPO: dict[str, Any] = {"advantages": GAE(), "critic": "shared"}
OLD_TO_ROLLOUT: dict[str, Any] = {"reads_at_loss": ("old_logprobs", "rollout_logprobs"), "ratio": ("old", "rollout")}
"""Attributes of a correction whose weight is the ratio of the old policy to the engine's."""


@dataclass(frozen=True)
class Fault:
    """A run with one quiet fault.

    Attributes:
        name: Description in the words of a user.
        culprit: Text in the culprit of the finding; alternatives are joined by ``|``.
        check: Check that finds it; alternatives are joined by ``|``; empty for any.
        callbacks: Returns the callbacks of the run.
        options: Options of the module.
        patches: Replaced parts of the library.
        fresh: Options of the module that are made for each run, by name.
        data: Returns the prompts.
        max_steps: Number of optimizer steps.
        trainer: Options of the Trainer.
        ranks: Number of ranks; under DDP if there are several.
    """

    name: str
    culprit: str
    check: str = ""
    callbacks: Callable[[], list[Any]] = list
    options: Mapping[str, Any] = field(default_factory=dict)
    patches: Sequence[Any] = ()
    fresh: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    data: Callable[[], PromptDataModule] = lambda: tiny_prompts(16, 4)
    max_steps: int = 6
    trainer: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def named_by(self, check: str, culprit: str) -> bool:
        """Return True if a finding names an expected check and culprit."""
        right_check = not self.check or check in self.check.split("|")
        return right_check and any(word in culprit for word in self.culprit.split("|"))

    def parts(self) -> tuple[list[Callback], dict[str, Any], PromptDataModule]:
        """Return new callbacks, options and data."""
        return self.callbacks(), {**self.options, **{key: make() for key, make in self.fresh.items()}}, self.data()


def correction(**members: Any) -> Callable[[], RLCallback]:
    """Return a factory of corrections with these functions as methods; the name is that of the first function."""
    return partial(callback_of, next(iter(members.values())).__name__, **members)


def hooks(**functions: Callable[..., None]) -> Callable[[], Callback]:
    """Return a Lightning callback class with these functions as hooks; the name is that of the first function."""
    bodies = {hook: lambda _self, *given, body=body, **_: body(*given) for hook, body in functions.items()}
    return type(next(iter(functions.values())).__name__, (Callback,), bodies)


def user(name: str, *makers: Callable[[], Callback], culprit: str | None = None, **given: Any) -> Fault:
    """Return a fault in callbacks of a user; the culprit is the first of them by default."""
    named = name_of_callback(makers[0]()) if culprit is None else culprit
    return Fault(name, named, callbacks=lambda: [make() for make in makers], **given)


def engine(name: str, make: Callable[[], Any], culprit: str | None = None, **given: Any) -> Fault:
    """Return a fault in an engine; the culprit is its class by default."""
    return Fault(name, type(make()).__name__ if culprit is None else culprit, fresh={"engine": make}, **given)


def rows(name: str, change: Callable[[Rollout], Rollout], culprit: str = "stage generate", **given: Any) -> Fault:
    """Return a fault in sampled rows."""
    return Fault(name, culprit, patches=[change_rows(change)], **given)
