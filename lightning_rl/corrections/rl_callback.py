"""RLCallback: base class of corrections, Lightning callbacks that contribute to the training signal."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from jaxtyping import Bool, Float
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.trace import StepTrace
from lightning_rl.corrections.view import LossView
from lightning_rl.distributed import ALONE, Collectives
from lightning_rl.rollout import Rollout
from lightning_rl.samples import Completion, Request, RewardCall
from lightning_rl.signal.reductions import Reduction
from lightning_rl.signal.reward_domain import RewardDomain
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.naming import CheckedNames

Policy = Literal["current", "old", "rollout"]
Ratio = tuple[Policy, Policy]
RLCallbackT = TypeVar("RLCallbackT", bound="RLCallback")


@dataclass(frozen=True, slots=True)
class Contribution:
    """Description of a contribution method.

    Attributes:
        when: ``"prompts"`` (called with the number of prompts to take), ``"sampling"`` or ``"signal"`` (called with the
            rollout), ``"update"`` (called with the view of a microbatch) or ``"watch"`` (observes and returns nothing).
        returns: ``"numbers"``, ``"row mask"``, ``"row float"``, ``"token mask"``, ``"token float"``, ``"term"``,
            ``"tensors"``, ``"context"``, ``"stats"`` or ``"nothing"``.
        combined_by: Operation that combines the contributions of several callbacks.
        affects: ``"prompts"``, ``"rows"``, ``"rewards"``, ``"policy loss"``, ``"loss"``, ``"forward"``, or ``""`` if
            the method does not change the training signal itself.
    """

    when: Literal["prompts", "sampling", "signal", "update", "watch"]
    returns: str
    combined_by: str
    affects: str = ""


CONTRIBUTIONS: Mapping[str, Contribution] = {
    "choose_rows": Contribution("prompts", "numbers", "one alone", "prompts"),
    "reward_mask": Contribution("sampling", "row mask", "and", "rewards"),
    "replace_reward": Contribution("sampling", "row float", "one alone", "rewards"),
    "reward_bonus": Contribution("sampling", "row float", "sum", "rewards"),
    "keep_groups": Contribution("sampling", "row mask", "and", "prompts"),
    "exclude": Contribution("sampling", "row mask", "or", "rows"),
    "provide": Contribution("signal", "tensors", "disjoint union"),
    "token_reward": Contribution("signal", "token float", "sum", "rewards"),
    "sequence_mask": Contribution("update", "row mask", "and", "policy loss"),
    "token_mask": Contribution("update", "token mask", "and", "policy loss"),
    "token_weight": Contribution("update", "token float", "product", "policy loss"),
    "loss_term": Contribution("update", "term", "sum", "loss"),
    "forward_context": Contribution("update", "context", "nesting", "forward"),
    "rollout_metrics": Contribution("signal", "stats", "merging"),
    "metrics": Contribution("update", "stats", "merging"),
    "observe_generated": Contribution("watch", "nothing", ""),
    "observe_rewards": Contribution("watch", "nothing", ""),
    "observe": Contribution("watch", "nothing", ""),
    "observe_step": Contribution("watch", "nothing", ""),
}
"""Every contribution method, in the order of calls."""

BEFORE_LOGPROBS = ("reward_mask", "keep_groups", "observe_rewards", "exclude")
BEFORE_ADVANTAGES = (*BEFORE_LOGPROBS, "provide", "replace_reward", "reward_bonus", "token_reward")
MADE_AFTER = {
    **dict.fromkeys(("old_logprobs", "ref_logprobs", "values"), BEFORE_LOGPROBS),
    **dict.fromkeys(("advantages", "returns"), BEFORE_ADVANTAGES),
}
"""Fields of a rollout that do not exist yet in the listed contribution methods."""

POLICY_LOSS_FACTORS = tuple(name for name, entry in CONTRIBUTIONS.items() if entry.affects == "policy loss")
REWARDS = tuple(
    name for name, entry in CONTRIBUTIONS.items() if entry.affects == "rewards" and "float" in entry.returns
)
ROW_REWARDS = tuple(name for name in REWARDS if CONTRIBUTIONS[name].returns == "row float")
TOKEN_REWARDS = tuple(name for name in REWARDS if CONTRIBUTIONS[name].returns == "token float")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """Term added to the loss: ``coef`` times the reduced ``per_token``, such as 0.05 times the KL [[0.1, 0.3]].

    Args:
        per_token: Loss per token with gradient, shape [b, T].
        coef: Coefficient of the reduced term.
        reduction: Reduction of the term; None for the module's reduction.
        masked: Apply the masks and weights of the corrections, as to the policy loss.
        follows_policy_loss: Weigh each token by the derivative of the reduced policy loss by its log-probability,
            instead of a reduction. The derivative contains advantage, ratio, clip, masks and weights.
    """

    per_token: Float[Tensor, "B T"]
    coef: float
    reduction: Reduction | None = None
    masked: bool = False
    follows_policy_loss: bool = False


class RLCallback(CheckedNames, Callback):
    """Base class of corrections. Each overridden method contributes to the training signal and returns a new value.

    Arguments must not be modified in place; the core raises an error that names the callback. Contributions of several
    callbacks are combined with commutative operations, in the order of their names.

    Attributes:
        name: Stem of the callback's file and prefix of its metrics; unique in a run, see :meth:`with_name`.
        reads: Names of the rollout fields that its once-per-rollout methods need.
        reads_at_loss: Names of the fields that its loss-time methods need.
        provides: Names of the tensors that ``provide`` returns, such as ``"extras/difficulty"``; empty for any. Checked
            at setup against the fields that others read.
        records: Names of the extras that the engine has to record for every token.
        ratio: (numerator, denominator) of the importance ratio of its weight; None for masks and terms.
        alternative: Replacement to suggest in error messages if this correction is incompatible.
        replaces: Names of corrections with the same effect, which cannot be combined with it.
        idle_beside: Names of corrections beside which it has no effect.
        findings: Findings about the run, which the report shows.
        compares_rows: True if its reward or bonus of a row depends on other rows.
        scales_rewards: True if its reward or bonus grows with the raw reward, so that a constant added to a group
            matters.
        domain: Raw rewards for which it is defined; a rollout with others ends the run. None for any.
        compares_groups: True if it compares the samples of a prompt, which requires groups of more than one.
        batch_statistics: True if its values of a row depend on rows of other prompts, such as through a batch mean; the
            audit reports such a dependency otherwise.
        penalizes_kl: True if its token reward is a KL penalty, logged as ``kl/penalty``; others are logged as
            ``<callback>/token_reward``.
        chooses_rows: True if its loss term skips rows, so that it may train nothing.
        token_wise: True if its contributions of a token at the update depend on no other token, so that the contexts of
            a long sample may be in different microbatches. Each class declares it for itself.
        trains_entropy: True if its loss term needs the gradient of ``view.entropy``.
        max_rounds: Maximum number of sampling rounds per rollout, if it filters groups.
        collectives: Operations over the ranks of the run; set by the core at setup.
        initial: State before the first run; set by the core.
    """

    name: str = ""
    reads: tuple[str, ...] = ()
    reads_at_loss: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    ratio: Ratio | None = None
    alternative: str | None = None
    replaces: tuple[str, ...] = ()
    idle_beside: tuple[str, ...] = ()
    findings: Sequence[Finding] = ()
    compares_rows: bool = False
    scales_rewards: bool = False
    domain: RewardDomain | None = None
    compares_groups: bool = False
    batch_statistics: bool = False
    penalizes_kl: bool = False
    chooses_rows: bool = False
    token_wise: bool = False
    trains_entropy: bool = False
    max_rounds: int = 10
    collectives: Collectives = ALONE
    initial: Mapping[str, Any] = MappingProxyType({})

    @property
    @override
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint: its name."""
        return self.name

    @property
    def contributes(self) -> frozenset[str]:
        """Names of the contribution methods of this callback, by default those that its class overrides."""
        return frozenset(m for m in CONTRIBUTIONS if getattr(type(self), m) is not getattr(RLCallback, m))

    @property
    def affects(self) -> bool:
        """True if it changes the training signal, False if it only observes."""
        return any(CONTRIBUTIONS[m].affects or CONTRIBUTIONS[m].returns == "tensors" for m in self.contributes)

    def with_name(self: RLCallbackT, name: str) -> RLCallbackT:
        """Return a copy under another name, to use a correction twice in one run."""
        twin = copy.copy(self)
        twin.name = name
        return twin

    def choose_rows(self, number: int) -> Sequence[int]:
        """Return the row of the data for each of the next prompts, equal on all ranks; for *one* callback *alone*.

        The data module keeps them, so that a place of the stream has the same row in all reads and after a resume.
        """
        raise NotImplementedError

    def reward_mask(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        """Return the rows that enter the reward and its statistics; combined by *and*."""
        raise NotImplementedError

    def replace_reward(self, rollout: Rollout) -> Float[Tensor, " B"]:
        """Return the task reward of each row in place of the raw one; for *one* callback of a run *alone*."""
        raise NotImplementedError

    def reward_bonus(self, rollout: Rollout) -> Float[Tensor, " B"]:
        """Return the value to add to the task reward of each row; combined by *sum*."""
        raise NotImplementedError

    def keep_groups(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        """Return the rows whose group is kept, equal within a group; others are replaced; combined by *and*."""
        raise NotImplementedError

    def exclude(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        """Return the rows to exclude from training, denominators included; combined by *or*."""
        raise NotImplementedError

    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        """Return tensors by ``extras/<name>`` ([B, ...]) or ``token_extras/<name>`` ([B, T, ...]); *disjoint union*."""
        raise NotImplementedError

    def token_reward(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        """Return the reward of each token, for estimators that work per token; combined by *sum*."""
        raise NotImplementedError

    def sequence_mask(self, view: LossView) -> Bool[Tensor, " B"]:
        """Return the rows whose policy loss is kept; combined by *and*."""
        raise NotImplementedError

    def token_mask(self, view: LossView) -> Bool[Tensor, "B T"]:
        """Return the tokens whose policy loss is kept; combined by *and*."""
        raise NotImplementedError

    def token_weight(self, view: LossView) -> Float[Tensor, "B T"]:
        """Return a factor on the policy loss of each token, without gradient; combined by *product*."""
        raise NotImplementedError

    def loss_term(self, view: LossView) -> LossTerm:
        """Return a term to add to the loss, over all valid tokens; combined by *sum*."""
        raise NotImplementedError

    def forward_context(self, rows: Rollout) -> AbstractContextManager[object]:
        """Return a context for every training forward of the policy (old, update); *nested* in order of the names."""
        del rows
        return nullcontext()

    def rollout_metrics(self, rollout: Rollout) -> Mapping[str, Stat]:
        """Return statistics of a finished rollout, before any masking, with the same keys at every call."""
        raise NotImplementedError

    def metrics(self, view: LossView) -> Mapping[str, Stat]:
        """Return statistics of a microbatch, before any masking, with the same keys at every call."""
        raise NotImplementedError

    def observe_generated(self, pairs: Sequence[tuple[Request, Completion]]) -> None:
        """Observe pairs of requests and completions of the engine, in order; none for samples from a checkpoint."""

    def observe_rewards(self, rollout: Rollout, calls: Sequence[RewardCall]) -> None:
        """Observe the samples of one round with their rewards, before masks and filters.

        Args:
            rollout: Samples of the round.
            calls: One per reward function.
        """

    def observe(self, rollout: Rollout) -> None:
        """Observe a finished rollout."""

    def reads_logprobs(self, rollout_number: int) -> bool:
        """Return True if it reads ``rollout_logprobs`` in a rollout; by default, if it declares them.

        Args:
            rollout_number: Number of the rollout, which has not been generated.
        """
        del rollout_number
        return "rollout_logprobs" in (*self.reads, *self.reads_at_loss)

    def traces_step(self, rollout_number: int, step: int) -> bool:
        """Return True to observe an optimizer step, which costs a copy of the policy's outputs.

        Called once before the step, and again before a repetition after memory ran out.

        Args:
            rollout_number: Number of the rollout.
            step: Number of the optimizer step within the rollout.
        """
        del rollout_number, step
        return "observe_step" in self.contributes

    def observe_step(self, trace: StepTrace) -> None:
        """Observe an optimizer step after it has finished; see :meth:`traces_step`."""

    def after_step(self, outputs: Mapping[str, Tensor]) -> None:
        """Adapt coefficients to the outputs of an optimizer step, right after the optimizer.

        An error of another callback in ``on_train_batch_end`` may skip that hook, but not this method.

        Args:
            outputs: What ``training_step`` returns; ``"policy/entropy"`` is missing if the gradient was not finite.
        """
