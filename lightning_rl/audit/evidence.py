"""Evidence that checks inspect, and stages of the run repeated on changed copies of a few rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.audit.audit_error import reads_parameters
from lightning_rl.audit.copies import CopyError, copy_or_refuse
from lightning_rl.audit.environment_repeats import Replay
from lightning_rl.audit.facts import RunFacts
from lightning_rl.audit.forwards import PlainForward
from lightning_rl.audit.prompt_watch import HeldOut, Repeats
from lightning_rl.audit.recomputed_metrics import shaped_parts
from lightning_rl.audit.reward_repeats import RewardReply
from lightning_rl.audit.sampling_statistics import Draw, Earlier, Repeat, odds_of, repeats_of, turns_of
from lightning_rl.audit.step_evidence import RecomputedStep, StepEvidence
from lightning_rl.audit.turn_boundaries import Written
from lightning_rl.corrections import (
    CONTRIBUTIONS,
    OUTPUTS,
    REWARDS,
    Corrections,
    LossTerm,
    LossView,
    ReplayCorrections,
    RLCallback,
    Stat,
)
from lightning_rl.generation import Completion, Request
from lightning_rl.losses import FunctionLoss
from lightning_rl.policy import Outputs
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import TURN_REWARDS, Rollout
from lightning_rl.rollouts.estimate_signal import estimate_advantages
from lightning_rl.signal.masked import local_sum
from lightning_rl.signal.selection import local_values
from lightning_rl.update import accumulate_gradient, from_table, loss_view
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.naming import name_of

SHOWN_A_ROLLOUT = tuple(
    name for name, entry in CONTRIBUTIONS.items() if entry.when in ("sampling", "signal") and entry.returns != "tensors"
)
SHOWN_A_VIEW = tuple(
    name for name, entry in CONTRIBUTIONS.items() if entry.when == "update" and entry.returns != "context"
)


def repeatable(algorithm: Algorithm, callbacks: Iterable[RLCallback]) -> Algorithm:
    """Return an algorithm with copied state, without observing corrections and without collectives.

    A part whose state cannot be copied raises :class:`~lightning_rl.audit.copies.CopyError` when it is called.
    """
    repeated = [copy_or_refuse(callback, callback.contributes) for callback in callbacks if _follows_rows(callback)]
    prepare = ["prepare"] if algorithm.loss.prepares else []
    return algorithm.replace(
        loss=copy_or_refuse(algorithm.loss, ["__call__", "metrics", *prepare]),
        advantages=copy_or_refuse(algorithm.advantages, ["__call__"]),
        corrections=ReplayCorrections(repeated).alone(),
    )


def _follows_rows(callback: RLCallback) -> bool:
    """Return True if a correction contributes values that depend only on its rows."""
    watches = any(CONTRIBUTIONS[method].when == "watch" for method in callback.contributes)
    return (
        callback.affects
        or "metrics" in callback.contributes
        or ("rollout_metrics" in callback.contributes and not watches)
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
class Evidence:
    """A finished rollout, and everything that a check needs to inspect it without a model.

    Attributes:
        algorithm: Algorithm to check, without observing corrections.
        facts: Plain values of the run.
        rollout: Finished rollout of this rank.
        groups: A few whole groups of it.
        rows: A few trained rows of these groups, cut to the longest.
        number: Number of the rollout.
        outputs: Outputs of the policy on ``rows`` before the first update; None without a policy.
        double_temperature: Outputs at twice the temperature; None without a critic.
        value_moves: Changes of the critic's values by that of a token, see
            :func:`~lightning_rl.audit.forwards.value_moves`.
        batches: Requests and completions of this rollout by batch.
        calls: Calls of the reward functions.
        rounds: Scored samples of each generation round, before filters.
        replies: Results of repeated reward calls.
        draws: A few sampled completions, scored by the policy.
        earlier: Summaries of earlier audited rollouts.
        stream_prompts: Prompts of the training data at the places of a few samples, by sample id.
        strange_columns: Names of reward functions that got columns of another row, with the samples.
        reward_prompts: Token ids of prompts that the rewards got, by sample id.
        repeats: Counts of repeated rows of the training data; None if repeats are intended.
        held_out: Held-out prompts that were trained; None without a held-out set.
        text: Function from token ids to the text that rewards get; None if unknown.
        plain: Some ``rows`` scored by a model's plain forward.
        token_gradients: Gradients of a few log-probabilities by the run's forward and by the model's plain one, and of
            their scores, [N] each; empty if unavailable.
        reference_weights: A few weights of the reference at an earlier audit and now, [N] each, or empty.
        reference_scores: Log-probabilities of fixed tokens at the first audit and now under the reference, [N] each; at
            the start of a run, the first ones are the policy's, which the default reference is a copy of. Empty without
            a reference.
        reference_mover: Hook that changed the reference; empty if unknown.
        written: Tokens of conversations that were not sampled, with those of the chat template.
        judged_otherwise: Ids of conversations of which rewards score other tokens than the last answer.
        words_logprob: Mean log-probability of environment tokens in a row of each group; None if unknown.
        replays: Repeated conversations.
        step: An optimizer step; None before the first.
        numbers: Numeric attributes of the corrections, by name, for each rank.
        edits: Findings of edited fields of the rollout.
    """

    algorithm: Algorithm
    facts: RunFacts
    rollout: Rollout
    groups: Rollout
    rows: Rollout
    number: int = 0
    outputs: Outputs | None = None
    double_temperature: Outputs | None = None
    value_moves: Tensor | None = None
    batches: Sequence[Sequence[tuple[Request, Completion]]] = ()
    calls: Sequence[RewardCall] = ()
    rounds: Sequence[Rollout] = ()
    replies: Sequence[RewardReply] = ()
    draws: Sequence[Draw] = ()
    earlier: Sequence[Earlier] = ()
    stream_prompts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    strange_columns: Mapping[str, Sequence[int]] = field(default_factory=dict)
    reward_prompts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    repeats: Repeats | None = None
    held_out: HeldOut | None = None
    text: Callable[[Sequence[int]], str] | None = None
    plain: Sequence[PlainForward] = ()
    token_gradients: tuple[Tensor, ...] = ()
    reference_weights: tuple[Tensor, ...] = ()
    reference_scores: tuple[Tensor, ...] = ()
    reference_mover: str = ""
    written: Sequence[Written] = ()
    judged_otherwise: Sequence[int] = ()
    words_logprob: float | None = None
    replays: Sequence[Replay] = ()
    step: StepEvidence | None = None
    numbers: Sequence[Mapping[str, Mapping[str, float]]] = ()
    edits: Sequence[Finding] = ()

    @property
    def drawn_rewards(self) -> dict[int, float]:
        """Reward of each sample when it was scored, before the signal stage."""
        pairs = [zip(part.sample_ids.tolist(), part.rewards.tolist(), strict=True) for part in self.rounds]
        return {sample: reward for part in pairs for sample, reward in part}

    @property
    def scored_rollout(self) -> Rollout:
        """The rollout with the rewards of its samples when they were scored."""
        drawn, rewards = self.drawn_rewards, self.rollout.rewards
        pairs = zip(self.rollout.sample_ids.tolist(), rewards.tolist(), strict=True)
        return self.rollout.replace(rewards=rewards.new_tensor([drawn.get(sample, reward) for sample, reward in pairs]))

    @cached_property
    def turns(self) -> Mapping[int, Sequence[tuple[Request, Completion]]]:
        """Requests and completions of each sample, turn by turn."""
        return turns_of(self.batches)

    @cached_property
    def sample_repeats(self) -> list[Repeat]:
        """Repeated beginnings of the samples."""
        return repeats_of(self.batches, self.earlier)

    @cached_property
    def odds(self) -> Tensor:
        """Log-likelihood ratios of engines that draw other tokens, [W]."""
        return odds_of(self.draws, self.facts.tolerance, self.earlier)

    @cached_property
    def swapped_samples(self) -> list[int]:
        """Samples whose request has the completion of another one, by the engine's own account."""
        return [
            request.sample_id
            for batch in self.batches
            for request, completion in batch
            if completion.sample_id not in (None, request.sample_id)
        ]

    @property
    def names(self) -> dict[str, str]:
        """Names of the parts of the run in findings."""
        loss = self.algorithm.loss
        return {
            "estimator": self.algorithm.advantages.name,
            "loss": name_of(loss.function if isinstance(loss, FunctionLoss) else loss),
            "reduction": name_of(self.algorithm.reduction),
            "engine": self.facts.engine,
            "data": self.facts.data,
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
    def rewards_of_run(self) -> Tensor | None:
        """Shaped rewards of :attr:`groups` by their definition, [B, T] float64; None if they depend on other ranks."""
        across = any(one.compares_prompts for one in self.contributions(*REWARDS))
        if across and self.facts.ranks > 1:
            return None
        rollout = (self.rollout if across else self.groups).sanitize()
        scores, shaped = shaped_parts(rollout, self.algorithm.corrections)
        earned = rollout.token_extras.get(TURN_REWARDS) if self.algorithm.advantages.turn_rewards else None
        if earned is not None:
            earned = torch.where(rollout.valid_tokens & rollout.rewarded[:, None], earned.double(), 0.0)
            scores, shaped = scores - earned.sum(-1), shaped + earned
        order = rollout.valid_tokens.cumsum(-1)
        last = rollout.valid_tokens & (order == order[:, -1:])
        shaped = shaped + torch.where(last, scores[:, None], 0.0)
        places = (self.groups.sample_ids[:, None] == rollout.sample_ids).int().argmax(-1)
        return shaped[places, : self.groups.width]

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


def recompute_step(evidence: Evidence, step: StepEvidence) -> None:
    """Recompute an optimizer step in one piece, with the rows of all ranks in every denominator, and store it in it."""
    if not len(step.rows) or (evidence.algorithm.loss.prepares and len(step.masks) > 1):
        step.unknown = "this rank had no rows, or the loss needs those of other ranks"
        return
    try:
        step.recomputed = _in_one_piece(evidence, step)
        if step.recomputed is None:
            step.unknown = "a loss or term reads parameters of a model itself, which the step has changed"
    except CopyError as error:
        step.unknown = str(error)


def _in_one_piece(evidence: Evidence, step: StepEvidence) -> RecomputedStep | None:
    algorithm = evidence.algorithm
    outputs = {name: value for name, value in step.outputs._asdict().items() if value is not None}
    leaves = {name: value.detach().requires_grad_() for name, value in outputs.items()}
    view = loss_view(step.rows, step.outputs._replace(**leaves), entropy_gradient=algorithm.trains_entropy)
    loss = algorithm.microbatch_loss(
        evidence.prepare(view.sanitize()), lambda reduction: step.weights_over_ranks(reduction).to(view.logprobs.device)
    )
    if reads_parameters(loss.total):
        return None
    gradients = torch.autograd.grad(
        loss.total + sum(leaf.sum() * 0 for leaf in leaves.values()), list(leaves.values()), materialize_grads=True
    )
    by_name = dict(zip(leaves, gradients, strict=True))
    further = {spec.name: by_name[spec.output] for spec in OUTPUTS if spec.output in by_name}
    return RecomputedStep(further.pop("logprobs"), further, loss.parts)


def callback_of_one_method(method: str, function: Callable[[Any], Any], name: str = "zz_audit") -> RLCallback:
    """Return a correction with one contribution."""
    return type("Only", (RLCallback,), {"name": name, method: lambda _self, shown: function(shown)})()


def pattern_of(rows: Rollout) -> Tensor:
    """Return numbers in [-1, 1] that depend only on sample and position, [b, T]."""
    position = torch.arange(rows.width, device=rows.groups.device)
    return torch.sin(1.0 + 3.0 * rows.sample_ids[:, None] + 5.0 * position)
