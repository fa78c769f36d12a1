"""Detection of hooks that edit the fields of a finished rollout."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from lightning.pytorch import Callback
from lightning.pytorch.profilers import Profiler
from torch import Tensor
from typing_extensions import override

from lightning_rl.audit.user_hooks import StateWatch, hooks_by_action
from lightning_rl.corrections.call_user import VERSIONS
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import Rollout
from lightning_rl.testing.properties.comparisons import bitwise_equal, differences
from lightning_rl.testing.properties.value_guard import ValueGuard
from lightning_rl.utils.finding import Finding

UNKNOWN = "a stage of the run, or other code that writes to it"


class FieldWatch(ValueGuard):
    """Compares the fields of a finished rollout before and after every hook that could edit them.

    Lightning runs each hook as an action of the Trainer's profiler, and the guard of the corrections is around each
    call of user code, so the watch replaces both until :meth:`release`, and callbacks are not modified.

    Args:
        module: Module of the run.
        callbacks: Callbacks to watch.
        before: Function called with each action that is no hook, before it starts.
        after: Function called with each action that is a hook, after it.
    """

    def __init__(
        self,
        module: RLLightningModule,
        callbacks: Iterable[Callback],
        before: Callable[[str], None],
        after: Callable[[str], None],
    ) -> None:
        self._module, self._trainer = module, cast(Any, module.trainer)  # Lightning does not declare the profiler
        self.callbacks = callbacks = list(callbacks)
        self._culprits, self.state = hooks_by_action(callbacks, module), StateWatch(module, callbacks)
        self._before, self._after = before, after
        self._armed, self._finished, self._raw = False, cast(Rollout | None, None), dict[str, Tensor]()
        self._edits: list[Finding] = []
        self.edited = False
        self._profiler: Profiler = self._trainer.profiler
        self._trainer.profiler = module.run.corrections.guard = self

    def release(self) -> None:
        """Restore the profiler and the corrections."""
        if self._trainer.profiler is self:
            self._trainer.profiler = self._profiler
        self._module.run.corrections.guard = VERSIONS

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the run's profiler."""
        return getattr(vars(self)["_profiler"], name)

    def start(self, action_name: str) -> None:
        """Start an action that is no hook, such as ``"optimizer_step"``."""
        self._before(action_name)
        self._profiler.start(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Profile an action with comparisons before and after, unless it raises."""
        if action_name in self._culprits:
            self.look()
        if action_name in self.state.actions or action_name in self.state.between:
            self.state.enter()
        if action_name in self.state.setting:
            self.state.before_rates()
        with self._profiler.profile(action_name):
            yield action_name
        if action_name in self.state.setting:
            self.state.after_rates(self.state.setting[action_name])
        self._after(action_name)
        if action_name in self.state.actions:
            self.state.leave(self.state.actions[action_name])
        if action_name in self.state.between:
            self.state.note_mover(self.state.between[action_name])
        if action_name in self._culprits:
            self.look(self._culprits[action_name])

    def arm(self) -> None:
        """Watch the next finished rollout from the first callback that observes it."""
        self.end()
        self._armed, self.edited, self._edits = True, False, []

    def begin(self, rollout: Rollout) -> None:
        """Store the fields of a rollout as the reference, unless there is one."""
        if not self._raw:
            self._finished, self._raw = rollout, {name: tensor.clone() for name, tensor in rollout.tensors()}

    def end(self) -> None:
        """Stop watching until armed again."""
        self._armed, self._finished, self._raw = False, None, {}

    @property
    @override
    def active(self) -> bool:  # pyrefly: ignore[bad-override]
        """True if the current rollout is audited."""
        return self.state.active

    @override
    def before_call(self, who: str, args: Sequence[object]) -> None:
        method, _, name = who.partition(" of ")
        if method == "observe" and self._armed and isinstance(args[0], Rollout):
            self.begin(args[0])
        if self._finished is not None and args[0] is self._finished:
            self.look(rollout=self._finished)
        if name in self.state.names:
            self.state.enter(contribution=True)

    @override
    def after_call(self, who: str) -> None:
        method, _, name = who.partition(" of ")
        if name in self.state.names:
            self.state.leave(f"callback {name}.{method}")

    def look(self, culprit: str = UNKNOWN, rollout: Rollout | None = None) -> None:
        """Record fields that differ, with the culprit; a reported change becomes the new reference."""
        current = self._module.run.progress.current
        if rollout is None and current is not None:
            rollout = current.rollout
        if not self._raw or rollout is None:
            return
        tensors = dict(rollout.tensors())
        for name, raw in list(self._raw.items()):
            if name in tensors and bitwise_equal(raw, tensors[name]):
                continue
            edit = Finding(
                check="raw_fields",
                culprit=culprit,
                expected=f"{name} as it was in the finished rollout",
                observed="other values" if name in tensors else "none",
                cure="return new tensors from every contribution, and keep no reference to edit later",
            )
            if name in tensors:
                self._raw[name] = tensors[name].clone()
                (places,) = differences(raw, tensors[name], rollout.sample_ids, rtol=0.0, atol=0.0)
                edit = replace(edit, samples=places.samples, positions=places.positions)
            else:
                del self._raw[name]
            self._edits.append(edit)
        self.edited = self.edited or bool(self._edits)

    def take(self) -> list[Finding]:
        """Return and clear the recorded edits."""
        edits, self._edits = self._edits, []
        return [*edits, *self.state.take()]
