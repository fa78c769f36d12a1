"""One optimizer step as it was made: what the policy said, the gradient it got, what was logged, how weights moved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_rl import distributed
from lightning_rl.corrections import Stat
from lightning_rl.metrics import MetricLog
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import Outputs
from lightning_rl.policy.plan import Microbatch
from lightning_rl.rollout import Rollout, concatenate
from lightning_rl.rollouts.held import Held

ENTRIES = 64  # entries of each parameter


@dataclass(kw_only=True)
class ParameterStep:
    """A few entries of one parameter through a step, [N] each, on a single device.

    Attributes:
        summed: gradients of all backward passes added up.
        gradient: what the optimizer got.
        before: values before the step.
        after: values after it.
        lr: learning rate; 0 if no optimizer holds the parameter.
    """

    summed: Tensor
    gradient: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    lr: float = 0.0


@dataclass(kw_only=True)
class StepEvidence:
    """What was seen of one optimizer step.

    Attributes:
        rows: that this rank trained on in this step.
        outputs: what the policy said of them.
        gradient: of the loss with respect to their log-probabilities, [b, T].
        masks: ``valid_tokens``, ``trained`` and ``groups`` of the rows of each rank in this step.
        rank: of these rows in ``masks``.
        weights: of the rows' tokens by the run's reduction with its sums over ranks, [b, T]; None if unknown.
        expected: what ``gradient`` should be, from the step in one piece; None if unknown.
        parts: of the loss, from the step in one piece.
        norm: of the gradient that the optimizer got; None on several devices.
        parameters: by name; none on several devices.
        scheduler_steps: how often the scheduler stepped; None without one.
        logged: statistics by metric, of the rollout, the step and its microbatches.
    """

    rows: Rollout
    outputs: Outputs
    gradient: Tensor
    masks: Sequence[tuple[Tensor, ...]]
    rank: int = 0
    weights: Tensor | None = None
    expected: Tensor | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)
    norm: float | None = None
    parameters: dict[str, ParameterStep] = field(default_factory=dict)
    scheduler_steps: int | None = None
    logged: dict[str, list[Tensor]] = field(default_factory=dict)


class LoggedStats:
    """Keeps the moments of every statistic that a run logs, until it is released.

    Args:
        log: of the run; its ``add`` is wrapped.
    """

    def __init__(self, log: MetricLog) -> None:
        self._log, add = log, log.add
        self._groups: dict[str, dict[str, list[Tensor]]] = {}

        def added(group: str, stats: Mapping[str, Stat]) -> None:
            known = self._groups.setdefault(group, {})
            for name, stat in stats.items():
                known.setdefault(name, []).append(stat.moments.detach().clone())
            add(group, stats)

        log.add = added

    @property
    def moments(self) -> dict[str, list[Tensor]]:
        """By metric, in the order they came, [4] each."""
        return {name: parts for known in self._groups.values() for name, parts in known.items()}

    def begin_step(self) -> None:
        """Forgets earlier optimizer steps."""
        self._groups = {"rollout": self._groups.get("rollout", {})}

    def release(self) -> None:
        """Puts the method back."""
        vars(self._log).pop("add", None)


class StepWatch:
    """Watches one optimizer step of a run through hooks on the policy and its parameters.

    Args:
        module: the run.
    """

    def __init__(self, module: RLLightningModule) -> None:
        self._module = module
        self._seen: list[tuple[Microbatch, Outputs, Tensor]] = []
        self._parameters: dict[str, ParameterStep] = {}
        self.step: StepEvidence | None = None
        policy = module.required_policy
        self._handles: list[RemovableHandle] = [policy.register_forward_hook(self._forwarded)]
        self._alone = module.trainer.world_size == 1 and not module.parallel.sharded
        self._scheduled = _steps_of(module)
        for name, parameter in policy.named_parameters() if self._alone else ():
            if parameter.requires_grad:
                self._follow(name, parameter)

    def _follow(self, name: str, parameter: nn.Parameter) -> None:
        own = self._parameters[name] = ParameterStep(summed=torch.zeros_like(_few(parameter), dtype=torch.float64))

        def added(gradient: Tensor) -> None:
            own.summed += _few(gradient).double()

        self._handles.append(parameter.register_hook(added))

    def _forwarded(self, policy: nn.Module, arguments: tuple[Any, ...], outputs: Outputs) -> None:
        del policy
        held: Held | None = self._module.run.held
        if held is None or not outputs.logprobs.requires_grad:
            return
        known = {id(one.layout): one for one in held.plan.microbatches()}
        microbatch, gradient = known.get(id(arguments[0])), torch.zeros_like(outputs.logprobs)
        if microbatch is None or not len(microbatch.index):
            return

        def added(own: Tensor) -> None:
            gradient.add_(own)

        outputs.logprobs.register_hook(added)
        said = [None if part is None else part.detach().clone() for part in outputs]
        self._seen.append((microbatch, Outputs(*said), gradient))  # pyright: ignore[reportArgumentType]

    def take_gradient(self, optimizer: Any) -> StepEvidence | None:
        """Called when the gradient is complete, before the optimizer uses it; the step so far. A collective."""
        module, held = self._module, self._module.run.held
        if held is None or self.step is not None:
            return None
        rollout = held.rollout
        parts = [microbatch.rows_of(rollout) for microbatch, _, _ in self._seen]
        rows = concatenate(parts) if parts else rollout.select(rollout.trained & False)
        world = module.parallel.ranks
        joined = [_joined([said[place] for _, said, _ in self._seen], rows) for place in range(3)]
        mine = tuple(part.cpu() for part in (rows.valid_tokens, rows.trained, rows.groups))
        self.step = StepEvidence(
            rows=rows, outputs=Outputs(*joined),  # pyright: ignore[reportArgumentType]
            gradient=_joined([own / world for *_, own in self._seen], rows),
            masks=distributed.global_objects(mine), rank=module.parallel.rank,
            weights=module.reduction(rows.valid_tokens, rows.trained, rows.groups, distributed.global_sum),
        )  # fmt: skip
        if self._alone:
            self._weigh(self.step, optimizer)
        return self.step

    def _weigh(self, step: StepEvidence, optimizer: Any) -> None:
        policy, rates = self._module.required_policy, dict[int, float]()
        for group in optimizer.param_groups:
            rates |= {id(parameter): float(group["lr"]) for parameter in group["params"]}
        gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(gradient.double()) for gradient in gradients])
        step.norm, step.parameters = float(torch.linalg.vector_norm(norms)), self._parameters
        for name, parameter in policy.named_parameters():
            if name in self._parameters and parameter.grad is not None:
                own = self._parameters[name]
                own.gradient, own.before = _few(parameter.grad).double(), _few(parameter).clone()
                own.lr = rates.get(id(parameter), 0.0)

    def finish(self, logged: Mapping[str, list[Tensor]]) -> StepEvidence | None:
        """What was seen, once the step is over; None if it was skipped."""
        self.release()
        step = self.step
        if step is None:
            return None
        for name, parameter in self._module.required_policy.named_parameters():
            if name in step.parameters:
                step.parameters[name].after = _few(parameter).clone()
        before, after = self._scheduled, _steps_of(self._module)
        step.scheduler_steps = None if before is None or after is None else after - before
        step.logged = dict(logged)
        return step

    def release(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _few(parameter: Tensor) -> Tensor:
    return parameter.detach().flatten()[:ENTRIES]


def _steps_of(module: RLLightningModule) -> int | None:
    scheduler: Any = module.lr_schedulers()
    return None if scheduler is None else int(scheduler.last_epoch)


def _joined(parts: list[Tensor | None], rows: Rollout) -> Any:
    """Parts [b, T] of microbatches below each other, padded to the widest."""
    known = [part for part in parts if part is not None]
    if not known:
        return None if parts else torch.zeros(rows.valid_tokens.shape)
    return torch.cat([nn.functional.pad(part, (0, rows.width - part.shape[1])) for part in known])
