"""Evidence that checks inspect, and stages of the run repeated on changed copies of a few rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl.audit.facts import RunFacts
from lightning_rl.audit.forwards import PlainForward
from lightning_rl.audit.prompt_watch import HeldOut, Repeats
from lightning_rl.audit.reward_repeats import RewardReply
from lightning_rl.audit.sampling_statistics import Draw, Earlier, Repeat, odds_of, repeats_of, turns_of
from lightning_rl.audit.step_evidence import RecomputedStep, StepEvidence
from lightning_rl.audit.turn_boundaries import Written
from lightning_rl.corrections import (
    OUTPUTS,
    REWARDS,
)
from lightning_rl.data import Prompt
from lightning_rl.generation import Completion, Request
from lightning_rl.policy import Outputs
from lightning_rl.rewards import RewardCall
from lightning_rl.rollout import TURN_REWARDS, Rollout
from lightning_rl.testing.properties.case import AlgorithmCase
from lightning_rl.testing.properties.comparisons import Skip, reads_parameters
from lightning_rl.testing.properties.copies import CopyError
from lightning_rl.testing.properties.definitions import shaped_parts
from lightning_rl.update import loss_view
from lightning_rl.utils.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Evidence(AlgorithmCase):
    """A finished rollout, and everything that a check needs to inspect it without a model.

    Attributes:
        facts: Plain values of the run.
        number: Number of the rollout.
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
        strange_pictures: Places of prompts with other pictures than their rows, and of those with another output than
            the processor makes, with its name, by data set with pictures.
        strange_columns: Names of reward functions that got columns of another row, with the samples.
        reward_prompts: Token ids of prompts that the rewards got, by sample id.
        repeats: Counts of repeated rows of the training data; None if repeats are intended.
        held_out: Held-out prompts that were trained; None without a held-out set.
        text: Function from token ids to the text that rewards get; None if unknown.
        plain: Some ``rows`` scored by a model's plain forward.
        token_gradients: Gradients of a few log-probabilities by the run's forward and by the model's plain one, and of
            their scores, [N] each, and the same with respect to embeddings, if they train; empty if unavailable.
        reference_weights: A few weights of the reference at an earlier audit and now, [N] each, or empty.
        reference_scores: Log-probabilities of fixed tokens at the first audit and now under the reference, [N] each; at
            the start of a run, the first ones are the policy's, which the default reference is a copy of. Empty without
            a reference.
        reference_mover: Hook that changed the reference; empty if unknown.
        written: Tokens of conversations that were not sampled, with those of the chat template.
        judged_otherwise: Ids of conversations of which rewards score other tokens than the last answer.
        words_logprob: Mean log-probability of environment tokens in a row of each group; None if unknown.
        replays: Findings about repeated conversations, and reasons why some were not repeated.
        step: An optimizer step; None before the first.
        edits: Findings of edited fields of the rollout.
    """

    facts: RunFacts
    number: int = 0
    double_temperature: Outputs | None = None
    value_moves: Tensor | None = None
    batches: Sequence[Sequence[tuple[Request, Completion]]] = ()
    calls: Sequence[RewardCall] = ()
    rounds: Sequence[Rollout] = ()
    replies: Sequence[RewardReply] = ()
    draws: Sequence[Draw] = ()
    earlier: Sequence[Earlier] = ()
    stream_prompts: Mapping[int, Prompt] = field(default_factory=dict)
    strange_pictures: Mapping[str, tuple[Sequence[int], Mapping[int, str]]] = field(default_factory=dict)
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
    replays: Sequence[Finding | Skip] = ()
    step: StepEvidence | None = None
    edits: Sequence[Finding] = ()

    @property
    @override
    def is_empty(self) -> bool:
        return not self.edits and not len(self.rollout)

    @override
    def inspected_rows(self, *, of_step: bool) -> Rollout:
        return self.step.rows if of_step and self.step is not None else self.rows

    @property
    @override
    def names(self) -> dict[str, str]:
        return {**super().names, "engine": self.facts.engine, "data": self.facts.data}

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
