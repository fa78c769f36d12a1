"""Changes of gradients, weights, optimizer and metrics by hooks of callbacks and of the module."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rl.audit.live import STEP_HOOKS, LiveRun
from lightning_rl.audit.parameter_tracer import by_kind, sample_entries
from lightning_rl.corrections import RLCallback
from lightning_rl.setup_checks import call_closure
from lightning_rl.testing.properties.comparisons import bitwise_equal
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.trainer import is_own

ENTRIES = 16  # of each tensor; a norm covers the others
BETWEEN_STEPS = tuple(
    name for name in dir(Callback) if name.startswith("on_") and name not in STEP_HOOKS and name != "on_exception"
)
LASTS = ("weights", "optimizer")
"""Parts of the state that stay the same between optimizer steps."""
RATE_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_end")
TUNED, FROZEN, REFERENCE = "optimizer's numbers", "trained parameters", "reference"
Numbers = tuple[Sequence[str], Tensor]
"""Names of tensors and a few numbers of them: the name of each number, or no names."""
Snapshot = dict[str, Numbers]
"""A few numbers of each part, such as ``"weights"``."""


class StateWatch:
    """Compares the state of a run before and after each hook of user code.

    Attributes:
        setting: Culprits of hooks that could set a learning rate, by action.
        between: Culprits of hooks that run between optimizer steps, by action.
        blamed: Culprits that changed gradients, weights, the optimizer, metrics or the plan in this rollout.
        idled: Culprit that set every learning rate to 0, in any rollout; empty if none did.
        reference_mover: Hook that changed the reference, in any rollout; empty if none did.
    """

    def __init__(self, live: LiveRun, callbacks: Iterable[Callback]) -> None:
        self._live, foreign = live, [callback for callback in callbacks if not is_own(callback)]
        self.actions = live.hooks(foreign)
        self.setting = live.hooks(foreign, [*STEP_HOOKS, *RATE_HOOKS], [*STEP_HOOKS, *RATE_HOOKS])
        self.between = live.hooks(foreign, BETWEEN_STEPS, BETWEEN_STEPS)
        self._kept: Snapshot | None = None
        self._movers = dict[str, str]()
        self.names = {callback.name for callback in foreign if isinstance(callback, RLCallback)}
        self._before: Snapshot | None = None
        self._places: list[int] | None = None
        self._rates: list[float] = []
        self.idled = self.reference_mover = ""
        self._edits: list[Finding] = []
        self.blamed: dict[str, str] = {}
        self.active = False

    def begin(self, *, active: bool) -> None:
        """Begin a rollout, whose hooks may run before it is requested."""
        frozen = {what: culprit for what, culprit in self.blamed.items() if what == FROZEN}  # freezing persists
        self.active, self._edits, self.blamed = active, [], frozen
        self._kept = self._kept if active else None
        if active and self._kept is None:
            self.keep_state()

    def before_rates(self) -> None:
        """Record the learning rates before code that could set them."""
        self._rates = _rates(self._live)

    def after_rates(self, culprit: str) -> None:
        """Compare the learning rates after code that could set them."""
        rates = _rates(self._live)
        if rates != self._rates:
            self.idled = "" if any(rate > 0 for rate in rates) else culprit

    def enter(self, *, contribution: bool = False) -> None:
        """Record the state before a hook, or before a contribution, which may not even move the weights in memory."""
        self._before = dict(_snapshot(self._live)) if self.active else None
        moves = not contribution or self._live.parallel.sharded  # which frees and allocates parameters
        self._places = None if moves else self._memory()

    def leave(self, culprit: str) -> None:
        """Compare the state after a hook, which is the culprit of changes."""
        if self._before is None:
            return
        places, self._before = _changes(self._before, dict(_snapshot(self._live))), None
        if self._places is not None and self._places != self._memory():
            places.setdefault("weights", "their memory")
        if places.pop(REFERENCE, None) is not None:  # reference_stays reports it
            self.reference_mover = culprit
        for what, name in places.items():
            self.blamed.setdefault("optimizer" if what == TUNED else what, culprit)
            if what != TUNED:  # users may schedule learning rates
                self._note(culprit, f"{what} as they were before it", "others", name, "leave it to the core")

    def keep_state(self) -> None:
        """Record weights and optimizer after a step, since they stay the same until the next one."""
        if not self._live.parallel.sharded:  # gathering would change local parts
            self._kept, self._movers = dict(_lasting(self._live)), {}

    def forget_state(self) -> None:
        """Discard the record before an optimizer step, which changes them."""
        self._kept = None

    def note_mover(self, culprit: str) -> None:
        """Record the changes of a hook between steps without a finding, since another hook may revert them."""
        if self._before is not None:
            changed = _changes(self._before, dict(_snapshot(self._live)))
            self._movers |= {what: culprit for what in changed if what in LASTS}
        self._before = None

    def compare_state(self, during: str) -> None:
        """Compare with the state after the last step; a reported change becomes the new reference."""
        if self._kept is None:  # no audited rollout before or after
            return
        before, self._kept = self._kept, dict(_lasting(self._live))
        for what, name in _changes(before, self._kept).items():
            if what in self.blamed:  # reported for a hook of the step
                continue
            culprit = self._movers.get(what, during)
            self.blamed[what] = culprit
            expected = f"{what} as the last optimizer step left them"
            self._note(culprit, expected, "others at the next one", name, "put back what was changed")

    def _memory(self) -> list[int]:
        return [local(weight.detach()).data_ptr() for weight in self._live.policy.parameters()]

    def _note(self, culprit: str, expected: str, observed: str, name: str, cure: str) -> None:
        example = f", such as {name}" if name else ""
        declare = "or declare it: SignalAudit(deliberate=...)"
        self._edits.append(
            Finding(
                check="quiet_hooks",
                culprit=culprit,
                expected=expected,
                observed=f"{observed}{example}",
                cure=f"{cure}, {declare}",
            )
        )

    def take(self) -> list[Finding]:
        """Return and clear the recorded edits."""
        edits, self._edits = self._edits, []
        return edits


def _changes(before: Snapshot, after: Snapshot) -> dict[str, str]:
    """Return what differs, with the name of the first difference."""
    places, nothing = dict[str, str](), ((), torch.zeros(0))
    for what in {**before, **after}:
        (names, ours), (others, theirs) = before.get(what, nothing), after.get(what, nothing)
        if names != others:
            places[what] = next(one or other or "" for one, other in zip_longest(names, others) if one != other)
        elif not bitwise_equal(ours, theirs):
            places[what] = names[int((ours != theirs).int().argmax())] if names else ""
    return places


def _rates(live: LiveRun) -> list[float]:
    return [float(group["lr"]) for optimizer in live.optimizers for group in optimizer.param_groups]


def _snapshot(live: LiveRun) -> Iterator[tuple[str, Numbers]]:
    """Yield a few numbers of each part of the state that a hook could change."""
    yield from _lasting(live)
    parameters = dict(live.policy.named_parameters())
    gradients = {name: local(weight.grad) for name, weight in parameters.items() if weight.grad is not None}
    yield "gradients", _few(gradients)
    yield FROZEN, ((), torch.tensor([weight.requires_grad for weight in parameters.values()]))
    for optimizer in live.optimizers:
        numbers = [
            float(value)
            for group in optimizer.param_groups
            for name, value in sorted(group.items())
            if isinstance(value, int | float) and name != "initial_lr"
        ]
        numbers += [float(config.scheduler.last_epoch) for config in live.trainer.lr_scheduler_configs]
        yield TUNED, ((), torch.tensor(numbers, dtype=torch.float64))
    if (reference := live.models.reference) is not None:
        frozen = {name: one for name, one in reference.model.named_parameters() if not one.requires_grad}
        yield REFERENCE, _join(sample_entries({name: local(one.detach()) for name, one in frozen.items()}, ENTRIES))
    if live.current is not None:
        plan = live.current.plan.microbatches()
        rows = [row for microbatch in plan for row in [-1, *microbatch.index.tolist()]]
        yield "plan", ((), torch.tensor([len(plan), *rows]))
    metrics = {name: group.moments.flatten() for name, group in live.metrics.groups.items() if group.keys}
    yield "metrics", _join(metrics)


def _lasting(live: LiveRun) -> Iterator[tuple[str, Numbers]]:
    """Yield the parts of ``LASTS``."""
    parameters = dict(live.policy.named_parameters())
    yield "weights", _few({name: local(weight.detach()) for name, weight in parameters.items()})
    for optimizer in live.optimizers:
        kept = {
            f"{key} {name}": local(value)
            for name, weight in parameters.items()
            for key, value in optimizer.state.get(weight, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        yield "optimizer", ((), _norms(kept)[1])


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _few(tensors: Mapping[str, Tensor]) -> Numbers:
    """Return the norm and some entries of each tensor."""
    (names, norms), (labels, entries) = _norms(tensors), _join(sample_entries(tensors, ENTRIES))
    return [*names, *labels], torch.cat([norms, entries])


def _join(vectors: Mapping[str, Tensor]) -> Numbers:
    """Return the numbers of vectors."""
    names = [name for name, vector in vectors.items() for _ in range(len(vector))]
    return names, torch.cat([*vectors.values()]).double().cpu() if vectors else torch.zeros(0)


def _norms(tensors: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
    """Return the norm of each tensor, [N] float64 on the CPU."""
    names, norms = list[str](), [torch.zeros(0, dtype=torch.float64)]
    for group in by_kind(tensors):
        dtype = torch.promote_types(next(iter(group.values())).dtype, torch.float32)  # float64 must not be narrowed
        measured = [  # a step count is its own norm
            torch.linalg.vector_norm(tensor, dtype=dtype) if tensor.dim() else tensor.to(dtype)
            for tensor in group.values()
        ]
        names, norms = [*names, *group], [*norms, torch.stack(measured).double().cpu()]
    return names, torch.cat(norms)


def gradient_hooks(policy: nn.Module) -> list[str]:
    """Return hooks on the gradients of parameters, as culprits."""
    return [
        f"the gradient hook {_label(hook)} of parameter {name}"
        for name, parameter in policy.named_parameters()
        for place in ("_backward_hooks", "_post_accumulate_grad_hooks")
        for hook in (getattr(parameter, place, None) or {}).values()
    ]


def optimizer_hooks(optimizer: Any) -> list[str]:
    """Return hooks of user code on the optimizer's step, as culprits."""
    return [
        f"optimizer {type(optimizer).__name__}, its hook {_label(hook)}"
        for place in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        for hook in (getattr(optimizer, place, None) or {}).values()
        if hook is not call_closure
    ]


def suspects(live: LiveRun, callbacks: Iterable[Callback]) -> dict[str, str]:
    """Return code that could have changed parts of a step without being observed, by part, as culprits."""
    overriding = live.hooks([one for one in callbacks if not is_own(one)])
    backward = [culprit for culprit in overriding.values() if culprit.endswith(".on_before_backward")]
    backward += filter(None, map(live.overridden, ("training_step", "backward", "manual_backward")))
    within = [one for optimizer in live.optimizers for one in optimizer_hooks(optimizer)]
    within += filter(None, map(live.overridden, ("training_step", "optimizer_step")))
    gradients = [*gradient_hooks(live.policy), *backward, *within]
    hooks = {"backward": backward, "gradients": gradients, "optimizer": within}
    return {what: ", or ".join(culprits[:3]) for what, culprits in hooks.items() if culprits}


def _label(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
