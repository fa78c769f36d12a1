"""Evidence: what the checks look at, and the stages of the run repeated on changed copies of a small slice."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages import Advantages, Estimator, RewardSignal
from lightning_rl.generation import Completion, Request
from lightning_rl.hooks import Contributions, LossView, RLCallback
from lightning_rl.module import RLLightningModule
from lightning_rl.objective import Objective
from lightning_rl.policy import Outputs, PolicyModel
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import own_sum
from lightning_rl.signal.selection import own_values
from lightning_rl.stages.signal import with_signal
from lightning_rl.stages.update import accumulated, view_of

MOST_GROUPS, MOST_ROWS = 4, 6


class Provided(Contributions):
    """The corrections of a run on a rollout that carries what they provide, around a table in place of the policy."""

    @override
    def provide(self, rollout: Rollout) -> Rollout:
        return rollout

    @override
    @contextmanager
    def forward_context(self, rows: Rollout) -> Iterator[None]:
        yield


class Spy(Estimator):
    """The run's estimator, and what it was given."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.seen: RewardSignal | None = None

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        self.seen = signal
        return self.estimator(signal)


@dataclass(frozen=True)
class StepFound:
    """One optimizer step on a slice, with a table of log-probabilities in the place of the policy."""

    parts: dict[str, Tensor]
    gradient: Tensor  # with respect to the table, [b, T]


@dataclass(frozen=True)
class Evidence:
    """A finished rollout and the run that made it.

    Args:
        module: the run.
        rollout: finished, on this rank.
        cycle: its number.
        drawn: what the engine returned, by sample.
    """

    module: RLLightningModule
    rollout: Rollout
    cycle: int
    drawn: Mapping[int, tuple[Request, Completion]] = field(default_factory=dict)

    @cached_property
    def contributions(self) -> Provided:
        """The corrections, without those that only look on."""
        own = self.module.run.contributions.callbacks
        return Provided([callback for callback in own if callback.contributes - RLCallback.LOOKING])

    @cached_property
    def groups(self) -> Rollout:
        """Whole groups, a few of them, with different rewards first."""
        spread = self.rollout.rewarded.new_zeros(len(self.rollout))
        ids = self.rollout.groups.unique()
        for group in ids:
            rows = self.rollout.groups == group
            scores = self.rollout.rewards[rows & self.rollout.rewarded]
            spread |= rows & bool(len(scores) and scores.max() > scores.min())
        chosen = sorted(ids.tolist(), key=lambda group: (not bool(spread[self.rollout.groups == group].any()), group))
        kept = torch.isin(self.rollout.groups, torch.tensor(chosen[:MOST_GROUPS], device=ids.device))
        return self.rollout.select(kept)

    @cached_property
    def rows(self) -> Rollout:
        """A few trained rows of those groups."""
        own = self.groups
        kept = (own.trained & own.valid_tokens.any(-1)).nonzero()[:MOST_ROWS, 0]
        return own.select(kept).fit_width(max(int(own.response_lengths[kept].max()), 1) if len(kept) else 1)

    def signal(self, rollout: Rollout, contributions: Contributions | None = None) -> tuple[Rollout, RewardSignal]:
        """The signal stage on another rollout of this run. A collective, if the estimator has one."""
        spy = Spy(self.module.estimator)
        found, _ = with_signal(
            rollout.replace(advantages=None, returns=None), spy, contributions or self.contributions, own_sum
        )
        return found, cast(RewardSignal, spy.seen)

    def objective(self, contributions: Contributions | None = None) -> Objective:
        """The run's loss, alone or with other corrections."""
        module = self.module
        return Objective(
            loss=module.loss, reduction=module.reduction, contributions=contributions or self.contributions,
            entropy_coef=module.entropy_coef, value_coef=module.value_coef, value_loss=module.value_loss,
        )  # fmt: skip

    @cached_property
    def outputs(self) -> Outputs:
        """What the policy says of :attr:`rows` now."""
        plan = plan_of_rows(self.rows.to("cpu"), [[list(range(len(self.rows)))]], packed=self.module.packing)
        layout = plan.to(self.rows.groups.device).step(0)[0].layout
        context = self.module.trainer.precision_plugin.forward_context
        with torch.no_grad(), context(), self.module.run.contributions.forward_context(self.rows):
            found = self.module.required_policy(layout)
        width = self.rows.width
        values = None if found.values is None else _widened(found.values, width)
        return Outputs(_widened(found.logprobs, width), _widened(found.entropy, width), values)

    def table(self, drift: float = 0.0) -> Tensor:
        """Log-probabilities of :attr:`rows`, moved by up to ``drift`` nats in a fixed pattern, as a leaf."""
        position = torch.arange(self.rows.width, device=self.rows.groups.device)
        pattern = torch.sin(1.0 + 3.0 * self.rows.sample_ids[:, None] + 5.0 * position)
        moved = self.outputs.logprobs + drift * pattern.to(self.outputs.logprobs.dtype)
        return torch.where(self.rows.valid_tokens, moved, 0.0).detach().requires_grad_()

    def view(self, rows: Rollout | None = None, drift: float = 0.3) -> LossView:
        """What losses and corrections see of :attr:`rows`, or of a changed copy, once the policy has moved."""
        outputs = self.outputs._replace(logprobs=self.table(drift))
        return view_of(self.rows if rows is None else rows, outputs)

    def step(
        self, partition: Sequence[Sequence[int]], rows: Rollout | None = None, *, drift: float = 0.3,
        contributions: Contributions | None = None,
    ) -> StepFound:  # fmt: skip
        """The update stage on :attr:`rows`, cut into microbatches, without a model."""
        rollout, table = self.rows if rows is None else rows, self.table(drift)
        plan = plan_of_rows(rollout.to("cpu"), [[list(part) for part in partition]], packed=self.module.packing)
        microbatches = plan.to(rollout.groups.device).step(0)
        tables = {id(microbatch.layout): microbatch.index for microbatch in microbatches}

        def policy(layout: Any) -> Outputs:
            index, (number, width) = tables[id(layout)], layout.shape
            if not len(index):
                nothing = table.sum() * 0 + table.new_zeros(number, width)
                return Outputs(nothing, nothing.detach(), None if self.outputs.values is None else nothing)
            entropy, values = self.outputs.entropy[index, :width], self.outputs.values
            return Outputs(table[index, :width], entropy, None if values is None else values[index, :width])

        found = accumulated(
            rollout, microbatches, cast(PolicyModel, policy), self.objective(contributions), global_sum=own_sum,
            global_concat=own_values, around=lambda _last: nullcontext(), backward=_backward,
        )  # fmt: skip
        gradient = torch.zeros_like(table) if table.grad is None else table.grad
        return StepFound(found.parts, gradient)


def _backward(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


def _widened(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))[:, :width]


def callbacks_offering(evidence: Evidence, *methods: str) -> list[tuple[RLCallback, str]]:
    """Every correction with each of the methods that it offers."""
    own = evidence.contributions
    return [(callback, method) for method in methods for callback in own.offering(method)]
