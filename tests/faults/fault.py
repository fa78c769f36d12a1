"""Fault: something that goes wrong quietly, and what the audit has to say of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.support import tiny_prompts
from lightning.pytorch import Callback

from lightning_rl import PromptDataModule


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong quietly.

    Attributes:
        name: what, in the words of who got it wrong.
        check: the check that has to find it; of several, joined by ``|``, whichever comes first; empty for any.
        culprit: what the finding's culprit has to contain; of several words, joined by ``|``, one.
        callbacks: of the run, wrong ones among them.
        options: of the module.
        patches: what is replaced in the library while it runs.
        fresh: options of the module that are made anew for each run, by their names.
        data: the prompts.
        max_steps: optimizer steps of the run.
        trainer: options of the Trainer.
        ranks: of the run, under DDP if they are several.
        sound: what the run has in the place of wrong parts when nothing is wrong with it: ``callbacks``, ``data`` and
            ``options`` as functions; see :func:`faults.runs.sound_run`.
    """

    name: str
    check: str
    culprit: str
    callbacks: Callable[[], list[Any]] = list
    options: Mapping[str, Any] = field(default_factory=dict)
    patches: Sequence[Any] = ()
    fresh: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    data: Callable[[], PromptDataModule] = lambda: tiny_prompts(16, 4)
    max_steps: int = 6
    trainer: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    sound: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    def named_by(self, check: str, culprit: str) -> bool:
        """Whether a finding names the right check and the right culprit."""
        right_check = not self.check or check in self.check.split("|")
        return right_check and any(word in culprit for word in self.culprit.split("|"))

    def parts(self) -> tuple[list[Callback], dict[str, Any], PromptDataModule]:
        """Callbacks, options and data of the run with the fault, made anew."""
        given = {key: value() if key == "engine" else value for key, value in self.options.items()}
        return self.callbacks(), {**given, **{key: make() for key, make in self.fresh.items()}}, self.data()
