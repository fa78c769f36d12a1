"""Algorithm and rows that checks inspect, and stages of the algorithm repeated on changed copies of the rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import CONTRIBUTIONS, OUTPUTS, Corrections, LossTerm, LossView, RLCallback, Stat
from lightning_rl.losses import FunctionLoss
from lightning_rl.policy import Outputs
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.estimate_signal import estimate_advantages
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.selection import local_values
from lightning_rl.update import accumulate_gradient, from_table, loss_view
from lightning_rl.utils.naming import name_of

SHOWN_A_ROLLOUT = tuple(
    name for name, entry in CONTRIBUTIONS.items() if entry.when in ("sampling", "signal") and entry.returns != "tensors"
)
SHOWN_A_VIEW = tuple(
    name for name, entry in CONTRIBUTIONS.items() if entry.when == "update" and entry.returns != "context"
)


class CorrectionMethod(NamedTuple):
    """A contribution of a correction, as a culprit and as a function."""

    callback: RLCallback
    method: str

    def __str__(self) -> str:
        """Return the name in findings."""
        return f"callback {self.callback.name}.{self.method}"

    def __call__(self, rows: Rollout) -> Any:
        """Return the contribution to a rollout."""
        return getattr(self.callback, self.method)(rows)

    def tensors(self, rows: Rollout) -> dict[str, Tensor]:
        """Return the contribution to a rollout as tensors by name: statistics as their moments."""
        return self.by_name(self(rows))

    def by_name(self, result: Any) -> dict[str, Tensor]:
        """Return a result of the contribution as tensors by name."""
        if isinstance(result, Mapping):
            return {name: part.moments if isinstance(part, Stat) else part.detach() for name, part in result.items()}
        if isinstance(result, LossTerm):
            return {self.method: result.per_token.detach() * result.coef}
        return {self.method: result.detach()}

    @property
    def compares_prompts(self) -> bool:
        """True if the correction declares that it compares rows of several prompts."""
        return self.callback.batch_statistics or (self.callback.compares_rows and not self.callback.compares_groups)


class TableStep(NamedTuple):
    """An optimizer step on a few rows, with a table of log-probabilities instead of a policy."""

    parts: dict[str, Tensor]
    gradient: Tensor  # with respect to the table, [b, T]
    total: float  # loss, over all microbatches


@dataclass(frozen=True, kw_only=True)
class AlgorithmCase:
    """An algorithm, and a finished rollout on which its properties are checked without a model.

    Attributes:
        algorithm: Algorithm to check, without observing corrections.
        rollout: Finished rollout of this rank.
        groups: A few whole groups of it.
        rows: A few trained rows of these groups, cut to the longest.
        outputs: Outputs of the policy on ``rows`` before the first update; None without a policy.
        numbers: Numeric attributes of the corrections, by name, for each rank.
    """

    algorithm: Algorithm
    rollout: Rollout
    groups: Rollout
    rows: Rollout
    outputs: Outputs | None = None
    numbers: Sequence[Mapping[str, Mapping[str, float]]] = ()

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to check."""
        return not len(self.rollout)

    def inspected_rows(self, *, of_step: bool) -> Rollout:
        """Return the rows to which a finding without samples applies, of an optimizer step or of the rollout."""
        del of_step
        return self.rows

    @property
    def names(self) -> dict[str, str]:
        """Names of the parts of the run in findings."""
        loss = self.algorithm.loss
        return {
            "estimator": self.algorithm.advantages.name,
            "loss": name_of(loss.function if isinstance(loss, FunctionLoss) else loss),
            "reduction": name_of(self.algorithm.reduction),
        }

    def contributions(self, *methods: str) -> list[CorrectionMethod]:
        """Return all contributions of the given methods."""
        corrections = self.algorithm.corrections
        return [
            CorrectionMethod(callback, method) for method in methods for callback in corrections.contributors(method)
        ]

    def signal(self, rollout: Rollout) -> tuple[Rollout, Tensor]:
        """Return a rollout with its signal, computed on this rank only, and its shaped rewards."""
        raw = rollout.replace(advantages=None, returns=None)
        rollout, rewards, _ = estimate_advantages(raw, self.algorithm.advantages, self.algorithm.corrections)
        return rollout, rewards.shaped

    def advantages_of(self, rollout: Rollout) -> Tensor:
        """Return the advantages of a rollout by the signal stage, [B, T]."""
        return self.signal(rollout)[0].require("advantages")

    @cached_property
    def advantages(self) -> Tensor:
        """Advantages of :attr:`groups` by the signal stage, [B, T]."""
        return self.advantages_of(self.groups)

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities of ``rows`` by the policy, or the old ones without a policy, [b, T]."""
        if self.outputs is not None:
            return self.outputs.logprobs
        return torch.where(self.rows.valid_tokens, self.rows.require("old_logprobs"), 0.0)

    @property
    def on_policy(self) -> Rollout:
        """:attr:`rows` with the current log-probabilities as those of every policy."""
        now = self.logprobs.detach()
        fields = ("old_logprobs", "rollout_logprobs")
        return self.rows.replace(**{name: now for name in fields if getattr(self.rows, name) is not None})

    def drift_outputs(self, drift: float) -> Outputs:
        """Return outputs of a policy that moved by up to ``drift`` nats in a fixed pattern; leaf tensors."""
        moved = self.logprobs + drift * pattern_of(self.rows).to(self.logprobs.dtype)
        table = torch.where(self.rows.valid_tokens, moved, 0.0).detach().requires_grad_()
        if self.outputs is not None:
            return self.outputs._replace(logprobs=table)
        values = self.rows.values
        values = None if values is None else values.nan_to_num()
        small = {spec.output: torch.full_like(table, 0.1) for spec in OUTPUTS}
        return Outputs(**small)._replace(logprobs=table, entropy=torch.full_like(table, 0.5), values=values)

    def view(self, rows: Rollout | None = None, drift: float = 0.3, *, entropy_gradient: bool = False) -> LossView:
        """Return the view of :attr:`rows`, or of a changed copy, after the policy has moved."""
        outputs = self.drift_outputs(drift)
        outputs = outputs._replace(entropy=outputs.entropy.detach().requires_grad_(entropy_gradient))
        view = loss_view(self.rows if rows is None else rows, outputs, entropy_gradient=entropy_gradient)
        return view.replace(**view.further_leaves())

    def prepare(self, view: LossView) -> LossView:
        """Return the view with the result of ``loss.prepare``, with this view as the whole step."""
        loss = self.algorithm.loss
        if not loss.prepares:
            return view
        with torch.no_grad():
            prepared = loss.prepare([view], local_sum, local_values)
        return view.replace(prepared=None if prepared is None else prepared[0])

    @cached_property
    def whole_step(self) -> TableStep:
        """Update stage on :attr:`rows` in one microbatch, after the policy has moved."""
        return self.table_step()

    def table_step(
        self,
        rows: Rollout | None = None,
        *,
        partition: Sequence[Sequence[int]] | None = None,
        corrections: Corrections | None = None,
    ) -> TableStep:
        """Run the update stage on :attr:`rows` or a changed copy without a model, in one or several microbatches."""
        rollout, outputs, totals = self.rows if rows is None else rows, self.drift_outputs(0.3), list[float]()
        table = outputs.logprobs
        summed = torch.zeros_like(table)
        cut = [range(len(rollout))] if partition is None else partition
        plan = plan_of_rows(rollout.to("cpu"), [[list(part) for part in cut]], packed=False)
        microbatches = plan.to(rollout.groups.device).step(0)
        algorithm = self.algorithm.replace(corrections=corrections or self.algorithm.corrections)

        def backward(loss: Tensor) -> None:
            totals.append(float(loss.detach()))
            if loss.requires_grad:  # not backward(), which would add to gradients of the policy that a loss reads
                summed.add_(torch.autograd.grad(loss, table, materialize_grads=True, allow_unused=True)[0])

        gradient = accumulate_gradient(rollout, microbatches, from_table(outputs), algorithm, backward=backward)
        return TableStep(gradient.parts, summed, sum(totals))


def callback_of_one_method(method: str, function: Callable[[Any], Any], name: str = "zz_audit") -> RLCallback:
    """Return a correction with one contribution."""
    return type("Only", (RLCallback,), {"name": name, method: lambda _self, shown: function(shown)})()


def pattern_of(rows: Rollout) -> Tensor:
    """Return numbers in [-1, 1] that depend only on sample and position, [b, T]."""
    position = torch.arange(rows.width, device=rows.groups.device)
    return torch.sin(1.0 + 3.0 * rows.sample_ids[:, None] + 5.0 * position)


def holds_logprobs(tensor: Tensor, rows: Rollout) -> bool:
    """Return True if an extra of a rollout can be the log-probabilities of a policy, which are below 0."""
    alike = tensor.is_floating_point() and tensor.shape == rows.valid_tokens.shape
    return alike and float(tensor[rows.valid_tokens].sum()) < 0
