"""Watch: whose hook edits the fields of a finished rollout, by whatever way they are written."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_rl.audit.finding import Finding, differing
from lightning_rl.corrections import RLCallback
from lightning_rl.rollout import Rollout

HOOKS = (
    "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward", "on_before_zero_grad",
    "on_before_optimizer_step", "rollout_metrics", "observe",
)  # fmt: skip


class FieldWatch:
    """Compares the fields of a finished rollout after every hook of a callback that could have edited them.

    Args:
        callbacks: whose hooks are wrapped until :meth:`release`, where their class has one.
        rollout_of: the rollout as the run holds it now, if it does.
    """

    def __init__(self, callbacks: Iterable[Callback], rollout_of: Callable[[], Rollout | None]) -> None:
        self._rollout_of, self._raw = rollout_of, dict[str, Tensor]()
        self._wrapped: list[tuple[Callback, str]] = []
        self.findings: list[Finding] = []
        self._edits = 0
        self.armed, self._finished = False, cast(Rollout | None, None)
        for callback in callbacks:
            base = RLCallback if isinstance(callback, RLCallback) else Callback
            for hook in HOOKS:
                if getattr(type(callback), hook, None) is not getattr(base, hook, None):
                    self._wrap(callback, hook)

    def _wrap(self, callback: Callback, hook: str) -> None:
        own = getattr(callback, hook)

        @functools.wraps(own)
        def called(*arguments: Any, **keywords: Any) -> Any:
            seen = arguments[0] if hook in ("observe", "rollout_metrics") else None
            if hook == "observe" and self.armed and not self._raw:
                self.begin(arguments[0])
            if seen is not None and seen is not self._finished:
                return own(*arguments, **keywords)  # a copy that a check shows it
            self.look("a stage of the run, or whoever else writes to it", seen)
            given = own(*arguments, **keywords)
            self.look(f"callback {getattr(callback, 'name', '') or type(callback).__name__}.{hook}", seen)
            return given

        setattr(callback, hook, called)
        self._wrapped.append((callback, hook))

    def arm(self) -> None:
        """Takes the next finished rollout as the truth, as soon as a callback observes it."""
        self._raw, self.armed, self.findings, self._edits = {}, True, [], 0

    @property
    def begun(self) -> bool:
        """Whether it knows the truth."""
        return bool(self._raw)

    def begin(self, rollout: Rollout) -> None:
        """Takes the fields of a rollout as they are for the truth."""
        self._finished, self._raw = rollout, {name: tensor.clone() for name, tensor in rollout.tensors()}

    def end(self) -> None:
        """Looks no more until it is armed again."""
        self._finished, self._raw, self.armed = None, {}, False

    def look(self, culprit: str, seen: Rollout | None = None) -> None:
        """Compares, and notes what differs together with who did it; what was noted once becomes the truth."""
        rollout = self._rollout_of() if seen is None else seen
        if not self._raw or rollout is None:
            return
        own = dict(rollout.tensors())
        for name, raw in list(self._raw.items()):
            tensor = own.get(name)
            if tensor is not None and _equal(raw, tensor):
                continue
            samples, positions = list[int](), list[int]()
            if tensor is None:
                del self._raw[name]
            else:
                self._raw[name] = tensor.clone()
                samples, positions = differing(raw, tensor, rollout.sample_ids, rtol=0.0, atol=0.0)
            self._edits += 1
            self.findings.append(
                Finding(
                    check="raw_fields", culprit=culprit, expected=f"{name} as it was in the finished rollout",
                    observed="other values" if tensor is not None else "none", samples=samples, positions=positions,
                    cure="return new tensors from every contribution, and keep no reference to edit later",
                )
            )  # fmt: skip

    @property
    def edited(self) -> bool:
        """Whether anybody wrote to the rollout since it was finished."""
        return self._edits > 0

    def take(self) -> list[Finding]:
        """Edits since the last time."""
        found, self.findings = self.findings, []
        return found

    def release(self) -> None:
        """Puts every hook back."""
        for callback, hook in self._wrapped:
            vars(callback).pop(hook, None)
        self._wrapped = []


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(torch.isclose(one.double(), other.double(), 0, 0, equal_nan=True).all())
