"""Evidence: what the checks look at, and the stages of the run repeated on changed copies of a small slice."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from lightning_rl import distributed
from lightning_rl.advantages import RewardSignal
from lightning_rl.audit.finding import Finding
from lightning_rl.audit.recorded import Drawn, PlainForward, RewardCall
from lightning_rl.audit.subject import Subject
from lightning_rl.audit.trace import LiveStep
from lightning_rl.corrections import Corrections, LossView
from lightning_rl.policy import Outputs, PolicyModel
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.signal import Spy, estimate_signal
from lightning_rl.signal.masked import own_sum
from lightning_rl.signal.selection import own_values
from lightning_rl.update import accumulated, view_of


@dataclass(frozen=True)
class StepFound:
    """One optimizer step on a slice, with a table of log-probabilities in the place of the policy."""

    parts: dict[str, Tensor]
    gradient: Tensor  # with respect to the table, [b, T]
    total: float  # what was differentiated, over all microbatches


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A finished rollout, and everything that a check needs to judge it without the model.

    Attributes:
        subject: what is checked.
        rollout: finished, on this rank.
        groups: a few whole groups of it.
        rows: a few trained rows of those, cut to the longest.
        outputs: what the policy says of ``rows`` now, before the first update; None where there is no policy.
        apart: the same with the rows in reverse order, where there is no ``plain``.
        hotter: the same at twice the temperature; None without a critic.
        cycle: number of the rollout.
        batches: what the engine was asked for this rollout and returned, batch by batch.
        calls: what the reward functions were given and said.
        plain: some of ``rows`` by a model's own plain forward.
        remembered: a few weights of the reference at an earlier audit and now, [N] each, or nothing.
        live: one optimizer step as it was made; None before the first.
        edits: of fields of the rollout, by whatever way, with who made them.
    """

    subject: Subject
    rollout: Rollout
    groups: Rollout
    rows: Rollout
    outputs: Outputs | None = None
    apart: Outputs | None = None
    hotter: Outputs | None = None
    cycle: int = 0
    batches: Sequence[Sequence[Drawn]] = ()
    calls: Sequence[RewardCall] = ()
    plain: Sequence[PlainForward] = ()
    remembered: tuple[Tensor, ...] = ()
    live: LiveStep | None = None
    edits: Sequence[Finding] = ()

    def signal(self, rollout: Rollout, contributions: Corrections | None = None) -> tuple[Rollout, RewardSignal]:
        """The signal stage on another rollout of this run, on this rank alone."""
        spy = Spy(self.subject.estimator)
        with distributed.alone():
            found, _ = estimate_signal(
                rollout.replace(advantages=None, returns=None), spy, contributions or self.subject.contributions,
                own_sum,
            )  # fmt: skip
        return found, cast(RewardSignal, spy.seen)

    @property
    def logprobs(self) -> Tensor:
        """The policy's log-probabilities of ``rows``, or those of the rollout where there is no policy, [b, T]."""
        if self.outputs is not None:
            return self.outputs.logprobs
        return torch.where(self.rows.valid_tokens, self.rows.required("old_logprobs"), 0.0)

    @cached_property
    def drawn(self) -> dict[int, Drawn]:
        """Request and completion of each sample."""
        return {pair[0].sample_id: pair for batch in self.batches for pair in batch}

    @property
    def own_signal(self) -> Rollout:
        """:attr:`groups` with the advantages that the signal stage makes of them."""
        return self._own[0]

    @property
    def seen_signal(self) -> RewardSignal:
        """What the estimator was given for :attr:`own_signal`."""
        return self._own[1]

    @cached_property
    def _own(self) -> tuple[Rollout, RewardSignal]:
        return self.signal(self.groups)

    @cached_property
    def pattern(self) -> Tensor:
        """Numbers in [-1, 1] that depend on sample and position alone, shape [b, T]."""
        return pattern_of(self.rows).to(self.logprobs.dtype)

    @cached_property
    def whole_step(self) -> StepFound:
        """The update stage on :attr:`rows` in one microbatch, once the policy has moved."""
        return self.step([list(range(len(self.rows)))])

    @property
    def has_critic(self) -> bool:
        """Whether there are values to learn."""
        return self.rows.values is not None

    def prepared(self, view: LossView) -> LossView:
        """The view with what the loss finds out from a whole step, which here is the view itself."""
        loss = self.subject.loss
        if not loss.prepares:
            return view
        with torch.no_grad():
            found = loss.prepare([view], own_sum, own_values)
        return view.replace(prepared=None if found is None else found[0])

    @property
    def on_policy(self) -> Rollout:
        """:attr:`rows` as if every policy were the current one."""
        now = self.logprobs.detach()
        fields = ("old_logprobs", "rollout_logprobs")
        return self.rows.replace(**{name: now for name in fields if getattr(self.rows, name) is not None})

    def table(self, drift: float = 0.0) -> Tensor:
        """Log-probabilities of :attr:`rows`, moved by up to ``drift`` nats in a fixed pattern, as a leaf."""
        moved = self.logprobs + drift * self.pattern
        return torch.where(self.rows.valid_tokens, moved, 0.0).detach().requires_grad_()

    def seen(self, drift: float = 0.0) -> Outputs:
        """What a policy that moved by ``drift`` nats says of :attr:`rows`."""
        table = self.table(drift)
        if self.outputs is not None:
            return self.outputs._replace(logprobs=table)
        values = self.rows.values
        return Outputs(table, torch.full_like(table, 0.5), None if values is None else values.nan_to_num())

    def view(self, rows: Rollout | None = None, drift: float = 0.3, *, entropy_gradient: bool = False) -> LossView:
        """What losses and corrections see of :attr:`rows`, or of a changed copy, once the policy has moved."""
        outputs = self.seen(drift)
        outputs = outputs._replace(entropy=outputs.entropy.detach().requires_grad_(entropy_gradient))
        return view_of(self.rows if rows is None else rows, outputs, entropy_gradient=entropy_gradient)

    def step(
        self, partition: Sequence[Sequence[int]], rows: Rollout | None = None, *, drift: float = 0.3,
        contributions: Corrections | None = None,
    ) -> StepFound:  # fmt: skip
        """The update stage on :attr:`rows`, cut into microbatches, without a model."""
        rollout, seen = self.rows if rows is None else rows, self.seen(drift)
        table = seen.logprobs
        plan = plan_of_rows(rollout.to("cpu"), [[list(part) for part in partition]], packed=self.subject.facts.packing)
        microbatches = plan.to(rollout.groups.device).step(0)
        tables = {id(microbatch.layout): microbatch.index for microbatch in microbatches}

        def policy(layout: Any) -> Outputs:
            index, (number, width) = tables[id(layout)], layout.shape
            if not len(index):
                nothing = table.sum() * 0 + table.new_zeros(number, width)
                return Outputs(nothing, nothing.detach(), None if seen.values is None else nothing)
            return Outputs(*(None if part is None else part[index, :width] for part in seen))  # pyright: ignore[reportArgumentType]

        totals = list[float]()

        def backward(loss: Tensor) -> None:
            totals.append(float(loss.detach()))
            if loss.requires_grad:
                loss.backward()

        with distributed.alone():
            found = accumulated(
                rollout, microbatches, cast(PolicyModel, policy), self.subject.objective(contributions),
                global_sum=own_sum, global_concat=own_values, around=lambda _last: nullcontext(), backward=backward,
            )  # fmt: skip
        gradient = torch.zeros_like(table) if table.grad is None else table.grad
        return StepFound(found.parts, gradient, sum(totals))


def pattern_of(rows: Rollout) -> Tensor:
    """Numbers in [-1, 1] that depend on sample and position alone, shape [b, T]."""
    position = torch.arange(rows.width, device=rows.groups.device)
    return torch.sin(1.0 + 3.0 * rows.sample_ids[:, None] + 5.0 * position)
