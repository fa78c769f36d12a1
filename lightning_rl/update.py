"""Update: the gradient of one optimizer step, accumulated over its microbatches."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from lightning_rl.algorithm import LossParts, Objective
from lightning_rl.corrections import LossView, Stat
from lightning_rl.corrections.stat import merged_moments
from lightning_rl.policy import Microbatch, Outputs, PolicyModel
from lightning_rl.policy.model import check_finite
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import GlobalSum
from lightning_rl.signal.reductions import Reduction
from lightning_rl.signal.selection import GlobalConcat, own_values


@dataclass(slots=True)
class StepWeights:
    """The weights of every reduction over one optimizer step of all ranks; each is computed once, on demand.

    Every rank asks for the same reductions in the same order, because all have the same number of microbatches.
    """

    rollout: Rollout
    microbatches: tuple[Microbatch, ...]
    global_sum: GlobalSum
    _known: dict[int, Tensor] = field(default_factory=dict)  # by identity: a reduction need not be hashable

    def of(self, reduction: Reduction, microbatch: Microbatch) -> Tensor:
        """The weights of a microbatch's tokens, shape [b, T]; zeros for padding."""
        if id(reduction) not in self._known:
            self._known[id(reduction)] = self._computed(reduction)
        known, (rows, width) = self._known[id(reduction)], microbatch.layout.shape
        if not len(microbatch.index):
            return known.new_zeros(rows, width)
        return known[microbatch.index, :width]

    def _computed(self, reduction: Reduction) -> Tensor:
        here = torch.zeros_like(self.rollout.trained)
        for microbatch in self.microbatches:
            here[microbatch.index] = True
        valid, trained = self.rollout.valid_tokens & here[:, None], self.rollout.trained & here
        weights = reduction(valid, trained, self.rollout.groups, self.global_sum)
        if weights.shape != valid.shape:
            name = getattr(reduction, "__name__", type(reduction).__name__)
            raise ValueError(
                f"expected the reduction {name} to return a weight per token {list(valid.shape)}, got "
                f"{list(weights.shape)}"
            )
        return weights


@dataclass(slots=True)
class StepGradient:
    """What accumulating one optimizer step found out."""

    parts: dict[str, Tensor] = field(default_factory=dict)
    stats: list[dict[str, Stat]] = field(default_factory=list)

    def add(self, loss: LossParts) -> None:
        """Adds a microbatch's share."""
        self.stats.append(loss.stats)
        for name, part in loss.parts.items():
            self.parts[name] = self.parts[name] + part.double() if name in self.parts else part.double()

    def joint(self, name: str) -> Tensor:
        """The moments of a statistic over all microbatches of this rank, shape [4]."""
        return merged_moments(torch.stack([stats[name].moments for stats in self.stats]))

    def measured(self, world_size: int, *, norm: Tensor, **numbers: Tensor | float) -> dict[str, Stat]:
        """The step's losses over all ranks, its gradient norm, and other numbers of the step.

        Losses are left out on every rank alike if the norm, which all ranks share, is not finite: the mean over the
        ranks that remain would look like a loss.
        """
        scale = torch.where(torch.isfinite(norm), float(world_size), torch.nan)  # merging takes the mean over ranks
        values = {name: part * scale for name, part in self.parts.items()}
        values["optim/grad_norm"] = norm
        values |= {name.replace("__", "/"): torch.as_tensor(number) for name, number in numbers.items()}
        return Stat.singles(values)


def accumulated(
    rollout: Rollout,
    microbatches: tuple[Microbatch, ...],
    policy: PolicyModel,
    objective: Objective,
    *,
    global_sum: GlobalSum,
    global_concat: GlobalConcat = own_values,
    around: Callable[[bool], AbstractContextManager[object]],
    backward: Callable[[Tensor], None],
) -> StepGradient:
    """Runs forward, loss and backward of every microbatch.

    Args:
        rollout: with its signal.
        microbatches: of this optimizer step, as many on every rank.
        policy: gets the gradient.
        objective: the loss.
        global_sum: adds tensors up over the ranks.
        global_concat: joins tensors of the ranks.
        around: context for a microbatch, told whether it is the last.
        backward: differentiates a loss.
    """
    weights, gradient = StepWeights(rollout, microbatches, global_sum), StepGradient()
    entropy_gradient, prepared = objective.entropy_gradient, None

    def viewed(microbatch: Microbatch) -> LossView:
        rows = microbatch.rows_of(rollout)
        with objective.contributions.forward_context(rows):
            outputs = policy(microbatch.layout)
        check_finite(outputs, rows)
        return view_of(rows, outputs, entropy_gradient=entropy_gradient)

    if objective.loss.prepares:
        with torch.no_grad():
            views = [viewed(microbatch).sanitised() for microbatch in microbatches]
            prepared = objective.loss.prepare(views, global_sum, global_concat)
    for number, microbatch in enumerate(microbatches):
        with around(number == len(microbatches) - 1):
            view = viewed(microbatch)
            if prepared is not None:
                view = view.replace(prepared=prepared[number])
            loss = objective(view, lambda reduction, own=microbatch: weights.of(reduction, own))
            backward(loss.total)
        gradient.add(loss)
    return gradient


def view_of(rows: Rollout, outputs: Outputs, *, entropy_gradient: bool = False) -> LossView:
    """What losses and corrections see; without an old pass the old policy is the step's own, detached."""
    known = {spec.name: getattr(rows, spec.name) for spec in fields(rows)}
    if rows.old_logprobs is None:
        known["old_logprobs"] = outputs.logprobs.detach()
    entropy = outputs.entropy if entropy_gradient else outputs.entropy.detach()
    return LossView(**known, logprobs=outputs.logprobs, entropy=entropy, current_values=outputs.values)
